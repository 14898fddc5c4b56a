"""Progress as a live display at the bottom of a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType
from typing import Self, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from simpletuner.reporting.pace import Pace, amount, clock, pace_text, size_text
from simpletuner.reporting.progress import Phase, StepNumbers

REFRESHES_PER_SECOND = 4
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32


class LiveProgress:
    """Bars for the phases under way and a panel for training; everything else scrolls by above them.

    The display redirects `sys.stdout` and `sys.stderr`, so log lines and prints of libraries land above it too.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=self._console,
        )
        self._pace: Pace | None = None
        self._live: Live | None = None

    @contextmanager
    def phase(self, title: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        self._show()
        task = self._bars.add_task(title, total=total, unit=unit, note="")
        phase = _LivePhase(self._bars, task)
        started = time.monotonic()
        try:
            yield phase
        except BaseException:
            self._print(Text.assemble(("✗ ", "red"), title, (f"  stopped at {amount(phase.done, unit)}", "dim")))
            raise
        else:
            took = f"  {amount(phase.done, unit)} in {clock(time.monotonic() - started)}"
            self._print(Text.assemble(("✓ ", "green"), title, (took, "dim")))
        finally:
            self._bars.remove_task(task)

    def start_training(self, total_steps: int, start_step: int = 0) -> None:
        self._pace = Pace(total_steps, start_step)
        self._show()

    def step(self, report: StepNumbers) -> None:
        if self._pace is None:
            raise RuntimeError("start_training() comes before the first step()")
        self._pace.add(report)

    def say(self, text: str) -> None:
        self._print(Text(text))

    def finish(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._pace is not None:
            self._print(
                Text.assemble(("✓ " if self._pace.remaining_seconds == 0 else "■ ", "green"), self._pace.summary())
            )
            self._pace = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def _show(self) -> None:
        """Start the display with the first thing worth showing; until then the terminal is left alone."""
        if self._live is not None:
            return
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            # Errors that were sent to a file stay there; only what would tear the display apart is redirected.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._bars] if self._bars.tasks else []
        if self._pace is not None:
            parts.append(training_panel(self._pace))
        return Group(*parts)


def training_panel(pace: Pace) -> Panel:
    """Bar, numbers and the course of the smoothed loss."""
    done = pace.last.step if pace.last else pace.start_step
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right")
    share = done / pace.total_steps if pace.total_steps else 1.0
    left = f"{share:.0%}  {clock(pace.remaining_seconds)} left" if pace.last else f"{share:.0%}"
    bar.add_row(ProgressBar(total=max(1, pace.total_steps), completed=done), Text(left))
    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(*(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in _numbers(pace)))
    course = Text(sparkline(pace.losses, SPARK_WIDTH), style="cyan")
    title = f"[bold]Training[/]  step {done:,} of {pace.total_steps:,}"
    speed = Text(pace.speed if pace.last else "", style="dim")
    return Panel(Group(bar, numbers, speed, course), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))


def sparkline(values: list[float], width: int) -> str:
    """The course of the values in one line of blocks, each the mean of an equal share of them."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - low) / span * top) if span else 0] for mean in means)


def _numbers(pace: Pace) -> Iterator[tuple[str, str]]:
    report = pace.last
    if report is None:
        yield "waiting for", "the first step"
        return
    yield "loss", f"{pace.loss:.4f}"
    yield "learning rate", f"{report.learning_rate:.2e}"
    yield "pace", pace_text(pace.seconds_per_step)
    yield "epoch", f"{report.epoch}/{report.epochs}" if report.epochs else str(report.epoch)
    if report.memory_bytes is not None:
        yield "memory", size_text(report.memory_bytes)


class _LivePhase:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task
        self.done = 0

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        self._bars.update(self._task, advance=count, note=note)
