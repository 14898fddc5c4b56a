"""What accompanies a run, and what of that is still to do after the last step. Free of torch.

The ledger of what is to do is a file, so that the next start finishes what a kill has cut short.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from simpletuner.atomic import write_json
from simpletuner.config.values import read_stored

if TYPE_CHECKING:
    from simpletuner.budget.budget import Budget
    from simpletuner.plan.build import Plan
    from simpletuner.reporting.events import StepReport
    from simpletuner.run.session import Session
    from simpletuner.training.state import Assembly, TrainState

LEDGER_FILE = "unfinished.json"
Task = Literal["card", "uploads", "end"]
TITLES: dict[Task, str] = {"card": "the model card", "uploads": "the uploads", "end": "the end of the records"}


@dataclass(frozen=True)
class Ledger:
    """What is left to do for a result.

    Attributes:
        step, epoch: of the result.
    """

    step: int
    epoch: int
    tasks: tuple[Task, ...]

    def __str__(self) -> str:
        return ", ".join(TITLES[task] for task in self.tasks)

    def write(self, output_dir: Path) -> None:
        """Replace the file, or delete it if nothing is left."""
        if self.tasks:
            write_json(output_dir / LEDGER_FILE, asdict(self))
        else:
            (output_dir / LEDGER_FILE).unlink(missing_ok=True)


def read_ledger(output_dir: Path) -> Ledger | None:
    """What is left to do in an output folder; None if nothing is."""
    return read_stored(output_dir / LEDGER_FILE, Ledger)


def strike(output_dir: Path, *done: Task) -> None:
    """Take tasks off the ledger."""
    # Read again, since several companions strike their tasks in between.
    if ledger := read_ledger(output_dir):
        left = tuple(task for task in ledger.tasks if task not in done)
        Ledger(ledger.step, ledger.epoch, left).write(output_dir)


class Companion:
    """A callback that is called last, and may also act before training and after the result is on disk.

    The command line opens the companions that a configuration asks for. A companion overrides what it needs.

    Attributes:
        in_use: checkpoints that may not be removed now.
    """

    in_use: Collection[Path] = ()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What it does once the result is on disk."""
        return ()

    def begin(self, plan: Plan, step: int) -> None:
        """Subscribe to the events of a session that continues after a step, or has only its end left to do.

        Args:
            plan: without files that turned out to be damaged.
        """

    def around(self, session: Session, budget: Budget) -> AbstractContextManager[object]:
        """Held while the session trains."""
        return nullcontext()

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        """See `Callback`."""

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        """See `Callback`."""

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """See `Callback`."""

    def finish(self, ledger: Ledger) -> str:
        """Do what is left to do for the result; returns a line that names what it made."""
        return ""

    @property
    def unfinished(self) -> str:
        """A line that says what it could not do, and how to do it; empty if everything is done."""
        return ""
