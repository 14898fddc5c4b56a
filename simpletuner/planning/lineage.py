"""Continues a run from a checkpoint that is not its last: what was trained after it is set aside.

An output folder shows one line of training: its checkpoints, record, previews and result belong
together, and the newest checkpoint is the one with the highest step. A run that continues from an
earlier checkpoint starts a branch: what the old line has beyond that checkpoint moves to
`branches/<number>`, which has the form of an output folder. A run that continues from a checkpoint
in there returns to that line: the two change places.

`lineage.json` names the line (`manifest.Line`). It is written before anything moves, so that after
a kill in between the next start continues the new line and moves the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from simpletuner.atomic import unused_path, write_atomically
from simpletuner.errors import UserError, counted, shorten
from simpletuner.planning.checkpoint_folder import (
    AVERAGE_FOLDER,
    BRANCHES,
    FOLDER_NAME,
    PIPELINE_FOLDER,
    STARS_FILE,
    SWEEP_FOLDER,
    Checkpoint,
    Fork,
    Line,
    Move,
    find_checkpoints,
    list_checkpoints,
    read_line,
    result_step,
    write_line,
)
from simpletuner.planning.lock import worker_in
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    METRICS_FILE,
    StepLines,
    last_recorded_step,
    read_media,
)
from simpletuner.weights.lora_names import LORA_FILE
from simpletuner.weights.published_lora import OFFICIAL_SETTINGS

WANDB_FILE = "wandb_run.json"  # names the wandb run of the line
RECORDS = (METRICS_FILE, MEDIA_FILE)
# What compares the checkpoints of a line names them by their steps, so on another line it would
# show the pictures of other weights.
COMPARISONS = (SWEEP_FOLDER, STARS_FILE)


@dataclass(frozen=True)
class Branch:
    """A branch that starts from a checkpoint, and what its output folder has beyond the checkpoint.

    Attributes:
        start: the checkpoint, for users.
        line: the new line; its `move` is set.
        left: complete checkpoints that are not on the new line, by their steps.
        result: step of the result, if it is not on the new line.
        is_compared: whether the old line has a comparison of its checkpoints.
        newest: the checkpoint from which the old line would continue, if it is not `start`.
    """

    start: str
    line: Line
    left: Sequence[Path]
    result: int | None
    is_compared: bool
    newest: str

    @property
    def rest(self) -> str:
        """What is set aside, as text."""
        names = [path.name for path in self.left]
        if self.result is not None:
            names.append(f"the result of step {self.result}")
        if self.is_compared:
            names.append("the comparison of checkpoints")
        return shorten(names) or "the record"

    @property
    def announcement(self) -> str:
        """What starting the branch does, for users."""
        folder = branch_folder(self.line)
        text = (
            f"{self.start} is not what was last trained here, so the run first moves to {folder}: "
            f"{self.rest}."
        )
        if self.newest:
            text += f" Without resume_from_checkpoint, it continues from {self.newest} instead."
        if self.left:
            text += f" To return later, set resume_from_checkpoint={folder}/{self.left[-1].name}."
        return text


def branch_folder(line: Line) -> str:
    """The folder with what the last branch left behind, relative to the output folder."""
    return f"{BRANCHES}/{line.forks[-1].number}"


def find_branch(output_dir: Path, checkpoint: Checkpoint) -> Branch | None:
    """The branch that a run starts from a checkpoint; None if it continues the folder's line."""
    checkpoints, _ = find_checkpoints(output_dir)
    newest = checkpoints[-1] if checkpoints else None
    current = read_line(output_dir)
    if current is None:
        # The line of the newest checkpoint, which may have been copied from another folder.
        current = Line(newest.manifest.forks if newest is not None else ())
    if current.begins_at(checkpoint):
        return None  # a killed session has already begun to start this branch

    # A later checkpoint of the current line is not on the new one, although both share its
    # beginning. What is not shared moves; a checkpoint from `branches/` comes back from its home.
    home = _home(output_dir, checkpoint)
    move = Move(_shared_steps(current, checkpoint), home)
    if move.is_foreign:
        move = replace(move, shared=0)  # another run has no step in common with this folder
    fork = Fork(checkpoint.step, _next_number(output_dir, current))
    line = Line((*checkpoint.manifest.forks, fork), move)
    left = _left(output_dir, line)
    result = _result_beyond(output_dir, move.shared)
    if not left and result is None and not move.is_return:
        return None  # nothing to move: the checkpoint is the end of the line

    start = checkpoint.path.name if home == "." else f"{home}/{checkpoint.path.name}"
    left_newest = ""
    if newest is not None and newest.path != checkpoint.path:
        left_newest = newest.path.name
    is_compared = (output_dir / SWEEP_FOLDER).exists()
    return Branch(start, line, left, result, is_compared, left_newest)


