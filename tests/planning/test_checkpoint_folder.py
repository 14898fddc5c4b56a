"""Which checkpoints are complete, which one a run continues from, and which ones are pruned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpletuner.errors import Problem, Problems
from simpletuner.planning.checkpoint_folder import (
    FILE_NAME,
    Identity,
    Manifest,
    damaged_files,
    describe_files,
    find_checkpoints,
    open_checkpoint,
    prune,
    read_manifest,
    select_checkpoint,
    write_manifest,
)


def make(output: Path, name: str, content: bytes = b"weights") -> Path:
    """A complete checkpoint of that name."""
    folder = output / name
    (folder / "state").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(content)
    (folder / "state" / "optimizer.bin").write_bytes(b"state")
    step = int(name.split("-")[1])
    identity = Identity(
        "kandinsky5-image", "t2i-lite-sft", "lora", 1, seed=1, datasets="", versions={"torch": "2"}
    )
    write_manifest(folder, Manifest(step, epoch=1, identity=identity, files=describe_files(folder)))
    return folder


def select(name: str, output: Path) -> tuple[str | None, list[Problem]]:
    """The name of the selected checkpoint, and what is reported."""
    problems = Problems()
    checkpoint = select_checkpoint(name, output, problems)
    return checkpoint.path.name if checkpoint else None, problems


def test_renamed_folder_keeps_its_step(tmp_path: Path) -> None:
    make(tmp_path, "checkpoint-5").rename(tmp_path / "checkpoint-9000")
    checkpoint = open_checkpoint(tmp_path / "checkpoint-9000")

    assert checkpoint is not None
    assert checkpoint.step == 5


def test_manifest_is_read_as_written(tmp_path: Path) -> None:
    folder = make(tmp_path, "checkpoint-5")
    manifest = read_manifest(folder)

    assert manifest is not None
    assert manifest.step == 5
    assert sorted(manifest.files) == ["state/optimizer.bin", "weights.bin"]
    assert manifest.files["weights.bin"][0] == 7


def test_checkpoints_are_sorted_by_step(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-100", "checkpoint-100-rolling"):
        make(tmp_path, name)
    for name in ("checkpoint-7-tmp", "checkpoint-x", "other", "checkpoint-8"):
        (tmp_path / name).mkdir()

    complete, incomplete = find_checkpoints(tmp_path)

    assert [checkpoint.path.name for checkpoint in complete] == [
        "checkpoint-9",
        "checkpoint-10",
        "checkpoint-100-rolling",
        "checkpoint-100",
    ]
    assert [path.name for path in incomplete] == ["checkpoint-8"]
    assert find_checkpoints(tmp_path / "nothing") == ([], [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"files": []}',
        b"[" * 100_000,
        json.dumps({"step": "x", "files": {}}).encode(),
    ],
)
def test_unreadable_manifest_makes_the_checkpoint_incomplete(
    tmp_path: Path, content: bytes
) -> None:
    folder = make(tmp_path, "checkpoint-5")
    (folder / FILE_NAME).write_bytes(content)
    assert open_checkpoint(folder) is None


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "soon"},
        {"files": {"weights.bin": 7}},
        {"files": None},
        {"identity": []},
        {"step": None},
    ],
)
def test_manifest_with_wrong_types_makes_the_checkpoint_incomplete(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = make(tmp_path, "checkpoint-5")
    content = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps(content | change))

    assert open_checkpoint(folder) is None


def test_missing_or_truncated_file_makes_the_checkpoint_incomplete(tmp_path: Path) -> None:
    short = make(tmp_path, "checkpoint-5")
    lacking = make(tmp_path, "checkpoint-6")
    (short / "weights.bin").write_bytes(b"wei")
    (lacking / "state" / "optimizer.bin").unlink()

    assert find_checkpoints(tmp_path) == ([], [short, lacking])


def test_damage_of_the_same_size_is_found_by_its_hash(tmp_path: Path) -> None:
    folder = make(tmp_path, "checkpoint-5")
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    assert damaged_files(checkpoint) == []
    (folder / "weights.bin").write_bytes(b"weighty")
    assert damaged_files(checkpoint) == ["weights.bin"]


def test_latest_selects_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    assert select("latest", tmp_path) == (None, [])
    make(tmp_path, "checkpoint-5")
    make(tmp_path, "checkpoint-20")
    assert select("Latest", tmp_path) == ("checkpoint-20", [])
    (tmp_path / "checkpoint-20" / "weights.bin").unlink()
    name, (problem,) = select("latest", tmp_path)
    assert name == "checkpoint-5"
    assert not problem.fatal
    assert "checkpoint-20 is not complete and was skipped." in problem.message


def test_none_starts_a_new_run_but_not_over_checkpoints(tmp_path: Path) -> None:
    assert select("none", tmp_path) == (None, [])
    make(tmp_path, "checkpoint-5")
    name, (problem,) = select("none", tmp_path)
    assert name is None
    assert problem.fatal
    assert "choose another output_dir" in problem.message


def test_checkpoint_is_selected_by_name_step_or_path(tmp_path: Path) -> None:
    make(tmp_path / "output", "checkpoint-5")
    elsewhere = make(tmp_path / "elsewhere", "checkpoint-7")
    assert select("checkpoint-5", tmp_path / "output") == ("checkpoint-5", [])
    assert select(str(elsewhere), tmp_path / "output") == ("checkpoint-7", [])
    for unusable in ("checkpoint-6", ".", "/", str(tmp_path)):
        name, (problem,) = select(unusable, tmp_path / "output")
        assert name is None
        assert problem.fatal
        assert "there are: checkpoint-5." in problem.message


def test_pruning_deletes_the_oldest_of_its_kind(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        make(tmp_path, f"checkpoint-{step}")
        make(tmp_path, f"checkpoint-{step}-rolling")
    (tmp_path / "checkpoint-3").mkdir()
    assert prune(tmp_path, 0, rolling=False) == []
    assert [path.name for path in prune(tmp_path, 2, rolling=False)] == [
        "checkpoint-5",
        "checkpoint-10",
    ]
    assert [path.name for path in prune(tmp_path, 3, rolling=True)] == ["checkpoint-5-rolling"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [
        "checkpoint-10-rolling",
        "checkpoint-15",
        "checkpoint-15-rolling",
        "checkpoint-20",
        "checkpoint-20-rolling",
        "checkpoint-3",
    ]
