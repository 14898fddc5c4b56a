"""A live progress display at the bottom of a terminal."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import TextIO, cast

from rich import box, progress
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from simpletuner.annexes.display.progress import Display, LastingStream, key_figures
from simpletuner.annexes.figures import Pace, ending, line_of, reached
from simpletuner.reporting import events
from simpletuner.reporting.layout import Layout
from simpletuner.reporting.wording import clock_text

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
# Columns for the ^C that a terminal echoes after the last line. If they wrapped, the display would
# begin one line lower than it thinks, and leave its first line behind.
ROOM_FOR_ECHO = 2 * len("^C")


class LiveDisplay(Display):
    """Bars for running phases and a panel for training; everything else scrolls above them.

    The display redirects `sys.stdout` and `sys.stderr`, so log lines and prints of libraries appear
    above it too.
    """

    def __init__(self, stream: LastingStream) -> None:
        self._console = Console(file=cast(TextIO, stream), highlight=False)
        self._bars = progress.Progress(
            progress.SpinnerColumn(finished_text="[green]✓[/]"),
            progress.TextColumn("{task.description}", style="bold"),
            progress.BarColumn(bar_width=28),
            progress.TextColumn("{task.fields[reached]}"),
            progress.TimeRemainingColumn(compact=True),
            # File names may contain brackets, which rich would parse as markup.
            progress.TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=self._console,
        )
        self._tasks: dict[events.PhaseStarted, progress.TaskID] = {}
        self._live: Live | None = None

    def show(self, event: events.Event) -> None:
        match event:
            case events.PhaseStarted():
                self._open()
                count = reached(event, 0) if event.total else ""  # such as the imports of torch
                self._tasks[event] = self._bars.add_task(
                    event.title, total=event.total, reached=count, note=""
                )
            case events.PhaseAdvanced():
                count = reached(event.phase, event.done)
                self._bars.update(
                    self._tasks[event.phase], completed=event.done, reached=count, note=event.note
                )
            # A line that scrolls replaces the bar, so that only running phases have bars.
            case events.PhaseEnded():
                self._bars.remove_task(self._tasks.pop(event.phase))
                mark = ("✓ ", "green") if event.complete else ("✗ ", "red")
                self._print(Text.assemble(mark, event.phase.title, (f"  {ending(event)}", "dim")))
            case events.StepReport():
                pass  # the panel follows the pace
            case events.Notice(urgent=True):
                self._print(Text(self._wrapped(line_of(event)), style="red"))
            case _:
                self.print_lines(line_of(event))

    def begin(self, pace: Pace) -> None:
        self._open()

    def print_lines(self, text: str) -> None:
        self._print(Text(self._wrapped(text)))

    def _wrapped(self, text: str) -> str:
        """The text with lines that end between words, where the terminal would break words."""
        return Layout(self._console.width).wrap_lines(text) if text else ""

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.pace is not None:
            mark = ("✓ ", "green") if self.pace.is_complete else ("■ ", "yellow")
            self._print(Text.assemble(mark, self.pace.summary()))
            self.pace = None

    def _open(self) -> None:
        """Start the display unless it runs; until then the terminal is left alone."""
        if self._live is not None:
            return
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=4,
            transient=True,  # `close` prints a summary in its place
            # Only output to the terminal would damage the display; redirected streams are left
            # alone.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def _print(self, text: Text) -> None:
        if text.plain:
            # soft_wrap keeps paths in one piece for copying.
            self._console.print(text, soft_wrap=True)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._bars] if self._bars.tasks else []
        if self.pace is not None:
            parts.append(training_panel(self.pace))
        return Constrain(Group(*parts), self._console.width - ROOM_FOR_ECHO)


def training_panel(pace: Pace) -> Panel:
    """Progress bar, key figures and a sparkline of the smoothed loss."""
    figures = {"waiting for": "the first step"}
    speed = ""
    if pace.last:
        figures = key_figures(pace, pace.last)
        speed = pace.speed
    numbers = Table.grid(padding=(0, 3))
    numbers.add_row(
        *(Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in figures.items())
    )
    losses = Text(sparkline(pace.losses, SPARK_WIDTH), style="cyan")
    return Panel(
        Group(_progress_row(pace), numbers, Text(speed, style="dim"), losses),
        title=f"[bold]Training[/]  step {pace.step:,} of {pace.total_steps:,}",
        title_align="left",
        box=box.ROUNDED,
        padding=(0, 1),
    )


def _progress_row(pace: Pace) -> Table:
    """The bar of the run, with its share and the remaining time."""
    share = pace.step / pace.total_steps if pace.total_steps else 1.0
    text = f"{share:.0%}"
    if pace.is_complete:
        text += "  finishing"
    if pace.remaining_seconds:
        text += f"  {clock_text(pace.remaining_seconds)} left"
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right")
    bar = ProgressBar(total=max(1, pace.total_steps), completed=pace.step)
    row.add_row(bar, Text(text))
    return row


def sparkline(values: list[float], width: int) -> str:
    """A line of block characters, each the mean of an equal number of values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    lowest = min(means)
    span = max(means) - lowest
    if not span:
        return SPARKS[0] * len(means)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - lowest) / span * top)] for mean in means)