def why_not_now(output_dir: Path) -> str:
    """Why no branch can start now, as a sentence; empty if one can."""
    worker = worker_in(output_dir / SWEEP_FOLDER)
    if worker is None:
        return ""
    return (
        f"the checkpoints in {output_dir} are being compared by {worker}, and a branch would move "
        "them. Wait for its end, or stop it."
    )


def _home(output_dir: Path, checkpoint: Checkpoint) -> str:
    """The folder of a checkpoint, as in `Move`."""
    home = checkpoint.path.parent.resolve()
    output_dir = output_dir.resolve()
    if home == output_dir or home.parent == output_dir / BRANCHES:
        return home.relative_to(output_dir).as_posix()
    return str(home)


def _shared_steps(current: Line, checkpoint: Checkpoint) -> int:
    """The last step that a line has in common with the line of a checkpoint."""
    shared = checkpoint.step
    for forks in zip_longest(current.forks, checkpoint.manifest.forks):
        ours, theirs = forks
        if ours != theirs:
            # They part at the earlier of the two; one line may have no further fork.
            steps = [fork.step for fork in forks if fork is not None]
            return min(shared, *steps)
    return shared


def _next_number(output_dir: Path, current: Line) -> int:
    """A number that no branch has had, even if its folder has been deleted since."""
    numbers = [fork.number for fork in current.forks]
    for path in (output_dir / BRANCHES).glob("*"):
        if path.name.isdecimal():
            numbers.append(int(path.name))
    return max(numbers, default=0) + 1


def _left(output_dir: Path, line: Line) -> list[Path]:
    """The complete checkpoints that are not on a line, by their steps."""
    checkpoints, _ = list_checkpoints(output_dir)
    checkpoints.sort(key=lambda checkpoint: checkpoint.step)
    if line.move is not None and line.move.is_foreign:
        # None is on the line of another run, whatever its steps.
        return [checkpoint.path for checkpoint in checkpoints]
    return [checkpoint.path for checkpoint in checkpoints if not line.holds(checkpoint)]


def _result_beyond(output_dir: Path, step: int) -> int | None:
    """The step of the result, if it is a later one."""
    result = result_step(output_dir, "lora") or result_step(output_dir, "full")
    return result if result is not None and result > step else None


def start_line(output_dir: Path, checkpoint: Checkpoint | None) -> Branch | None:
    """Begin a session from a checkpoint, or from the beginning: the new end of the folder's line.

    Returns:
        the branch, if the session starts one; what the old line has beyond it has been moved.
    """
    _finish_move(output_dir)  # of an earlier session
    if checkpoint is None:
        write_line(output_dir, Line())
        return None
    if not checkpoint.path.exists():
        # Finishing the move of a killed session has just brought it back.
        checkpoint = replace(checkpoint, path=output_dir / checkpoint.path.name)
    branch = find_branch(output_dir, checkpoint)
    if branch is not None:
        reason = why_not_now(output_dir)
        if reason:
            raise UserError(f"resume_from_checkpoint: {reason}")
        write_line(output_dir, branch.line)
        _finish_move(output_dir)
    elif read_line(output_dir) is None:
        write_line(output_dir, Line(checkpoint.manifest.forks))
    return branch


def _finish_move(output_dir: Path) -> None:
    """Move everything that the start of a branch has not moved yet."""
    line = read_line(output_dir)
    if line is None or line.move is None:
        return
    if not line.move.is_aside:
        _set_aside(output_dir, line, line.move.shared)
        write_line(output_dir, replace(line, move=replace(line.move, is_aside=True)))
    if line.move.is_return:
        _bring_back(output_dir, line, output_dir / line.move.home, line.move.shared)
    write_line(output_dir, replace(line, move=None))


