"""The loop. There is one, for every family, flavour and technique.

What changes the mathematics comes in through the adapter (`models`) and the techniques (`techniques`); what watches,
saves and renders comes in through callbacks. Neither needs a line here.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from simpletuner.data.loader import BatchLoader
from simpletuner.errors import Interrupted
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import StepReport, optimizer_step


class Callback(Protocol):
    """Called in a fixed order: EMA, checkpoints, evaluation, record, previews, report."""

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        """Before the first step of this process, at `state.global_step` steps done."""
        ...

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        """After the update; `state.global_step` counts the step just done, `state.epochs_done` is from before it."""
        ...

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """After the last step, also when the run was asked to stop early."""
        ...


@dataclass
class StopRequest:
    """Whether Ctrl-C asked the run to stop after the current step."""

    requested: bool = False


def train(
    assembly: Assembly, loader: BatchLoader, state: TrainState, callbacks: Sequence[Callback], stop: StopRequest
) -> None:
    """Train from `state.global_step` to the end of the run.

    Raises:
        Interrupted: Ctrl-C; the step under way was finished and the callbacks have seen the end of the run.
    """
    assembly.transformer.train()
    for callback in callbacks:
        callback.on_train_start(assembly, state)
    while state.global_step < assembly.settings.total_steps and not stop.requested:
        report = optimizer_step(assembly, loader, state.global_step)
        state.global_step, state.epoch = report.step, report.epoch
        for callback in callbacks:
            callback.on_step_end(assembly, state, report)
        state.epochs_done = report.epochs_done
    for callback in callbacks:
        callback.on_train_end(assembly, state)
    if stop.requested:
        raise Interrupted(f"Stopped at step {state.global_step}; start again to continue from there.")


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C (or SIGTERM) into a request to stop after the step; the second one interrupts at once."""
    stop = StopRequest()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in previous:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
