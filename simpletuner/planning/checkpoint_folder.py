"""Checkpoints on disk: what their folders and manifests hold, and which of them are complete.

A checkpoint is complete if its manifest exists: the manifest is written last, before the folder is
renamed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.atomic import write_json
from simpletuner.config.json_reader import read_json, read_stored
from simpletuner.errors import Problems
from simpletuner.hashing import hash_file
from simpletuner.headers import METADATA, read_header
from simpletuner.weights.lora_names import LORA_FILE, STEP_NOTE

PIPELINE_FOLDER = "pipeline"  # result of a full fine-tune, for `from_pretrained`
NOTE_FILE = "simpletuner.json"  # in the pipeline folder: its run and step
AVERAGE_FOLDER = "ema"  # beside the file of a LoRA, with the file of its moving average
STATE_FOLDER = "training_state"  # in a checkpoint: files needed only to resume
# Header notes of a LoRA converted from another adapter: its relative errors, and their reference.
ERRORS = {
    "simpletuner.weight_error": "of the update",
    "simpletuner.prediction_error": "of a prediction",
    "simpletuner.effect_error": "of what the adapter changes in that prediction",
}

FILE_NAME = "manifest.json"
LINE_FILE = "lineage.json"  # in the output folder, see `Line`
SWEEP_FOLDER = "sweep"  # in the output folder: renders that compare its checkpoints
STARS_FILE = "stars.json"  # in the output folder: the renders that a user likes
BRANCHES = "branches"  # in the output folder: what branches have left behind, in numbered folders
ROLLING = "-rolling"
FOLDER_NAME = re.compile(rf"checkpoint-(\d+)({ROLLING})?")


@dataclass(frozen=True)
class Identity:
    """The run that a checkpoint belongs to.

    Attributes:
        seed: seed of the run, kept on resume even if it was drawn.
        datasets: fingerprint of the samples.
        files: digests of the trained files, or of a sample of them, separated by blanks; empty in
            older checkpoints.
        versions: versions of the relevant packages.
        weights: content hash of every model involved, by its role; empty in older checkpoints.
        settings: keys that change the mathematics, with their effective values.
        order: keys that decide which samples share a batch, with their effective values.
        origins: origin of each value that is not the default, by key.
        num_processes: number of processes, each with batches of `train_batch_size`; a
            sequence-parallel group counts once.
    """

    model_family: str
    model_flavour: str
    model_type: str
    train_batch_size: int
    seed: int
    datasets: str
    versions: dict[str, str]
    weights: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    order: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    num_processes: int = 1
    files: str = ""


@dataclass(frozen=True)
class Progress:
    """How far a run was at a checkpoint.

    Attributes:
        position: micro-batches of the epoch that are trained.
        epochs_done: number of complete epochs.
        total_steps: the length of the run as planned.
    """

    position: int
    epochs_done: int
    total_steps: int


@dataclass(frozen=True)
class Fork:
    """Where a run continued from a checkpoint that was not its last.

    Attributes:
        step: step of that checkpoint.
        number: number of the branch; the folder `branches/<number>` has what it left behind.
    """

    step: int
    number: int


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint and the run it belongs to.

    Attributes:
        files: size in bytes and SHA-256 of every file, by relative path.
        progress: None in older checkpoints.
        forks: the branches on the way from the start of the run, in the order of their steps. They
            name the ancestors of the checkpoint; without any, these are all checkpoints with lower
            steps.
    """

    step: int
    epoch: int
    identity: Identity
    files: dict[str, tuple[int, str]]
    progress: Progress | None = None
    forks: tuple[Fork, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder."""

    path: Path
    step: int
    rolling: bool
    manifest: Manifest


@dataclass(frozen=True)
class Move:
    """The start of a branch, while files are being moved.

    Attributes:
        shared: the last step that the old and the new line have in common.
        home: folder of the checkpoint that the branch continues: relative to the output folder, or
            of another run.
        is_aside: the old line has been moved; the new one may still have to come back from `home`.
    """

    shared: int
    home: str
    is_aside: bool = False

    @property
    def is_foreign(self) -> bool:
        """Whether the branch continues a checkpoint of another run."""
        return Path(self.home).is_absolute()

    @property
    def is_return(self) -> bool:
        """Whether the branch continues a checkpoint that had been set aside."""
        return self.home.startswith(BRANCHES)


@dataclass(frozen=True)
class Line:
    """The checkpoints that led to what an output folder has last trained.

    Attributes:
        forks: as in `Manifest`.
        move: None once the last branch has started.
    """

    forks: tuple[Fork, ...] = ()
    move: Move | None = None

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint is on the line."""
        # It must have been saved after the same forks. A fork at its step starts after it.
        earlier = tuple(fork for fork in self.forks if fork.step < checkpoint.step)
        return checkpoint.manifest.forks == earlier

    def begins_at(self, checkpoint: Checkpoint) -> bool:
        """Whether the line is a branch from this checkpoint whose start has not been completed."""
        if self.move is None:
            return False
        # The last fork is the branch whose files are moving.
        *earlier, last = self.forks
        return checkpoint.step == last.step and checkpoint.manifest.forks == tuple(earlier)


def read_line(output_dir: Path) -> Line | None:
    """The line of an output folder; None if all its checkpoints are one line by their steps."""
    return read_stored(output_dir / LINE_FILE, Line)


def write_line(output_dir: Path, line: Line) -> None:
    """Replace the file, or delete it if the line has no forks."""
    if line == Line():
        (output_dir / LINE_FILE).unlink(missing_ok=True)
    else:
        write_json(output_dir / LINE_FILE, asdict(line))


def describe_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and hash of every file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != FILE_NAME)
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_size, hash_file(path))
        for path in paths
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which declares a folder complete."""
    write_json(folder / FILE_NAME, asdict(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None unless all its files exist with the right size."""
    manifest = read_stored(folder / FILE_NAME, Manifest)
    if manifest is None:
        return None
    # Only sizes: hashing gigabytes would delay every listing of checkpoints. Resuming hashes
    # (`damaged_files`).
    for name, (size, _) in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return None
    return manifest