def _set_aside(output_dir: Path, line: Line, shared: int) -> None:
    """Move what the old line has beyond the step that it shares with the new one.

    A start that was killed may have moved a part of it already, so every move can be repeated.
    """
    folder = output_dir / branch_folder(line)
    folder.mkdir(parents=True, exist_ok=True)
    for name in RECORDS:
        # A copy of the whole record, since the rows of the shared steps belong to both lines.
        if (output_dir / name).exists() and not (folder / name).exists():
            write_atomically(folder / name, (output_dir / name).read_bytes())
    for record in read_media(folder / MEDIA_FILE):
        if record.step > shared:
            _move(output_dir / record.path, folder / record.path)
    for path in [*_left(output_dir, line), *_incomplete(output_dir, shared)]:
        _move(path, folder / path.name)
    if _result_beyond(output_dir, shared) is not None:
        for path in _result_files(output_dir):
            _move(path, folder / path.name)
    for name in COMPARISONS:
        _move(output_dir / name, folder / name)
    # wandb does not accept a step twice, so the branch is logged to another run.
    _move(output_dir / WANDB_FILE, folder / WANDB_FILE)
    for name in RECORDS:
        if (output_dir / name).exists():
            StepLines(output_dir / name, shared).close()


def _incomplete(output_dir: Path, shared: int) -> list[Path]:
    """Incomplete checkpoints of later steps."""
    paths = []
    for path in list_checkpoints(output_dir)[1]:
        name = FOLDER_NAME.fullmatch(path.name)
        if name is not None and int(name.group(1)) > shared:
            paths.append(path)
    return paths


def _result_files(output_dir: Path) -> list[Path]:
    """The files of a result, whether they exist or not; those that name its step come last."""
    adapters = sorted(output_dir.glob("*_weights.safetensors"))
    paths = [path for path in adapters if path.name != LORA_FILE]
    for name in (
        AVERAGE_FOLDER,
        "lycoris_config.json",
        OFFICIAL_SETTINGS,
        # These two hold the step. As long as they are here, a killed start knows what to move.
        LORA_FILE,
        PIPELINE_FOLDER,
    ):
        paths.append(output_dir / name)
    return paths


def _bring_back(output_dir: Path, line: Line, home: Path, shared: int) -> None:
    """Move a line's checkpoints, previews and comparison back from `branches/`, with its record."""
    for name in RECORDS:
        if (home / name).exists():
            write_atomically(output_dir / name, (home / name).read_bytes())
    for record in read_media(home / MEDIA_FILE):
        if shared < record.step <= line.forks[-1].step:
            _move(home / record.path, output_dir / record.path)
    if _is_whole(home, line):
        for name in COMPARISONS:
            _move(home / name, output_dir / name)
    for checkpoint in list_checkpoints(home)[0]:
        if line.holds(checkpoint):
            _move(checkpoint.path, output_dir / checkpoint.path.name)


def _is_whole(home: Path, line: Line) -> bool:
    """Whether a line comes back to its end, so that a comparison shows only weights that are on it.

    A line that comes back to an earlier step is trained anew from there.
    """
    saved, _ = list_checkpoints(home)
    return all(map(line.holds, saved)) and _result_beyond(home, line.forks[-1].step) is None


def _move(path: Path, target: Path) -> None:
    """Move a file, folder or link, if it exists. An existing target is kept."""
    if not path.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target = unused_path(target)
    if path.is_symlink():
        # A relative link would point elsewhere from there.
        target.symlink_to(path.resolve())
        path.unlink()
    else:
        path.rename(target)


def continuation(output_dir: Path, checkpoint: Checkpoint) -> str:
    """A text: the step from which a run continues, and how many steps are trained again."""
    text = f"continues from step {checkpoint.step}"
    repeated = steps_again(output_dir, checkpoint)
    if repeated:
        text += f"; {counted(repeated, 'step is', 'steps are')} trained again"
    return text


def steps_again(output_dir: Path, checkpoint: Checkpoint) -> int:
    """How many steps a run trains again that continues from a checkpoint; none in a branch."""
    repeated = last_recorded_step(output_dir / METRICS_FILE) - checkpoint.step
    if repeated <= 0 or find_branch(output_dir, checkpoint) is not None:
        return 0
    return repeated
