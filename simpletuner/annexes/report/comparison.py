"""The comparison of checkpoints as a table: prompts at strengths below, checkpoints across."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from simpletuner.annexes.figures import Columns
from simpletuner.annexes.report.html import grid_order, thin
from simpletuner.annexes.report.sheet import Sheet, SheetCell, best_of, loss_at

MOST_COLUMNS = 40
MOST_CELLS = 4000
Link = Callable[[SheetCell], str]  # the URL of a cell's file; empty if the file does not exist


@dataclass(frozen=True)
class Column:
    """Weights that are compared.

    Attributes:
        step: 0 for the untrained model.
        loss: the evaluation loss at strength 1; None if it is unknown.
        is_measured: it was measured at this step, not interpolated.
        note: what else is to be said of them.
        has_weights: whether they can be used: they are the result or in a checkpoint.
    """

    step: int
    loss: float | None = None
    is_measured: bool = False
    is_best: bool = False
    note: str = ""
    has_weights: bool = True


@dataclass(frozen=True)
class TableCell:
    """A render in the table.

    Attributes:
        source: its URL; empty if it is not rendered.
        loss: the evaluation loss of these weights at this strength, if measured.
    """

    record: SheetCell
    source: str
    loss: float | None = None
    is_best: bool = False


@dataclass(frozen=True)
class StrengthRow:
    """A prompt at one strength: a cell for every column; None for what was never planned."""

    strength: float
    ema: bool
    cells: Sequence[TableCell | None]

    @property
    def label(self) -> str:
        """Its strength, as text."""
        return f"{self.strength:g}, EMA" if self.ema else f"{self.strength:g}"


@dataclass(frozen=True)
class PromptRows:
    """The lines of a prompt."""

    name: str
    prompt: str
    lines: Sequence[StrengthRow]


@dataclass(frozen=True)
class CheckpointTable:
    """The table.

    Attributes:
        hidden: number of prompts that are left out.
    """

    columns: Sequence[Column]
    prompts: Sequence[PromptRows]
    hidden: int = 0

    @property
    def has_strengths(self) -> bool:
        """Whether a prompt has more than one line."""
        return any(len(prompt.lines) > 1 for prompt in self.prompts)

    @property
    def has_trained(self) -> bool:
        """Whether it has a column besides the untrained model's."""
        return any(column.step > 0 for column in self.columns)

    @property
    def cells(self) -> list[TableCell]:
        """All cells, rendered or not."""
        lines = [line for prompt in self.prompts for line in prompt.lines]
        return [cell for line in lines for cell in line.cells if cell is not None]


@dataclass(frozen=True)
class Shown:
    """What decides how a table is shown, besides its sheet.

    Attributes:
        usable: steps whose weights still exist; None means all.
        notes: of a step.
    """

    usable: Collection[int] | None = None
    notes: Mapping[int, str] = field(default_factory=dict)

    def has_weights(self, step: int) -> bool:
        """Whether the weights of a step can be used."""
        return step > 0 and (self.usable is None or step in self.usable)


def build_table(sheet: Sheet, link: Link, shown: Shown = Shown()) -> CheckpointTable:
    """The table of a sheet."""
    steps = _steps_of(sheet, shown)
    # Of all that can be used: none is marked if the best one has no column yet.
    usable = steps if shown.usable is None else shown.usable
    best = best_of(sheet.metrics, filter(shown.has_weights, usable))
    columns = [_column(sheet.metrics, step, best, shown) for step in steps]
    by_prompt: dict[object, list[SheetCell]] = {}
    for cell in sorted(sheet.cells, key=grid_order):
        by_prompt.setdefault(cell.prompt_key, []).append(cell)
    prompts: list[PromptRows] = []
    count = 0
    for cells in by_prompt.values():
        count += len(cells)
        if prompts and count > MOST_CELLS:
            break
        lines = _lines(sheet, cells, steps, best, link)
        prompts.append(PromptRows(_name_of(cells[0], by_prompt), cells[0].prompt, lines))
    return CheckpointTable(columns, prompts, len(by_prompt) - len(prompts))


def _name_of(cell: SheetCell, prompts: Collection[object]) -> str:
    """The name of a row, with what distinguishes it from other rows of the same prompt."""
    same = [key for key in prompts if isinstance(key, tuple) and key[0] == cell.short_name]
    if len(same) == 1:
        return cell.short_name
    name = f"{cell.short_name}, {cell.width}×{cell.height}"
    return name if cell.seed is None else f"{name}, seed {cell.seed}"


def _steps_of(sheet: Sheet, shown: Shown) -> list[int]:
    """The steps of the columns: of too many, all that can be used and some others."""
    steps = sorted({cell.step for cell in sheet.cells})
    if len(steps) <= MOST_COLUMNS:
        return steps
    kept = {step for step in steps if step == 0 or shown.has_weights(step)}
    if len(kept) > MOST_COLUMNS:
        return thin(sorted(kept), MOST_COLUMNS)
    others = [step for step in steps if step not in kept]
    return sorted({*kept, *thin(others, MOST_COLUMNS - len(kept))} if others else kept)


def _column(metrics: Columns, step: int, best: int | None, shown: Shown) -> Column:
    loss, is_measured = loss_at(metrics, step) if step else (None, False)
    note = shown.notes.get(step, "")
    return Column(step, loss, is_measured, step == best, note, shown.has_weights(step))


def _lines(
    sheet: Sheet, cells: Sequence[SheetCell], steps: Sequence[int], best: int | None, link: Link
) -> list[StrengthRow]:
    """The lines of a prompt; each begins with the untrained model."""
    untrained = [cell for cell in cells if cell.step == 0]
    at: dict[tuple[float, bool], dict[int, SheetCell]] = {}
    for cell in cells:
        if cell.step:
            at.setdefault((cell.strength, cell.ema), {})[cell.step] = cell
    if not at:
        at[1.0, False] = {}
    lines = []
    for (strength, ema), by_step in sorted(at.items()):
        by_step |= {cell.step: cell for cell in untrained[:1]}
        line: list[TableCell | None] = []
        for step in steps:
            record = by_step.get(step)
            line.append(None if record is None else _cell(sheet, record, best, link))
        lines.append(StrengthRow(strength, ema, line))
    return lines


def _cell(sheet: Sheet, record: SheetCell, best: int | None, link: Link) -> TableCell:
    measured = sheet.measured
    loss = None
    if measured is not None and measured.step == record.step and not record.ema:
        loss = measured.losses.get(f"{record.strength:g}")
    best_strength = sheet.best_strength if best == sheet.best else 1.0
    is_best = record.step == best and record.strength == best_strength and not record.ema
    return TableCell(record, link(record), loss, is_best)