def damaged_files(checkpoint: Checkpoint) -> list[str]:
    """Files of a checkpoint whose content has changed since it was written."""
    damaged = []
    for name, (_, digest) in checkpoint.manifest.files.items():
        if hash_file(checkpoint.path / name) != digest:
            damaged.append(name)
    return damaged


def open_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None if it is not a complete checkpoint."""
    match = FOLDER_NAME.fullmatch(path.name)
    manifest = read_manifest(path)
    if match is None or manifest is None:
        return None
    return Checkpoint(path, manifest.step, match.group(2) is not None, manifest)


def list_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[Path]]:
    """All complete checkpoints in a folder, and incomplete folders with such a name."""
    complete = []
    incomplete = []
    for path in sorted(folder.glob("*")):
        if not path.is_dir() or not FOLDER_NAME.fullmatch(path.name):
            continue
        checkpoint = open_checkpoint(path)
        if checkpoint is None:
            incomplete.append(path)
        else:
            complete.append(checkpoint)
    return complete, incomplete


def find_checkpoints(output_dir: Path) -> tuple[list[Checkpoint], list[Path]]:
    """Complete checkpoints on the folder's line, by step, and incomplete folders with such a name.

    Checkpoints off the line count only if none is on it.
    """
    line = read_line(output_dir)
    complete, incomplete = list_checkpoints(output_dir)
    if line is not None:
        if line.move is not None and line.move.home != ".":
            # While files move, the checkpoint that the branch continues is still there.
            complete += list_checkpoints(output_dir / line.move.home)[0]
        # A file that holds none of them was copied from another folder, or its checkpoints have
        # been deleted.
        on_line = [checkpoint for checkpoint in complete if line.holds(checkpoint)]
        complete = on_line or complete
    # At the same step, the regular checkpoint comes last, so that `latest` selects it.
    complete.sort(key=lambda checkpoint: (checkpoint.step, not checkpoint.rolling))
    return complete, incomplete


def select_checkpoint(name: str, output_dir: Path, report: Problems) -> Checkpoint | None:
    """The checkpoint that `resume_from_checkpoint` selects; None starts a new run.

    Args:
        name: the value of the key: none, latest, a step, or the name or path of a folder.
    """
    key = "resume_from_checkpoint"
    complete, incomplete = find_checkpoints(output_dir)
    if name.lower() == "none":
        if complete:
            message = (
                f"is none, but {output_dir} holds checkpoints that the run would meet; choose "
                "another output_dir."
            )
            report.error(key, message)
        return None
    if name.lower() == "latest":
        for path in incomplete:
            report.warn(key, f"{path} is not complete and was skipped.")
        return complete[-1] if complete else None
    paths = [output_dir / name, Path(name).expanduser()]
    if name.isdecimal():  # a step
        paths += [output_dir / f"checkpoint-{int(name)}{kind}" for kind in ("", ROLLING)]
    for path in paths:
        checkpoint = open_checkpoint(path)
        if checkpoint is not None:
            return checkpoint
    names = ", ".join(checkpoint.path.name for checkpoint in complete) or "none"
    report.error(key, f"{name!r} is not a complete checkpoint. In {output_dir} there are: {names}.")
    return None


def prune(
    output_dir: Path, limit: int, *, rolling: bool, in_use: Collection[Path] = ()
) -> list[Path]:
    """Delete the oldest checkpoints of one kind beyond the limit; 0 keeps all.

    Deletes only complete checkpoints that are not in use, and returns their folders.
    """
    if limit == 0:
        return []
    complete, _ = find_checkpoints(output_dir)
    of_kind = [checkpoint for checkpoint in complete if checkpoint.rolling == rolling]
    oldest = of_kind[:-limit]
    surplus = [checkpoint.path for checkpoint in oldest if checkpoint.path not in in_use]
    for path in surplus:
        # The manifest first, so that an interrupted deletion leaves an incomplete checkpoint.
        (path / FILE_NAME).unlink()
        shutil.rmtree(path)
    return surplus


def result_step(output_dir: Path, model_type: str) -> int | None:
    """The step of the result in a folder, from the result's note; None without a result or note."""
    if model_type == "lora":
        try:
            notes = read_header(output_dir / LORA_FILE)[METADATA]
        except (OSError, ValueError):
            return None
    else:
        notes = read_json(output_dir / PIPELINE_FOLDER / NOTE_FILE, Problems())
    step = notes.get(STEP_NOTE, "") if isinstance(notes, dict) else ""
    return int(step) if str(step).isdecimal() else None


def average_is_stale(output_dir: Path) -> bool:
    """Whether the moving average of a LoRA is of another step than the result beside it.

    A run that was continued without `use_ema` leaves the average of an earlier result.
    """
    average = output_dir / AVERAGE_FOLDER
    if not (average / LORA_FILE).is_file():
        return False
    return result_step(average, "lora") != result_step(output_dir, "lora")


def describe_errors(notes: Mapping[str, str]) -> str:
    """The errors of a converted LoRA as text; empty for files without such notes."""
    errors = []
    for key, reference in ERRORS.items():
        if key in notes:
            errors.append(f"{notes[key]} {reference}")
    return ", ".join(errors)
