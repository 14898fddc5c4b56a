"""A figure of a step is one entry of a table, and appears in all records and displays."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.display.progress import PlainDisplay
from simpletuner.annexes.figures import Columns
from simpletuner.annexes.page.runs.run_head import live_figures
from simpletuner.annexes.payloads import Payloads
from simpletuner.annexes.report.html import charts_of
from simpletuner.annexes.trackers import TrackerEvents
from simpletuner.reporting.events import EventStream, StateChanged, StepReport
from simpletuner.reporting.metrics import METRICS_FILE
from simpletuner.reporting.record import RunRecord
from simpletuner.reporting.step_figures import FIGURES, Curve, Figure, row_of

METRICS = {"train_loss": 0.25, "learning_rate": 1e-4}
SECONDS_OF_STEP_2 = 0.5


@pytest.fixture
def pictures_a_second() -> Iterator[str]:
    """A new figure: the one line that a newcomer adds."""
    figure = Figure(
        "pictures_per_second",
        lambda step: 2 / step.seconds,
        digits=2,
        title="Pictures",
        text="{:.1f} a second".format,
        short="pictures",
        curve=Curve("Pictures per second"),
    )
    FIGURES.append(figure)
    yield figure.name
    FIGURES.remove(figure)


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.rows.append(metrics)

    def log_timesteps(self, timesteps: Sequence[float], step: int) -> None: ...

    def log_media(self, media: Sequence[Any], step: int) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...


def test_a_new_figure_appears_in_every_view(tmp_path: Path, pictures_a_second: str) -> None:
    printed = io.StringIO()
    tracker = Kept()
    payloads = Payloads(every=0)
    sent: list[dict[str, Any]] = []
    events = EventStream(
        PlainDisplay(printed),
        TrackerEvents(tracker),
        RunRecord(tmp_path, 0),
        lambda event: sent.extend(payloads(event)),
    )

    events.publish(StateChanged("running", 0, 2))
    events.publish(StepReport(1, 1, METRICS, 1.0))
    events.publish(StepReport(2, 1, METRICS, SECONDS_OF_STEP_2))

    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [row[pictures_a_second] for row in rows] == [2.0, 4.0]
    assert [row[pictures_a_second] for row in tracker.rows] == [2.0, 4.0]
    progress = sent[-1]["progress"]
    assert progress["metrics"][pictures_a_second] == 4.0
    assert dict(live_figures(progress, Columns.of(rows)))["Pictures"] == "4.0 a second"
    assert "  pictures 4.0 a second" in printed.getvalue().splitlines()[-1]
    assert "Pictures per second" in [chart.title for chart in charts_of(Columns.of(rows))]


def test_a_metric_in_the_table_is_recorded_once() -> None:
    step = StepReport(1, 1, {**METRICS, "grad_norm": 0.5}, 1.0)

    assert row_of(step)["grad_norm"] == 0.5
    assert list(row_of(step)) == [
        *("train_loss", "learning_rate", "grad_norm", "seconds", "data_seconds"),
        *("compute_share", "data_share", "timesteps"),
    ]


def test_figures_are_rounded_in_the_record_only() -> None:
    step = StepReport(1, 1, METRICS, 1.23456789, memory_bytes=11_412_345_678, mfu=0.41234567)

    row = row_of(step)

    assert (row["seconds"], row["mfu"], row["peak_memory_gb"]) == (1.234568, 0.412346, 11.412)
