"""The training loop: the same one for every family, flavour and technique.

Code that changes the mathematics belongs in an adapter (`models`) or a technique (`techniques`). Code that observes,
saves or renders is a callback. Neither needs a change here.
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
    """Called in a fixed order: EMA, evaluation, record, requests, checkpoints, previews, companions.

    A step is recorded before its checkpoint, so that a run resumed from it has every line. Previews take long and come
    after it; those lost to a kill are rendered on resume. Uploads include them.
    """

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        """Before the first step of this process, at `state.global_step` steps done."""
        return

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        """After the update. `state.global_step` includes this step, `state.epochs_done` does not yet."""
        return

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """After the last step, also if the run was asked to stop early."""
        return


def train(
    assembly: Assembly, loader: BatchLoader, state: TrainState, callbacks: Sequence[Callback], stop: Stop
) -> None:
    """Train from `state.global_step` to the end of the run.

    Raises:
        Interrupted: a stop was requested; the current step was finished and `on_train_end` was called.
    """
    assembly.transformer.train()
    _notify(callbacks, lambda callback: callback.on_train_start(assembly, state))
    # All processes stop before the same step: one that went on would wait forever for the rest.
    while state.global_step < assembly.settings.total_steps and not assembly.world.any(stop.requested):
        # The replay of a failed step reads its batches from here.
        state.data_before = before = loader.state_dict()
        try:
            report = optimizer_step(assembly, loader, state.global_step)
        except Interrupted:  # while new crops of an epoch were encoded: the step has not happened
            loader.load_state_dict(before)  # its first micro-batches will be read again
            break
        state.data_before = None
        state.global_step, state.epoch = report.step, report.epoch
        _notify(callbacks, lambda callback: callback.on_step_end(assembly, state, report))  # noqa: B023 - called at once
        state.epochs_done = report.epochs_done
    _notify(callbacks, lambda callback: callback.on_train_end(assembly, state))
    if assembly.world.any(stop.requested):  # also waits for what the others still write
        raise Interrupted(f"Stopped at step {state.global_step}; start again to continue from there.")


def _notify(callbacks: Sequence[Callback], call: Callable[[Callback], None]) -> None:
    """Call every callback, also after a stop request cut the previews or evaluation of one short."""
    for callback in callbacks:
        with suppress(Interrupted):
            call(callback)
