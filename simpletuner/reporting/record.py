"""Writes the record of a run from its events; `metrics` defines its two files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner.reporting import events, metrics
from simpletuner.reporting.step_figures import row_of


@dataclass(frozen=True)
class Recorded:
    """The records of the step from which a session resumes; sent to all processes.

    Attributes:
        evaluated: whether the step has an evaluation loss.
        previews: previews of the step.
    """

    evaluated: bool
    previews: list[metrics.MediaRecord]


def _was_evaluated(folder: Path, step: int) -> bool:
    """Whether the record has an evaluation loss of a step."""
    for row in metrics.read_rows(folder / metrics.METRICS_FILE):
        if row["step"] == step and any(name.startswith(metrics.EVALUATED) for name in row):
            return True
    return False


class RunRecord:
    """Subscriber that writes both files.

    Args:
        step: step from which the session resumes; records of later steps are dropped.

    Attributes:
        recorded: existing records of that step.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._metrics = metrics.MetricsFile(folder / metrics.METRICS_FILE, step)
        self._media = metrics.MediaFile(folder / metrics.MEDIA_FILE, step)
        # Read after both files are opened, which drops rows of an earlier run for step 0.
        self.recorded = Recorded(
            evaluated=_was_evaluated(folder, step),
            previews=[
                record
                for record in metrics.read_media(folder / metrics.MEDIA_FILE)
                if record.step == step
            ],
        )
        self._step = step
        self._losses: Mapping[str, float] = {}

    def __call__(self, event: events.Event) -> None:
        match event:
            # An evaluation precedes the report of its step and shares its row.
            case events.Evaluated() if event.step > self._step:
                self._losses = event.losses
            case events.Evaluated():  # on resume, for a step recorded without its evaluation
                self._metrics.append(event.step, event.losses)
            case events.StepReport():
                self._metrics.append(event.step, {**row_of(event), **self._losses})
                self._step = event.step
                self._losses = {}
            case events.MediaRendered():
                self._media.append(event.media)
            case events.StateChanged() if event.state in events.ENDED:
                self._metrics.close()
                self._media.close()
