"""The record of a run, and its mirrors.

`training_metrics.jsonl` is the record; terminal, trackers and report show what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from simpletuner.reporting.metrics import MetricsFile
from simpletuner.reporting.progress import Progress, StepNumbers
from simpletuner.reporting.trackers import GuardedTracker
from simpletuner.training.ema import Ema
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import StepReport


@dataclass
class Recorder:
    """Callback that writes every step down and passes it on."""

    metrics: MetricsFile
    progress: Progress
    trackers: Sequence[GuardedTracker]
    ema: Ema | None
    epochs: int

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        self.progress.start_training(assembly.settings.total_steps, state.global_step)

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        values = dict(report.metrics)
        if self.ema is not None:
            values["ema_decay_value"] = self.ema.decay_value
        timing = {"seconds": round(report.seconds, 6), "data_seconds": round(report.data_seconds, 6)}
        self.metrics.append(report.step, values | timing)
        for tracker in self.trackers:
            tracker.log(values, report.step)
            tracker.log_timesteps([timestep for timestep, _ in report.samples], report.step)
        self.progress.step(
            StepNumbers(
                step=report.step,
                epoch=report.epoch,
                loss=values["train_loss"],
                learning_rate=values["learning_rate"],
                seconds=report.seconds,
                data_wait_seconds=report.data_seconds,
                memory_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
                epochs=self.epochs,
            )
        )

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """The record is closed by who opened it, also when the run ends with an error."""


@dataclass
class ReportWriter:
    """Callback that rewrites the HTML report now and then, and when previews are new.

    Attributes:
        write: writes the report as of a step.
        interval: steps between two versions.
    """

    write: Callable[[int], None]
    interval: int

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        self.write(state.global_step)

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        if state.global_step % self.interval == 0:
            self.write(state.global_step)

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """The end of the run writes its own version, which knows how it ended."""


@dataclass
class EmaUpdater:
    """Callback that folds the new weights into the moving average."""

    ema: Ema

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        """The average exists since assembly."""

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        self.ema.update(state.global_step)

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """Nothing is left to do."""
