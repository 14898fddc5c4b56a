"""Clients for S3, and copies of output folders, against a server that speaks its protocol."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

from simpletuner.annexes.publishing.uploads import BucketCopy
from simpletuner.config.publishing import PublishConfig
from simpletuner.s3 import S3Login
from simpletuner.weights.lora_names import LORA_FILE
from tests.workspace import Workspace


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def test_a_store_by_its_address(endpoint: str) -> None:
    client = S3Login(
        endpoint, "us-east-1", access_key="me", secret_key="secret", headers={"X-Project": "stars"}
    ).client()
    sent: list[dict[str, str]] = []
    client.meta.events.register("before-send.s3", lambda request, **_: sent.append(dict(request.headers)))
    client.create_bucket(Bucket="pictures")
    client.put_object(Bucket="pictures", Key="a b/ä.txt", Body=b"star")
    assert client.get_object(Bucket="pictures", Key="a b/ä.txt")["Body"].read() == b"star"
    assert all(headers["X-Project"] in ("stars", b"stars") for headers in sent)


def store(endpoint: str, **keys: Any) -> dict[str, Any]:
    login = {"aws_access_key_id": "me", "secret_key": "open-sesame-secret", "region": "us-east-1"}
    return {"provider": "s3-compatible", "bucket": "runs", "endpoint_url": endpoint, **login, **keys}


def keys_in(client: Any, bucket: str) -> set[str]:
    return {each["Key"] for each in client.list_objects_v2(Bucket=bucket).get("Contents", ())}


def test_an_output_folder_is_copied_and_only_once(endpoint: str, tmp_path: Path) -> None:
    (publish,) = PublishConfig.model_validate(
        {"publishing_config": store(endpoint, base_path="/team/", public_base_url="https://files.example/")}
    ).stores
    client = publish.client()
    client.create_bucket(Bucket="runs")
    for name in ("a.txt", "checkpoint-2/w.bin", "cache/vae/x", "run.lock", "checkpoint-4-tmp/w.bin", ".b.tmp"):
        (tmp_path / "star" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "star" / name).write_text(name)
        os.utime(tmp_path / "star" / name, (0, 0))
    bucket = BucketCopy(publish, tmp_path / "star")
    assert bucket.prepare() == ""
    assert bucket.upload({}, "") == "https://files.example/team/star"
    expected = {"team/star/.simpletuner", "team/star/a.txt", "team/star/checkpoint-2/w.bin"}
    assert keys_in(client, "runs") == expected
    sent: list[str] = []
    bucket._client.meta.events.register("before-send.s3", lambda request, **_: sent.append(request.method))
    (tmp_path / "star" / "a.txt").write_text("A new text")
    bucket.upload({}, "")
    assert sent.count("PUT") == 1, "what is there as it is here stays"
    assert client.get_object(Bucket="runs", Key="team/star/a.txt")["Body"].read() == b"A new text"
    (tmp_path / "star" / "a.txt").write_text("Another 1!")
    os.utime(tmp_path / "star" / "a.txt", (0, 0))
    bucket.upload({}, "")
    changed = client.get_object(Bucket="runs", Key="team/star/a.txt")["Body"].read()
    assert changed == b"Another 1!", "in the same size, and older by its own clock than the copy"


def test_a_run_is_copied_to_a_bucket(
    endpoint: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = {"provider": "b2", "bucket": "none", "endpoint_url": endpoint}
    workspace.path("stores.json").write_text(json.dumps(absent))
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "me")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "open-sesame-secret")
        assert workspace.train("publishing_config=stores.json") == 2
    shown = capsys.readouterr()
    assert "publishing_config: s3://none/output cannot be written" in shown.err
    assert "Loading torch" not in shown.out
    client = S3Login(endpoint, "us-east-1", "me", "secret").client()
    client.create_bucket(Bucket="stars")
    workspace.write_config(publishing_config=[store(endpoint, bucket="stars")], max_train_steps=1)
    assert workspace.train() == 0
    report = client.get_object(Bucket="stars", Key="output/training_report.html")["Body"].read().decode()
    assert '<span class="state finished">' in report
    assert "Uploaded step 1 to s3://stars/output: s3://stars/output" in capsys.readouterr().out
    names = [path for path in workspace.path("output").rglob("*") if path.is_file()]
    assert not [path for path in names if b"open-sesame" in path.read_bytes()]


@pytest.mark.slow(3)
def test_publish_finds_the_keys_where_the_run_had_them(
    endpoint: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the config file, as text or from a variable; those of a command line are announced as not recorded."""
    client = S3Login(endpoint, "us-east-1", "me", "secret").client()
    client.create_bucket(Bucket="kept")
    monkeypatch.setenv("STORE_SECRET", "open-sesame-secret")
    stores = json.dumps(store(endpoint, bucket="kept", secret_key="{env:STORE_SECRET}"))
    workspace.path("stores.json").write_text(stores)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(workspace.folder))
    assert workspace.train("max_train_steps=1", "publishing_config=stores.json") == 0
    assert "publishing_config: its keys are not recorded" in capsys.readouterr().out
    assert workspace.run("publish", "output") == 2
    assert "'command line' does not contain them; pass them again: --publishing_config=" in capsys.readouterr().out
    assert workspace.run("publish", "output", "--publishing_config=stores.json") == 0
    workspace.write_config(publishing_config="stores.json")
    assert workspace.train("max_train_steps=2") == 0
    client.delete_object(Bucket="kept", Key=f"output/{LORA_FILE}")
    capsys.readouterr()
    assert workspace.run("publish", "output") == 0
    shown = capsys.readouterr()
    assert "not recorded" not in shown.out
    assert "open-sesame" not in shown.out + shown.err
    assert client.head_object(Bucket="kept", Key=f"output/{LORA_FILE}")["ContentLength"]


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"provider": "azure"}, "names 'azure', which is not built in; use post_upload_script"),
        ({"provider": "ftp"}, "'ftp' is not one of: s3, backblaze_b2."),
        (
            {"provider": "b2", "region": None, "endpoint_url": None},
            "lacks region (such as us-west-004)",
        ),
        ({"bucket": ""}, "bucket"),
        ({"buckett": "x"}, "Did you mean 'bucket'?"),
    ],
)
def test_stores_are_checked_before_anything_starts(
    keys: dict[str, Any], complaint: str, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_config(publishing_config=store("http://127.0.0.1:9", **keys))
    assert workspace.run("plan") == 2
    shown = capsys.readouterr().err
    assert complaint in shown
    assert "open-sesame" not in shown
