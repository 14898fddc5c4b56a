"""The comparison of a run's checkpoints: its cells, and which of them is the best."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, TypeAdapter, ValidationError

from simpletuner.annexes.figures import Columns, evaluation_points
from simpletuner.atomic import write_json
from simpletuner.config.json_reader import read_stored
from simpletuner.errors import UserError
from simpletuner.planning.checkpoint_folder import SWEEP_FOLDER
from simpletuner.reporting.metrics import METRICS_FILE, MediaRecord, read_rows

CONTENT = "sheet.json"
LOSSES = "losses.json"
# How earlier versions wrote the strength of a cell: at the end of its name.
AT_STRENGTH = re.compile(r"(.*) at (-?[\d.]+(?:e-?\d+)?)")


@dataclass(frozen=True)
class SheetCell(MediaRecord):
    """A render of a prompt with a checkpoint at a strength; step 0 is the untrained model."""

    strength: float = 1.0

    @property
    def prompt_key(self) -> tuple[str, str, int | None, int, int, int]:
        """What cells of the same prompt, noise and size have in common."""
        return (self.short_name, self.prompt, self.seed, self.index, self.width, self.height)


CELLS = TypeAdapter(list[SheetCell])


def numeral(text: str) -> str:
    """A text that is a finite number.

    Raises:
        ValueError: it is not.
    """
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return text


StrengthText = Annotated[str, AfterValidator(numeral)]


@dataclass(frozen=True)
class StrengthLosses:
    """Evaluation losses of one checkpoint.

    Attributes:
        losses: by strength.
    """

    step: int
    losses: Mapping[StrengthText, float]


@dataclass(frozen=True)
class Sheet:
    """A comparison of checkpoints.

    Attributes:
        title: name of the run.
        folder: the folder to which paths of cells are relative.
        cells: rendered and planned ones; the untrained model's have step 0.
        metrics: metrics of the run.
        measured: evaluation losses of one checkpoint by strength, if measured.
    """

    title: str
    folder: Path
    cells: Sequence[SheetCell]
    metrics: Columns
    measured: StrengthLosses | None = None

    @classmethod
    def of_run(cls, run: Path) -> Sheet:
        """The latest comparison of a run, from its output folder; without cells if there is none.

        Raises:
            UserError: as in `read`.
        """
        metrics = Columns.of(read_rows(run / METRICS_FILE))
        return cls.read(run / SWEEP_FOLDER, run.resolve().name, metrics)

    @classmethod
    def read(cls, folder: Path, title: str, metrics: Columns) -> Sheet:
        """Read the latest sheet of a folder.

        Raises:
            UserError: the list of cells is damaged.
        """
        sheet = cls(title, folder, read_cells(folder / CONTENT), metrics)
        stored = read_stored(folder / LOSSES, StrengthLosses)
        if stored is None:
            # Earlier versions did not write whose losses they are: of the best checkpoint.
            losses = read_stored(folder / LOSSES, dict[StrengthText, float])
            if losses and sheet.best:
                stored = StrengthLosses(sheet.best, losses)
        return cls(title, folder, sheet.cells, metrics, stored)

    def begin(self) -> None:
        """Write the list of planned cells, for pages that show progress."""
        cells = [asdict(cell) for cell in self.cells]
        write_json(self.folder / CONTENT, cells, durable=False)
        # The losses of an earlier sweep may be of another checkpoint.
        write_json(self.folder / LOSSES, {}, durable=False)

    def keep_losses(self) -> None:
        """Write the losses that were measured."""
        if self.measured is not None:
            write_json(self.folder / LOSSES, asdict(self.measured), durable=False)

    @property
    def records(self) -> list[SheetCell]:
        """The cells that are rendered."""
        return [cell for cell in self.cells if (self.folder / cell.path).is_file()]

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        return sorted({cell.step for cell in self.cells if cell.step})

    @property
    def strengths(self) -> list[float]:
        """The strengths of the checkpoints, in order."""
        return sorted({cell.strength for cell in self.cells if cell.step})

    @property
    def best(self) -> int | None:
        """The compared checkpoint with the lowest evaluation loss.

        The loss is interpolated between measured steps. None if no loss was measured, or none
        around a checkpoint, and without cells.
        """
        return best_of(self.metrics, self.steps)

    @property
    def best_strength(self) -> float:
        """The strength of the best checkpoint with the lowest loss; 1 if none was compared."""
        losses = self.losses
        if not losses:
            return 1.0
        return float(min(losses, key=losses.__getitem__))

    @property
    def losses(self) -> Mapping[str, float]:
        """The evaluation loss of the best checkpoint by strength, if measured."""
        if self.measured is None or self.measured.step != self.best:
            return {}
        return self.measured.losses

    @property
    def is_evaluated(self) -> bool:
        """Whether the run measured a loss on held-out files."""
        return bool(evaluation_points(self.metrics))

    @property
    def verdict(self) -> str:
        """A summary of the evaluation loss in one or two sentences."""
        points = evaluation_points(self.metrics)
        if not points:
            return (
                "No held-out loss was measured, so no checkpoint is marked. To have one marked, "
                "hold out a few files in the next run."
            )
        best_step, lowest = min(points, key=itemgetter(1))
        last_step, last_loss = points[-1]
        if best_step == last_step:
            summary = (
                f"The held-out loss is lowest at the last measured step ({lowest:.4g} at step "
                f"{best_step:,})."
            )
        else:
            summary = (
                f"The held-out loss is lowest at step {best_step:,} ({lowest:.4g}) and then "
                f"rises to {last_loss:.4g} at step {last_step:,}."
            )
        if self.best is None or not self.losses:
            return summary
        losses = [f"{loss:.4g} at strength {strength}" for strength, loss in self.losses.items()]
        return f"{summary} Checkpoint {self.best:,} has {', '.join(losses)}."


def read_cells(path: Path) -> list[SheetCell]:
    """The cells in the list of a sheet; none without a list.

    Raises:
        UserError: the list is damaged.
    """
    if not path.exists():
        return []
    try:
        cells = CELLS.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        raise UserError(
            f"{path} is damaged; the next comparison of checkpoints replaces it."
        ) from None
    return [_with_strength(cell) for cell in cells]


def _with_strength(cell: SheetCell) -> SheetCell:
    """A cell whose strength an earlier version wrote into its name."""
    match = AT_STRENGTH.fullmatch(cell.short_name)
    if match is None or cell.strength != 1.0:
        return cell
    values = {item.name: getattr(cell, item.name) for item in fields(cell)}
    return SheetCell(**values | {"short_name": match[1], "strength": float(match[2])})


def best_of(metrics: Columns, steps: Iterable[int]) -> int | None:
    """The step with the lowest evaluation loss, see `loss_at`; None if no loss is known."""
    known = {}
    for step in steps:
        loss, _ = loss_at(metrics, step)
        if loss is not None:
            known[step] = loss
    if not known:
        return None
    return min(known, key=known.__getitem__)


def loss_at(metrics: Columns, step: int) -> tuple[float | None, bool]:
    """The evaluation loss of a step, and whether it was measured; else it is interpolated.

    None outside the measured steps.
    """
    points = evaluation_points(metrics)
    steps = [point[0] for point in points]
    if not steps or not steps[0] <= step <= steps[-1]:
        return None, False
    loss = float(np.interp(step, steps, [point[1] for point in points]))
    return loss, step in steps
