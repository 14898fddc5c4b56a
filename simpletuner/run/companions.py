"""Companions of a run (uploads, model card, records), and the ledger of their pending tasks.

The ledger is a file, so that the next start completes tasks interrupted by a kill.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simpletuner.atomic import write_json
from simpletuner.config.json_reader import read_stored

if TYPE_CHECKING:
    from simpletuner.budget.budget import Budget
    from simpletuner.planning.plans import Plan
    from simpletuner.reporting.events import StepReport
    from simpletuner.run.session import Session
    from simpletuner.training.state import Assembly, TrainState

LEDGER_FILE = "unfinished.json"
Task = Literal["card", "uploads", "end"]
TITLES: dict[Task, str] = {
    "card": "the model card",
    "uploads": "the uploads",
    "end": "the end of the records",
}


@dataclass(frozen=True)
class Ledger:
    """Pending tasks for a result.

    Attributes:
        step, epoch: step and epoch of the result.
    """

    step: int
    epoch: int
    tasks: tuple[Task, ...]

    def __str__(self) -> str:
        return ", ".join(TITLES[task] for task in self.tasks)

    def write(self, output_dir: Path) -> None:
        """Replace the file, or delete it if no task is left."""
        if self.tasks:
            write_json(output_dir / LEDGER_FILE, asdict(self))
        else:
            (output_dir / LEDGER_FILE).unlink(missing_ok=True)


def read_ledger(output_dir: Path) -> Ledger | None:
    """The ledger of an output folder; None if no task is pending."""
    return read_stored(output_dir / LEDGER_FILE, Ledger)


def mark_done(output_dir: Path, *done: Task) -> None:
    """Remove completed tasks from the ledger."""
    # Read again, since other companions may have removed tasks meanwhile.
    ledger = read_ledger(output_dir)
    if ledger is None:
        return
    left = tuple(task for task in ledger.tasks if task not in done)
    Ledger(ledger.step, ledger.epoch, left).write(output_dir)


class Companion:
    """A callback that is called last, with hooks before training and after the result is on disk.

    The command line opens the companions that the configuration requests. Subclasses override the
    methods they need.

    Attributes:
        in_use: checkpoints that must not be removed now.
    """

    in_use: Collection[Path] = ()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks to do once the result is on disk."""
        return ()

    def begin(self, plan: Plan, step: int) -> None:
        """Subscribe to the events of a session.

        Args:
            plan: the plan without files found to be damaged.
            step: the step after which the session continues; the last one if only its end is left.
        """

    def around(self, session: Session, budget: Budget) -> AbstractContextManager[object]:
        """A context held while the session trains."""
        return nullcontext()

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        """See `Callback`."""

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        """See `Callback`."""

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """See `Callback`."""

    def on_failure(self, assembly: Assembly, state: TrainState) -> None:
        """See `Callback`."""

    def finish(self, ledger: Ledger) -> str:
        """Do the pending tasks of the result; returns a line about the outcome."""
        return ""

    @property
    def unfinished(self) -> str:
        """A line about incomplete tasks and how to complete them; empty if all are done."""
        return ""
