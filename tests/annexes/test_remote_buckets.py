"""type aws against a server that speaks the protocol of S3."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from simpletuner.annexes.remote.collect import collect_cached
from simpletuner.data.entries import DataContext
from tests.annexes.web import picture
from tests.data.test_build import build, fatal


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty bucket `photos`."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    resource = boto3.resource("s3", endpoint_url=server, region_name="us-east-1")
    created = resource.create_bucket(Bucket="photos")
    created.objects.all().delete()
    return created


def entry(server: str, **more: Any) -> dict[str, Any]:
    keys = {"aws_bucket_name": "photos", "aws_endpoint_url": server, "aws_data_prefix": "set"}
    return {"id": "s3", "type": "aws", "caption_strategy": "textfile", **keys, **more}


def fill(bucket: Any) -> None:
    for number, name in enumerate(["a.png", "sub/b.png", "sub/c.jpg"]):
        bucket.put_object(Key=f"set/{name}", Body=picture(number))
        caption = name.rpartition(".")[0] + ".txt"
        bucket.put_object(Key=f"set/{caption}", Body=f"caption of {name}\nanother".encode())


def test_a_plan_that_may_not_fetch_asks_no_server(
    context: DataContext, server: str, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bucket)
    here, asked = replace(context, collect=collect_cached), list[str]()
    (fetched,), _ = build(context, entry(server))
    monkeypatch.setattr("simpletuner.annexes.remote.listers._login", lambda config: asked.append(config.id))
    (dataset,), problems = build(here, entry(server))
    assert not fatal(problems)
    assert dataset.samples == fetched.samples
    (problem,) = fatal(build(here, entry(server, aws_data_prefix="other"))[1])
    assert problem.message == "its files are not fetched yet; `simpletuner plan` fetches them."
    assert problem.kind == "unfetched"
    assert asked == []


def test_objects_keep_their_names_and_unchanged_ones_are_not_fetched_again(
    context: DataContext, server: str, bucket: Any
) -> None:
    fill(bucket)
    extra = ["set/", "set/notes.md", "set/.hidden.png", "set/../../out.png", "set//x.png", "set-old/a.png"]
    extra.append("set/a.png/b.png")  # no folder has both
    for key in extra:
        bucket.put_object(Key=key, Body=picture(8))
    (dataset,), problems = build(context, entry(server))
    assert not fatal(problems)
    assert [sample.name for sample in dataset.samples] == ["a.png", "sub/b.png", "sub/c.jpg"]
    assert dataset.samples[1].captions == ("caption of sub/b.png", "another")
    reasons = {file.name: file.reason for file in dataset.rejected}
    assert reasons == {
        "notes.md": "not a picture",
        ".hidden.png": "hidden",
        "../../out.png": "hidden",
        "/x.png": "unusable name",
        "a.png/b.png": "unusable name",
    }
    assert {line.note for line in dataset.ledger() if line.geometry} == {
        f"s3://photos/set/{sample.name}" for sample in dataset.samples
    }
    times = {sample.name: sample.path.stat().st_mtime_ns for sample in dataset.samples}
    bucket.put_object(Key="set/a.png", Body=picture(50))
    bucket.Object("set/sub/c.jpg").delete()
    (again,), _ = build(context, entry(server))
    assert [sample.name for sample in again.samples] == ["a.png", "sub/b.png"], "what is gone there is gone here"
    assert again.samples[0].content != dataset.samples[0].content
    assert again.samples[1].path.stat().st_mtime_ns == times["sub/b.png"]
    assert (Path(dataset.root) / "sub" / "c.jpg").exists(), "downloads are not deleted"


def test_a_prefix_is_a_folder_and_may_change(context: DataContext, server: str, bucket: Any) -> None:
    fill(bucket)
    build(context, entry(server))
    (dataset,), problems = build(context, entry(server, caption_strategy="filename", aws_data_prefix="/set/sub/"))
    assert not fatal(problems)
    assert {sample.name: sample.captions for sample in dataset.samples} == {"b.png": ("b",), "c.jpg": ("c",)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"aws_bucket_name": "nowhere"}, "the bucket 'nowhere' of .* cannot be listed: .*NoSuchBucket"),
        ({"aws_data_prefix": "nothing"}, "the bucket 'photos' of .*, prefix 'nothing/', contains no objects"),
        ({"aws_endpoint_url": "http://127.0.0.1:9"}, "cannot be listed: Could not connect"),
        ({"aws_endpoint_url": "no address"}, "cannot be listed: Invalid endpoint"),
        ({"aws_bucket_name": "No Bucket!"}, "cannot be listed: .*Invalid bucket name"),
        ({"aws_bucket_name": None}, "is required with type aws"),
        ({"dataset_type": "text_embeds"}, "caches are local"),
    ],
)
def test_what_cannot_be_listed_is_one_clear_problem(
    context: DataContext, server: str, bucket: Any, change: dict[str, Any], words: str
) -> None:
    _, problems = build(context, entry(server, **change))
    found = [problem for problem in fatal(problems) if problem.where.startswith("s3.")]
    assert len(found) == 1
    assert re.search(words, found[0].message)
