"""Callbacks that update the moving average, publish steps as events, and handle requests."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from simpletuner.distributed.requests import Request, take_request, take_requests
from simpletuner.reporting.events import EventStream, StateChanged, StepReport
from simpletuner.reporting.intervals import Rounds
from simpletuner.reporting.pace import SlowSteps
from simpletuner.training.loop import Callback
from simpletuner.training.state import Assembly, TrainState


class EmaUpdater(Callback):
    """Callback that updates the moving average, if enabled."""

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        if assembly.trained.ema is not None:
            assembly.is_halfway = True  # until the average is of the same step as the weights
            assembly.trained.ema.update(state.global_step)
            assembly.is_halfway = False


@dataclass
class Recorder(Callback):
    """Callback that publishes every step; `run.train` publishes the end of the run.

    Attributes:
        matmul_flops: FLOP/s of the device, if measured.
        rounds: recurring work between steps, such as previews.
        step_seconds: expected duration of a step.
        slow_steps: detects slow steps.
    """

    events: EventStream
    epochs: int
    matmul_flops: float | None = None
    rounds: Mapping[str, Rounds] = field(default_factory=dict)
    step_seconds: float = 0.0
    slow_steps: SlowSteps = field(default_factory=SlowSteps)
    _recorded: int = field(default=0, init=False)

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        total = assembly.settings.total_steps
        self.events.publish(
            StateChanged(
                "running",
                state.global_step,
                total,
                rounds=self.rounds,
                step_seconds=self.step_seconds,
            )
        )

    def on_failure(self, assembly: Assembly, state: TrainState) -> None:
        """Record the last step if an earlier callback failed: its checkpoint needs its line."""
        if state.report is not None and state.report.step > self._recorded:
            self.on_step_end(assembly, state, state.report)

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        self._recorded = report.step
        ema = assembly.trained.ema
        metrics = dict(report.metrics)
        if ema is not None:
            metrics["ema_decay_value"] = ema.decay_value
        completed = replace(
            report,
            metrics=metrics,
            mfu=utilisation(report, self.matmul_flops),
            memory_bytes=peak_memory(),
            reserved_bytes=torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None,
            epochs=self.epochs,
        )
        self.events.publish(completed)
        notice = self.slow_steps.add(report)
        if notice:
            self.events.notify(notice)


def utilisation(report: StepReport, matmul_flops: float | None) -> float | None:
    """Model FLOP utilisation: the model's FLOP/s as a share of the device's rate.

    Recomputation by activation checkpointing does not count (Chowdhery et al., arXiv 2204.02311,
    appendix B).
    """
    if report.flops is None or matmul_flops is None:
        return None
    return report.flops / report.seconds / matmul_flops


def peak_memory() -> int:
    """Peak memory in bytes: of the GPU, or of this process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource  # Unix only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux kibibytes.
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass
class RequestHandler(Callback):
    """Callback that handles requests, and stops before the disk is full.

    Requests are files in `output_dir/requests/`.

    Attributes:
        actions: functions to call, by request; stops are handled here.
        least_free: free space of the disk of `output_dir`, in GB, below which the run stops.
        ends_with_epoch: whether to stop when the epoch is complete.
    """

    output_dir: Path
    events: EventStream
    actions: Mapping[Request, Callable[[Assembly, TrainState], object]]
    least_free: float = 0.0
    ends_with_epoch: bool = field(default=False, init=False)

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        # Only the main process takes the file; its watch forwards the stop to all others.
        if assembly.world.is_main:
            total_steps = assembly.settings.total_steps
            self.events.stop.add_source(lambda: self._is_asked_to_stop(state, total_steps))

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        total_steps = assembly.settings.total_steps
        # The main process looks for all processes: requests are collective, and a file could appear
        # after one process has looked and before another does.
        for request in assembly.world.on_main(partial(take_requests, self.output_dir)):
            if request == "stop":
                self._stop(state, total_steps, "as requested.")
            elif request == "stop_at_epoch_end":
                self.ends_with_epoch = True
                self.events.notify(
                    f"The run will stop at the end of epoch {report.epoch}, as requested."
                )
            else:
                self.actions[request](assembly, state)
        if self.ends_with_epoch and report.epochs_done > state.epochs_done:
            self._stop(state, total_steps, f"epoch {report.epochs_done} is complete.")
        if self.least_free:
            free = shutil.disk_usage(self.output_dir).free / 1e9
            if free < self.least_free:
                disk = f"{str(self.output_dir)!r} has {free:.1f} GB free"
                threshold = f"disk_low_threshold is {self.least_free:g} GB."
                self._stop(state, total_steps, f"{disk} and {threshold}")

    def _is_asked_to_stop(self, state: TrainState, total_steps: int) -> bool:
        """Polled between steps and, during previews, between sampling steps."""
        is_requested = take_request(self.output_dir, "stop")
        if is_requested:
            self._stop(state, total_steps, "as requested.")
        return is_requested

    def _stop(self, state: TrainState, total_steps: int, reason: str) -> None:
        self.events.stop.request()
        self.events.publish(
            StateChanged("stopping", state.global_step, total_steps, f"Stopping, {reason}")
        )
