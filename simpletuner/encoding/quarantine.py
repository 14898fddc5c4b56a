"""Moves unusable files out of a dataset folder and records the reasons.

Nothing is deleted or overwritten. A caption file moves with its picture unless another file shares
it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from simpletuner.atomic import unused_path
from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.dataset import Dataset
from simpletuner.data.file_names import CAPTION_SUFFIXES, composed, pair_key, suffix_of
from simpletuner.data.pictures import PICTURE_SUFFIXES
from simpletuner.data.sample import Rejected
from simpletuner.errors import counted, shorten

logger = logging.getLogger(__name__)

FOLDER_NAME = "quarantine"
REASONS_NAME = "reasons.jsonl"
MEDIA_SUFFIXES = PICTURE_SUFFIXES | CLIP_SUFFIXES


def quarantine(datasets: Iterable[Dataset], output_dir: Path) -> None:
    """Move the rejected files of datasets with quarantine enabled, and record the reasons.

    Files move to `<output_dir>/quarantine` with their captions, and keep their paths below the
    dataset's folder. Files in a linked folder outside the dataset's folder are not moved; files
    that no longer exist are skipped.

    Raises:
        OSError: a file cannot be moved; earlier files are recorded.
    """
    folder = output_dir / FOLDER_NAME
    moved: list[str] = []
    try:
        for dataset in datasets:
            _quarantine(dataset, folder, moved)
    finally:
        if moved:
            files = f"{counted(len(moved), 'file')} ({shorten(moved)})"
            advice = (
                f"{folder / REASONS_NAME} has the reasons. To use a file after all, move it back."
            )
            logger.warning("Moved %s to %s. %s", files, folder, advice)


def _quarantine(dataset: Dataset, folder: Path, moved: list[str]) -> None:
    """Move the files of one dataset; adds them to `moved`."""
    config = dataset.config
    root = dataset.root.expanduser()
    if config.type != "local":  # a moved download would be downloaded again
        return
    is_moved = {
        "damaged": config.delete_problematic_images,
        "outside the limits": config.delete_unwanted_images,
    }
    for file in dataset.rejected:
        path = root / file.name
        if not is_moved.get(file.reason) or not os.path.lexists(path):
            continue
        # Resolve the folder, not the file: a link to a file outside is moved as a link.
        if not path.parent.resolve().is_relative_to(root.resolve()):
            logger.warning("%s is outside of %s and is not moved: it %s", path, root, file.detail)
            continue
        for name in [file.name, *_unshared_captions(root, file.name)]:
            target = unused_path(folder / PurePosixPath(name), " ({})")
            origin = (root / name).absolute()
            target.parent.mkdir(parents=True, exist_ok=True)
            # Output and data may be on different file systems, between which a rename fails.
            shutil.move(root / name, target)
            _record(folder, file, origin, target)
        moved.append(file.name)


def _unshared_captions(root: Path, name: str) -> list[str]:
    """The caption files of a picture or clip, without those that another file shares."""
    path = PurePosixPath(name)
    folder = (root / name).parent
    siblings = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    stem = pair_key(path.name)
    owners = [
        file for file in siblings if suffix_of(file) in MEDIA_SUFFIXES and pair_key(file) == stem
    ]
    keys = {composed(path.name)}
    if len(owners) <= 1:  # `cat.png` and `cat.jpg` share `cat.txt`
        keys.add(stem)
    captions = [
        file for file in siblings if suffix_of(file) in CAPTION_SUFFIXES and pair_key(file) in keys
    ]
    return [str(path.parent / file) for file in captions]


def _record(folder: Path, file: Rejected, origin: Path, target: Path) -> None:
    """Add a line to the list of reasons."""
    line = {
        "dataset": file.dataset_id,
        "file": str(target.relative_to(folder).as_posix()),
        "from": str(origin),
        "reason": file.reason,
        "detail": file.detail,
    }
    with (folder / REASONS_NAME).open("a", encoding="utf-8") as list_file:
        list_file.write(json.dumps(line, ensure_ascii=False) + "\n")
