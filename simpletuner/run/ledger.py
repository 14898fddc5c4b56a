"""What is still to do after the last step of a run: a file, so that the next start finishes what a kill has cut short.

Free of torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import write_json

LEDGER_FILE = "unfinished.json"
Task = Literal["card", "uploads", "end"]
TITLES: dict[Task, str] = {"card": "the model card", "uploads": "the uploads", "end": "the end of the records"}
FULL: tuple[Task, ...] = ("card", "uploads", "end")
WITHOUT_UPLOADS: tuple[Task, ...] = ("card", "end")


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
        return ", ".join(TITLES[each] for each in self.tasks)

    def write(self, output_dir: Path) -> None:
        """Replace the file, or delete it if nothing is left."""
        if self.tasks:
            write_json(output_dir / LEDGER_FILE, asdict(self))
        else:
            (output_dir / LEDGER_FILE).unlink(missing_ok=True)


LEDGER = TypeAdapter(Ledger)


def read_ledger(output_dir: Path) -> Ledger | None:
    """What is left to do in an output folder; None if nothing is."""
    try:
        return LEDGER.validate_json((output_dir / LEDGER_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def strike(output_dir: Path, *done: Task) -> None:
    """Take tasks off the ledger."""
    if ledger := read_ledger(output_dir):
        left = tuple(each for each in ledger.tasks if each not in done)
        Ledger(ledger.step, ledger.epoch, left).write(output_dir)
