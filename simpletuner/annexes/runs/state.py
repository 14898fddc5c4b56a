"""The state of a run, judged from its process, its events and its files.

No state is stored: after a crash of the run, the server or the machine, everything is read from the
folder again.

    idle ──► starting ──► running ──► completed, error, cancelled    its last event reports the end
                 │           │
                 └─────┬─────┘   the process has ended without reporting it:
                       ├──► error         its console ends with errors
                       ├──► cancelled     its console ends with "Interrupted.",
                       │                  or it stopped before its last step
                       ├──► completed     its result is of the last step
                       └──► interrupted   it was killed, or sends no heartbeat from another machine

A run that is not active and whose files are damaged is `broken`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from simpletuner.annexes.languages.say import say, say_counted
from simpletuner.annexes.runs.console import INTERRUPTED, last_message
from simpletuner.annexes.runs.folder import RunFolder
from simpletuner.annexes.runs.history import RunHistory
from simpletuner.annexes.runs.log_files import last_step
from simpletuner.planning.checkpoint_folder import Checkpoint, find_checkpoints, result_step
from simpletuner.planning.lineage import steps_again
from simpletuner.planning.lock import Owner
from simpletuner.reporting.metrics import METRICS_FILE
from simpletuner.reporting.wording import clock_text

Status = Literal[
    "idle", "starting", "running", "completed", "error", "cancelled", "interrupted", "broken"
]
ACTIVE = ("starting", "running")
IN_LOOP = ("running", "stopping")  # states in events
ENDED: Mapping[str, Status] = {
    "completed": "completed",
    "failed": "error",
    "cancelled": "cancelled",
}
# Messages of cancelled runs that say less than their files; of the signal handler, the loop, and
# versions that had no text for it.
CANCELLED = "Cancelled."
SAYS_LITTLE = (CANCELLED, "KeyboardInterrupt", "Stopped at step", "Stopping after this step")
SILENCE = 900.0  # seconds without a heartbeat after which a run on another machine counts as ended


@dataclass(frozen=True)
class Verdict:
    """The state of a run, a message about it, and its newest session."""

    status: Status
    message: str
    history: RunHistory


def judge(folder: RunFolder) -> Verdict:
    """The present state of a run.

    Raises:
        UserError: the lock of the folder is damaged.
    """
    # Checked before reading events: a run that ends in between was alive, or has reported its end.
    owner = folder.owner
    is_alive = folder.pid is not None
    history = folder.read()
    # Sessions are told apart by event ids, not by times, since clocks may be changed.
    started_after = folder.started.get("after")
    has_no_event = history.id == started_after
    is_on_console = started_after in (history.id, history.first - 1)
    last_lines = ""
    if is_on_console and not is_alive:
        last_lines = last_message(folder.console, only_errors=not has_no_event)
    is_of_earlier_owner = owner is not None and history.id <= owner.after
    if has_no_event or is_of_earlier_owner:
        history = RunHistory(progress=history.progress)
    status, message = _state_of(folder, owner, history, last_lines, is_alive=is_alive)
    return Verdict(status, message, history)


def _state_of(
    folder: RunFolder, owner: Owner | None, history: RunHistory, last_lines: str, *, is_alive: bool
) -> tuple[Status, str]:
    """The state of a session, and a message about it.

    Args:
        last_lines: the last console lines of a session that the page started, if its process has
            ended.
    """
    # A reported end takes precedence over the process, which may take a while to exit.
    if history.status == "cancelled" and history.message.startswith(SAYS_LITTLE):
        return "cancelled", describe_stop(folder)
    if history.status in ENDED:
        return ENDED[history.status], history.message
    status: Status = "running" if history.status in IN_LOOP else "starting"
    if owner is not None and owner.host != socket.gethostname():
        silence = time.time() - folder.seen
        if is_alive or silence < SILENCE:
            return status, f"On {owner.host}. {history.message}"
        return "interrupted", f"No heartbeat for {clock_text(silence)}. {owner}"
    if is_alive:
        return status, history.message
    was_at_work = owner is not None or history.status in ("starting", *IN_LOOP)
    return _unreported_end(folder, last_lines, was_at_work=was_at_work)


def _unreported_end(folder: RunFolder, last_lines: str, *, was_at_work: bool) -> tuple[Status, str]:
    """The state of a session that did not report its end."""
    step = reached_step(folder)
    if last_lines in INTERRUPTED:
        return "cancelled", describe_stop(folder)
    if last_lines:
        return "error", last_lines
    if was_at_work:
        return "interrupted", _describe_interruption(folder, step)
    if not step:
        return "idle", ""
    if step == (result_step(folder.folder, "lora") or result_step(folder.folder, "full")):
        return "completed", say_counted(step, "{count} step is done.", "{count} steps are done.")
    return "cancelled", describe_stop(folder, "Stopped")


def reached_step(folder: RunFolder) -> int:
    """The last step in the record of a run; 0 without one."""
    step: int = last_step(folder.folder / METRICS_FILE)[0].get("step", 0)
    return step


def saved_step(folder: RunFolder) -> int:
    """The step from which a run would continue; 0 without a checkpoint."""
    checkpoints = find_checkpoints(folder.folder)[0]
    return checkpoints[-1].step if checkpoints else 0


def describe_stop(folder: RunFolder, how: str = "Cancelled") -> str:
    """Where a run was stopped or cancelled, and what was saved of it."""
    step = reached_step(folder)
    how = say(how)
    if not step:
        return say("{how} before the first step.", how=how)
    number = f"{step:,}"
    checkpoints = find_checkpoints(folder.folder)[0]
    if not checkpoints:
        return say("{how} at step {step}; nothing was saved.", how=how, step=number)
    if checkpoints[-1].step >= step:
        return say("Stopped at step {step}; it can continue.", step=number)
    onward = describe_continuation(folder, checkpoints[-1])
    return say("{how} at step {step}. {onward}", how=how, step=number, onward=onward)


def describe_continuation(folder: RunFolder, checkpoint: Checkpoint) -> str:
    """From which step a run continues, and how many steps are trained again."""
    start = f"{checkpoint.step:,}"
    repeated = steps_again(folder.folder, checkpoint)
    if not repeated:
        return say("It continues from step {step}.", step=start)
    one = "It continues from step {step}; {count} step is trained again."
    several = "It continues from step {step}; {count} steps are trained again."
    return say_counted(repeated, one, several, step=start)


def _describe_interruption(folder: RunFolder, step: int) -> str:
    """How far an interrupted run got, and where it continues."""
    if not step:
        return say("Ended unexpectedly before the first step.")
    checkpoints = find_checkpoints(folder.folder)[0]
    onward = say("Without a checkpoint, it starts over.")
    if checkpoints:
        onward = describe_continuation(folder, checkpoints[-1])
    return say("Ended unexpectedly at step {step}. {onward}", step=f"{step:,}", onward=onward)
