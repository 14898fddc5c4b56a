"""The record of a run, and its mirrors.

`training_metrics.jsonl` is the record; terminal, trackers and report show what is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from simpletuner.reporting.metrics import MetricsFile, Value
from simpletuner.reporting.pace import shares
from simpletuner.reporting.progress import Progress, StepNumbers
from simpletuner.reporting.slowness import SlowSteps
from simpletuner.reporting.trackers import GuardedTracker
from simpletuner.training.ema import Ema
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import StepReport


@dataclass
class Recorder:
    """Callback that writes every step down and passes it on.

    Attributes:
        matmul_flops: the device's measured rate, in operations per second; None where it was not measured.
        slow_steps: notices when steps become slower.
    """

    metrics: MetricsFile
    progress: Progress
    trackers: Sequence[GuardedTracker]
    ema: Ema | None
    epochs: int
    matmul_flops: float | None = None
    slow_steps: SlowSteps = field(default_factory=SlowSteps)

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        self.progress.start_training(assembly.settings.total_steps, state.global_step)

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        values = dict(report.metrics)
        if self.ema is not None:
            values["ema_decay_value"] = self.ema.decay_value
        mfu = utilisation(report, self.matmul_flops)
        timesteps = [round(timestep, 1) for timestep, _ in report.samples]
        memory = round(peak_memory() / 1e9, 3)
        row: dict[str, Value] = {**values, **timing_of(report, mfu), "peak_memory_gb": memory, "timesteps": timesteps}
        self.metrics.append(report.step, row)
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
                weights_wait_seconds=report.weights_seconds,
                mfu=mfu,
                memory_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
                epochs=self.epochs,
            )
        )
        notice = self.slow_steps.add(report.shapes, report.seconds, report.data_seconds, report.weights_seconds)
        if notice is not None:
            self.progress.say(notice)

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """The record is closed by who opened it, also when the run ends with an error."""


def utilisation(report: StepReport, matmul_flops: float | None) -> float | None:
    """Model FLOP utilisation: the model's arithmetic per second in units of the device's rate.

    What checkpointing computes a second time does not count (Chowdhery et al., arXiv 2204.02311, appendix B).
    """
    if report.flops is None or matmul_flops is None:
        return None
    return report.flops / report.seconds / matmul_flops


def peak_memory() -> int:
    """Bytes that were in use at most so far: of the GPU, or of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource  # Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def timing_of(report: StepReport, mfu: float | None) -> dict[str, float]:
    """The duration of a step and what it went into, by their names in the record."""
    seconds = {
        "seconds": report.seconds,
        "data_seconds": report.data_seconds,
        "weights_seconds": report.weights_seconds,
        "mfu": mfu,
    }
    parts = shares(report.seconds, report.data_seconds, report.weights_seconds)
    named = seconds | {f"{name}_share": share for name, share in parts.items()}
    return {name: round(value, 6) for name, value in named.items() if value is not None}


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
