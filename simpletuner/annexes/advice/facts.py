"""What a run has recorded: losses, previews, checkpoints, and what its plan said of the files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simpletuner.annexes.advice.curve import LossCurve
from simpletuner.annexes.figures import Columns, evaluation_points, still
from simpletuner.data.sample import UNCAPTIONED
from simpletuner.planning.checkpoint_folder import find_checkpoints
from simpletuner.reporting.metrics import MEDIA_FILE, MediaRecord, read_media

State = Literal["running", "finished", "stopped", "failed"]

MOST_PROMPTS = 12  # whose previews are compared
COMPARED_SIDE = 256  # pixels; larger previews are compared at this size
# The parts of warnings of `data.dataset` and `data.media_checks` that are counted here.
LEFT_OUT = re.compile(r"\d+ files? (?:is|are) left out: (?P<reasons>.*?)\. The plan lists each")
REASON = re.compile(rf"(?:^|; )(?P<count>\d+) (?:{'|'.join(UNCAPTIONED)})\b")
ENLARGED = re.compile(r"(?P<count>\d+) of (?P<all>\d+) files? enlarged")
TWINS = re.compile(r"files that differ only in their extension: (?P<names>.*?)\. If they show")
TRAINED = re.compile(r"^  on (?P<count>\d+) (?P<noun>\w+) \(", re.MULTILINE)


@dataclass(frozen=True)
class Files:
    """The files of a run.

    Attributes:
        trained: number of trained files; None if unknown.
        noun: what they are, in the plural.
        uncaptioned: number of files that are left out, since they have no readable caption.
        enlarged: number of files that are noticeably enlarged, among `measured`.
        twins: files that seem to be the same in two formats, as text.
    """

    trained: int | None = None
    noun: str = "files"
    uncaptioned: int = 0
    enlarged: int = 0
    measured: int = 0
    twins: str = ""


@dataclass(frozen=True)
class LastSession:
    """The newest session of a run.

    Attributes:
        state: what has become of it.
        total_steps: steps of the whole run; None if unknown.
        files: what its plan says of the files.
        message: why it failed or stopped.
        passes: losses that an evaluation measures; 0 if unknown.
    """

    state: State
    total_steps: int | None
    files: Files = Files()
    message: str = ""
    passes: int = 0


@dataclass(frozen=True)
class Facts:
    """What is known of a run.

    Attributes:
        step: the last recorded step.
        total_steps: steps of the whole run; the last recorded one if unknown.
        losses: the training loss of every step.
        rates: the learning rate of every step.
        curve: the loss on held-out files; None if it was not measured.
        checkpoints: steps of the checkpoints that exist, in order.
        changes: how much the newest previews differ from those of the untrained model, by prompt:
            mean difference of their pixels, in levels of 255.
    """

    state: State
    message: str
    step: int
    total_steps: int
    losses: Sequence[float]
    rates: Sequence[float]
    curve: LossCurve | None
    checkpoints: Sequence[int]
    changes: Sequence[float]
    files: Files


def facts_of_run(folder: Path, metrics: Columns, session: LastSession) -> Facts:
    """The facts about the run in an output folder."""
    points = evaluation_points(metrics)
    checkpoints, _incomplete = find_checkpoints(folder)
    step = metrics.steps[-1] if metrics.steps else 0
    return Facts(
        state=session.state,
        message=session.message,
        step=step,
        total_steps=session.total_steps or step,
        losses=[loss for _, loss in metrics.points("train_loss")],
        rates=[rate for _, rate in metrics.points("learning_rate")],
        curve=LossCurve(points, session.passes) if points else None,
        checkpoints=sorted({checkpoint.step for checkpoint in checkpoints}),
        changes=preview_changes(folder, read_media(folder / MEDIA_FILE)),
        files=session.files,
    )


def read_files(summary: str, warnings: Iterable[str]) -> Files:
    """What the plan of a run said of its files.

    Args:
        summary: the lines that announced the run; empty if they are unknown.
    """
    uncaptioned = 0
    enlarged = 0
    measured = 0
    twins = ""
    for warning in warnings:
        if match := LEFT_OUT.search(warning):
            for reason in REASON.finditer(match["reasons"]):
                uncaptioned += int(reason["count"])
        if match := ENLARGED.search(warning):
            enlarged += int(match["count"])
            measured += int(match["all"])
        if match := TWINS.search(warning):
            twins = twins or match["names"]
    trained = TRAINED.search(summary)
    return Files(
        trained=int(trained["count"]) if trained else None,
        noun=trained["noun"] if trained else "files",
        uncaptioned=uncaptioned,
        enlarged=enlarged,
        measured=measured,
        twins=twins,
    )


def preview_changes(folder: Path, records: Sequence[MediaRecord]) -> list[float]:
    """The change of each prompt's newest preview since the untrained model.

    Only previews of the same prompt, size and seed are compared. Files that are missing or damaged
    are left out.
    """
    untrained = {record.row: record for record in records if record.step == 0}
    newest: dict[object, MediaRecord] = {}
    for record in sorted(records, key=lambda record: record.step):
        if record.step > 0 and not record.ema:
            newest[record.row] = record
    changes: list[float] = []
    for row, before in untrained.items():
        after = newest.get(row)
        if after is None or (after.prompt, after.seed) != (before.prompt, before.seed):
            continue
        try:
            changes.append(difference(folder / before.path, folder / after.path))
        except (OSError, ValueError, StopIteration):  # the last one by a clip without frames
            continue
        if len(changes) == MOST_PROMPTS:
            break
    return changes


def difference(before: Path, after: Path) -> float:
    """Mean difference of the pixels of two pictures, or middle frames of clips, in levels of 255.

    Raises:
        OSError, ValueError: one of them is missing or damaged.
    """
    return _difference(before, after, before.stat().st_mtime_ns, after.stat().st_mtime_ns)


# The page asks again every few seconds; the times make a replaced file another entry.
@lru_cache(maxsize=256)
def _difference(before: Path, after: Path, _before_time: int, _after_time: int) -> float:
    return float(np.abs(preview_pixels(before) - preview_pixels(after)).mean())


def preview_pixels(path: Path) -> NDArray[np.int16]:
    """The pixels of a preview, reduced if it is large: shape height, width, 3."""
    picture = still(path)
    picture.thumbnail((COMPARED_SIDE, COMPARED_SIDE), Image.Resampling.BOX)
    return np.asarray(picture, dtype=np.int16)
