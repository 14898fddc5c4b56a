"""The code in docs/EXTENDING.md runs as it stands, or is a copy of the program's."""

from __future__ import annotations

import ast
import io
import re
import tarfile
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest

from simpletuner.annexes import trackers
from simpletuner.annexes.remote import collect
from simpletuner.annexes.trackers import TrackedRun, TrackerEvents, open_trackers
from simpletuner.config import trackers as config_of_trackers
from simpletuner.config.datasets import DatasetConfig
from simpletuner.errors import Problems
from simpletuner.planning.checkpoint_folder import (
    Identity,
    Manifest,
    describe_files,
    prune,
    write_manifest,
)
from simpletuner.reporting.events import EventStream, StateChanged, StepReport
from tests.tools.web_server import picture

PAGE = Path(__file__).parents[2] / "docs" / "EXTENDING.md"
IDENTITY = Identity("kandinsky5-image", "t2i-lite-sft", "lora", 1, 0, "", {})


def code_below(title: str) -> dict[str, Any]:
    """The names that the Python block below a title defines."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, PAGE.name, "exec", dont_inherit=True), names)
    return names


def test_documented_subscriber_writes_the_loss(tmp_path: Path) -> None:
    events = EventStream()
    code_below("A subscriber of events")["subscribe"](events, tmp_path)

    events.publish(StepReport(1, 1, {"train_loss": 0.25}, 1.0))

    assert (tmp_path / "loss.prom").read_text() == "train_loss 0.25\n"


@pytest.mark.parametrize(
    ("title", "source"),
    [
        ("A technique", "simpletuner/techniques/masked_loss.py"),
        ("An option", "simpletuner/config/schema.py"),
    ],
)
def test_documented_code_matches_the_program(title: str, source: str) -> None:
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)

    program = (PAGE.parents[1] / source).read_text(encoding="utf-8")

    assert block in program or indent(block, "    ") in program


@pytest.mark.parametrize("family", ["kandinsky5", "sanavideo"])
def test_documented_family_cost_is_what_families_have(family: str) -> None:
    """A family may give more than the page."""
    line = (
        "TransformerCost(cost_table_of(PACKAGE, shapes), shapes, head, compiled=kernels.compiled)"
    )
    program = (PAGE.parents[1] / f"simpletuner/models/{family}/cost.py").read_text(encoding="utf-8")

    assert line in PAGE.read_text(encoding="utf-8")
    assert any(arguments(line) <= arguments(call) for call in calls(program))


def calls(program: str) -> list[str]:
    """The calls of TransformerCost in a program."""
    nodes = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    written = [ast.unparse(node) for node in nodes]
    return [call for call in written if call.startswith("TransformerCost(")]


def arguments(call: str) -> set[str]:
    node: Any = ast.parse(call, mode="eval").body
    return {ast.unparse(argument) for argument in (*node.args, *node.keywords)}


def add_file(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def test_documented_source_unpacks_tar_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = code_below("A source of datasets")
    monkeypatch.setattr(collect, "SOURCES", {"webdataset": page["TAR_FILES"]})
    monkeypatch.setattr(
        collect, "resolve_name", {page["TAR_FILES"].lister: page["list_tar_files"]}.__getitem__
    )
    with tarfile.open(tmp_path / "first.tar", "w") as tar:
        add_file(tar, "../a.png", picture(1))
        add_file(tar, "../a.txt", b"a red square")
        add_file(tar, "b.png", b"not a picture")

    # As if TarKeys were a base of RemoteKeys.
    dataset: Any = type("Dataset", (DatasetConfig, page["TarKeys"]), {})
    entry = dataset(
        id="tars", tar_folder=str(tmp_path), instance_data_dir=str(tmp_path / "unpacked")
    )
    entry = entry.model_copy(update={"type": "webdataset"})
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(media="image"), defaults=SimpleNamespace(retry_failed=False)
    )
    problems = Problems()
    listing = collect.collect([entry], context, problems)["tars"]

    assert problems == []
    assert listing.files == ("first/0.png",)
    assert listing.table == {"first/0.png": ("a red square",)}
    assert (tmp_path / "unpacked" / "first" / "0.png").read_bytes() == picture(1)
    assert "neither a picture nor a clip" in listing.ignored[f"{tmp_path / 'first.tar'}:b.png"][1]
    assert page["TAR_FILES"].keys is page["TarKeys"]


def test_documented_tracker_writes_every_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "text", code_below("A tracker")["TextTracker"])
    monkeypatch.setattr(config_of_trackers, "PACKAGES", {"text": None})
    run = TrackedRun("stars", "first", {}, tmp_path, tmp_path / "logs")
    [(_, tracker)] = open_trackers("text", run)
    send = TrackerEvents(tracker)

    send(StepReport(1, 1, {"train_loss": 0.25}, 1.0))
    send(StateChanged("finished", 1, 1))

    assert "1\ttrain_loss\t0.25\n" in (tmp_path / "logs" / "stars" / "first.txt").read_text()


def test_documented_rule_keeps_every_nth_checkpoint(tmp_path: Path) -> None:
    kept_for_good = code_below("A rule for checkpoints")["kept_for_good"]
    for step in range(1, 6):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        write_manifest(folder, Manifest(step, 1, IDENTITY, describe_files(folder)))

    removed = prune(tmp_path, 1, rolling=False, in_use=kept_for_good(tmp_path, 2))

    assert [path.name for path in removed] == ["checkpoint-1", "checkpoint-3"]
