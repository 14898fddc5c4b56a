"""The loop. There is one, for every family, flavour and technique.

What changes the mathematics comes in through the adapter (`models`) and the techniques (`techniques`); what watches,
saves and renders comes in through callbacks. Neither needs a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from simpletuner.data.loader import BatchLoader
from simpletuner.errors import Interrupted
from simpletuner.reporting.events import StopRequest
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import StepReport, optimizer_step


class Callback(Protocol):
    """Called in a fixed order: EMA, evaluation, record, requests, checkpoints, previews.

    A step is recorded before its checkpoint, so that a run that goes on from there lacks no line. Previews take long
    and come after it; what a kill has cost of them is rendered when the run goes on.
    """

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        """Before the first step of this process, at `state.global_step` steps done."""
        ...

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        """After the update; `state.global_step` counts the step just done, `state.epochs_done` is from before it."""
        ...

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """After the last step, also when the run was asked to stop early."""
        ...


def train(
    assembly: Assembly, loader: BatchLoader, state: TrainState, callbacks: Sequence[Callback], stop: StopRequest
) -> None:
    """Train from `state.global_step` to the end of the run.

    Raises:
        Interrupted: a stop was requested; the step under way was finished, and the callbacks have seen the end.
    """
    assembly.transformer.train()
    _tell(callbacks, lambda callback: callback.on_train_start(assembly, state))
    while state.global_step < assembly.settings.total_steps and not stop.requested:
        position = loader.state_dict()
        try:
            report = optimizer_step(assembly, loader, state.global_step)
        except Interrupted:  # while the new crops of an epoch were encoded: the step has not happened
            loader.load_state_dict(position)
            break
        state.global_step, state.epoch = report.step, report.epoch
        _tell(callbacks, lambda callback: callback.on_step_end(assembly, state, report))  # noqa: B023 - called at once
        state.epochs_done = report.epochs_done
    _tell(callbacks, lambda callback: callback.on_train_end(assembly, state))
    if stop.requested:
        raise Interrupted(f"Stopped at step {state.global_step}; start again to continue from there.")


def _tell(callbacks: Sequence[Callback], call: Callable[[Callback], None]) -> None:
    """Call each; a request to stop cuts previews and evaluations short, and the others still have their turn."""
    for callback in callbacks:
        with suppress(Interrupted):
            call(callback)
