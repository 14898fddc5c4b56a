"""Quarantine: which files are moved, with what, and which stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import CachingConfig, DatasetDefaults
from simpletuner.data.build import build_datasets
from simpletuner.data.dataset import Dataset
from simpletuner.data.entries import DataContext
from simpletuner.encoding.quarantine import quarantine
from simpletuner.errors import Problems
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from tests.tools import pictures

pytestmark = pytest.mark.warns  # of the files that it moves


def make_dataset(root: Path, **switches: bool) -> Dataset:
    """A dataset with good, small and damaged pictures; the caption of one belongs to another."""
    pictures.photograph(root / "good.png", (64, 64))
    pictures.photograph(root / "sub" / "small.png", (8, 8))
    (root / "sub" / "bad.png").write_text("no picture")
    (root / "sub" / "bad.txt").write_text("its caption")
    (root / "both.png").write_text("no picture")
    pictures.photograph(root / "both.jpg", (64, 64))
    (root / "both.txt").write_text("shared")
    config = DatasetConfig(
        id="set", instance_data_dir=str(root), minimum_image_size=32, caption_strategy="filename"
    )
    return build(config, root.parent, CachingConfig(**switches))


def build(config: DatasetConfig, folder: Path, caching: CachingConfig) -> Dataset:
    context = DataContext(
        defaults=DatasetDefaults(resolution=64),
        spec=KANDINSKY5_IMAGE,
        task="t2i",
        latent_root=folder / "latents",
        text_root=folder / "texts",
        caching=caching,
    )
    (dataset,) = build_datasets([config], context, Problems())
    return dataset


def files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def test_nothing_is_moved_unless_asked(tmp_path: Path) -> None:
    quarantine([make_dataset(tmp_path / "set")], tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_damaged_files_move_with_their_captions(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "set", delete_problematic_images=True)
    folder = tmp_path / "out" / "quarantine"

    quarantine([dataset], tmp_path / "out")

    assert files(folder) == ["both.png", "reasons.jsonl", "sub/bad.png", "sub/bad.txt"]
    assert files(tmp_path / "set") == ["both.jpg", "both.txt", "good.png", "sub/small.png"]
    assert (folder / "sub" / "bad.txt").read_text() == "its caption"

    lines = [json.loads(line) for line in (folder / "reasons.jsonl").read_text().splitlines()]
    details = {line["file"]: line["detail"] for line in lines}

    assert details["sub/bad.png"] == "is not a picture"
    assert {line["dataset"] for line in lines} == {"set"}


def test_a_caption_of_one_file_alone_moves_with_it(tmp_path: Path) -> None:
    for name in ("both.png.txt", "sub/bad.caption"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_text("its caption")

    quarantine([make_dataset(tmp_path / "set", delete_problematic_images=True)], tmp_path / "out")

    moved = ["both.png", "both.png.txt", "sub/bad.caption", "sub/bad.png", "sub/bad.txt"]
    assert files(tmp_path / "out" / "quarantine") == sorted([*moved, "reasons.jsonl"])
    assert "both.txt" in files(tmp_path / "set"), "it captions both.jpg, too"


def test_a_quarantine_logs_what_it_moved_and_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = make_dataset(tmp_path / "set", delete_problematic_images=True)

    quarantine([dataset], tmp_path / "out")

    (message,) = caplog.messages
    assert "Moved 2 files (both.png, sub/bad.png) to" in message
    assert str(tmp_path / "out" / "quarantine" / "reasons.jsonl") in message


def test_a_quarantine_that_moved_nothing_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quarantine([make_dataset(tmp_path / "set")], tmp_path / "out")

    assert not caplog.messages


def test_files_outside_the_limits_move_on_request(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "set", delete_unwanted_images=True)

    quarantine([dataset], tmp_path / "out")

    assert files(tmp_path / "out" / "quarantine") == ["reasons.jsonl", "sub/small.png"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    for number in (1, 2):
        dataset = make_dataset(tmp_path / f"set{number}", delete_problematic_images=True)
        quarantine([dataset], tmp_path / "out")

    names = {"both.png", "both (2).png", "sub/bad.png", "sub/bad (2).png", "sub/bad (2).txt"}
    assert names < set(files(tmp_path / "out" / "quarantine"))


def test_a_file_that_is_gone_is_skipped(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "set", delete_problematic_images=True)
    (tmp_path / "set" / "both.png").unlink()
    quarantine([dataset], tmp_path / "out")

    assert files(tmp_path / "out" / "quarantine") == ["reasons.jsonl", "sub/bad.png", "sub/bad.txt"]


def test_the_next_start_does_not_miss_moved_files(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "set", delete_problematic_images=True)
    dataset.save_index()
    quarantine([dataset], tmp_path / "out")

    rebuilt = build(dataset.config, tmp_path, CachingConfig())

    assert "gone" not in rebuilt.counts()


def test_nothing_outside_of_the_folder_is_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A linked folder is read as part of the dataset, but its files belong to someone else."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "bad.png").write_text("no picture")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "elsewhere")
    dataset = make_dataset(tmp_path / "set", delete_problematic_images=True)
    quarantine([dataset], tmp_path / "run")

    assert "both.png" in files(tmp_path / "run" / "quarantine")
    assert files(tmp_path / "elsewhere") == ["bad.png"]
    path = tmp_path / "set" / "linked" / "bad.png"
    assert f"{path} is outside of {tmp_path / 'set'} and is not moved: it " in caplog.text
