"""The training loop, the same for every family, flavour and technique.

Code that changes the mathematics belongs in an adapter (`models`) or a technique (`techniques`). Code that observes,
saves or renders is a callback. Neither requires changes here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from simpletuner.data.loader import BatchLoader
from simpletuner.distributed.requests import Stop
from simpletuner.errors import Interrupted
from simpletuner.reporting.events import StepReport
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import optimizer_step


class Callback(Protocol):
    """An observer of training. Calling order: EMA, evaluation, record, requests, checkpoints, previews, companions.

    A step is recorded before its checkpoint, so that a resumed run has every line. Previews are slow and follow the
    checkpoint; previews lost to a kill are rendered on resume. Uploads come last, to include them.
    """

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        """Called before the first step of this process, after `state.global_step` steps of the run."""
        return

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        """Called after the update. `state.global_step` includes this step, `state.epochs_done` does not yet."""
        return

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """Called after the last step, also after a request to stop early."""
        return


def train(
    assembly: Assembly, loader: BatchLoader, state: TrainState, callbacks: Sequence[Callback], stop: Stop
) -> None:
    """Train from `state.global_step` to the end of the run.

    Raises:
        Interrupted: a stop was requested; the current step is finished and `on_train_end` has been called.
    """
    assembly.transformer.train()
    _notify(callbacks, lambda callback: callback.on_train_start(assembly, state))
    # All processes stop before the same step; otherwise, some would wait forever.
    while state.global_step < assembly.settings.total_steps and not assembly.world.any(stop.requested):
        # The replay of a failed step reads its batches from here.
        state.data_before = before = loader.state_dict()
        try:
            report = optimizer_step(assembly, loader, state.global_step)
        except Interrupted:  # while new crops of an epoch were being encoded, before the step
            loader.load_state_dict(before)  # read its first micro-batches again
            break
        state.data_before = None
        state.global_step, state.epoch = report.step, report.epoch
        _notify(callbacks, lambda callback: callback.on_step_end(assembly, state, report))  # noqa: B023 - called at once
        state.epochs_done = report.epochs_done
    _notify(callbacks, lambda callback: callback.on_train_end(assembly, state))
    if assembly.world.any(stop.requested):  # also waits until all processes have finished writing
        raise Interrupted(f"Stopped at step {state.global_step}; start again to continue from there.")


def _notify(callbacks: Sequence[Callback], call: Callable[[Callback], None]) -> None:
    """Call every callback, even if a stop request interrupts the previews or evaluation of one."""
    for callback in callbacks:
        with suppress(Interrupted):
            call(callback)
