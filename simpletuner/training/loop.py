"""The training loop, the same for every family, flavour and technique.

Code that changes the mathematics belongs in an adapter (`models`) or a technique (`techniques`).
Code that observes, saves or renders is a callback. Neither requires changes here.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from simpletuner.distributed.requests import Stop
from simpletuner.errors import Interrupted, WriteError
from simpletuner.reporting.events import StepReport
from simpletuner.training.loader import BatchLoader
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import optimizer_step

logger = logging.getLogger(__name__)


class Callback(Protocol):
    """An observer of training; a run calls all of them, one after the other.

    The order is EMA, evaluation, record, requests, checkpoints, previews, companions. A step is
    recorded before its checkpoint, so that a resumed run has every line. Previews are slow, so they
    follow the checkpoint; those lost to a kill are rendered on resume. Uploads come last, so that
    they include the previews.
    """

    def on_train_start(self, assembly: Assembly, state: TrainState) -> None:
        """Called before the first step of this session, `state.global_step` steps into the run."""
        return

    def on_step_end(self, assembly: Assembly, state: TrainState, report: StepReport) -> None:
        """Called after the update.

        `state.global_step` includes this step, `state.epochs_done` does not yet.
        """
        return

    def on_train_end(self, assembly: Assembly, state: TrainState) -> None:
        """Called after the last step, also after a request to stop early."""
        return

    def on_failure(self, assembly: Assembly, state: TrainState) -> None:
        """Called before an error ends the run, to save the weights of `state.global_step`.

        Called in one process alone, so it must not wait for the others.
        """
        return


def train(
    assembly: Assembly,
    loader: BatchLoader,
    state: TrainState,
    callbacks: Sequence[Callback],
    stop: Stop,
) -> None:
    """Train from `state.global_step` to the end of the run.

    Raises:
        Interrupted: a stop was requested; the current step is finished and `on_train_end` has been
            called.
    """
    assembly.transformer.train()
    try:
        _take_steps(assembly, loader, state, callbacks, stop)
    except Interrupted:
        raise
    except Exception as error:
        _save_before_failure(assembly, loader, state, callbacks, error)
        raise
    # Collective, so it also waits until all processes have finished writing.
    if assembly.world.any(stop.requested):
        raise Interrupted(
            f"Stopped at step {state.global_step}; start again to continue from there."
        )


def _take_steps(
    assembly: Assembly,
    loader: BatchLoader,
    state: TrainState,
    callbacks: Sequence[Callback],
    stop: Stop,
) -> None:
    """Take steps until the run is complete or a stop is requested, and call the callbacks.

    A stop request interrupts the previews or the evaluation of a callback. The callbacks after it
    are still called, so that the step is saved.
    """
    total_steps = assembly.settings.total_steps
    for callback in callbacks:
        with suppress(Interrupted):
            callback.on_train_start(assembly, state)

    # Collective: all processes stop before the same step, or some would wait forever in the next.
    while state.global_step < total_steps and not assembly.world.any(stop.requested):
        try:
            report = _take_step(assembly, loader, state)
        except Interrupted:
            break
        for callback in callbacks:
            with suppress(Interrupted):
                callback.on_step_end(assembly, state, report)
        state.epochs_done = report.epochs_done

    for callback in callbacks:
        with suppress(Interrupted):
            callback.on_train_end(assembly, state)


def _take_step(assembly: Assembly, loader: BatchLoader, state: TrainState) -> StepReport:
    """Take one step, and count it in the state.

    Raises:
        Interrupted: a stop was requested while new crops of an epoch were encoded, before the step.
    """
    # Where a replay of this step begins if it fails.
    position = loader.state_dict()
    state.data_before = position
    # Shallow copies instead of their state dicts, whose numbers would have to leave the device.
    state.techniques_before = [copy.copy(technique) for technique in assembly.techniques]
    try:
        report = optimizer_step(assembly, loader, state.global_step)
    except Interrupted:
        loader.load_state_dict(position)  # the step's first micro-batches are read again on resume
        raise
    state.data_before = None
    state.global_step = report.step
    state.epoch = report.epoch
    state.report = report
    assembly.is_halfway = False
    return report


def _save_before_failure(
    assembly: Assembly,
    loader: BatchLoader,
    state: TrainState,
    callbacks: Sequence[Callback],
    error: Exception,
) -> None:
    """Let the callbacks save the last complete step, if its weights are intact and can be saved."""
    # From now on, this process ends by its own error: its watch must not end it while it saves.
    assembly.world.first_failure(error)
    # Sharded weights could only be saved by all processes together.
    is_sharded = assembly.trained.sharers.size > 1
    if assembly.is_mid_update or is_sharded or isinstance(error, WriteError):
        return
    current_techniques = assembly.techniques
    if state.data_before is not None:  # within a step
        loader.load_state_dict(state.data_before)
        assembly.techniques = state.techniques_before
    for callback in callbacks:
        try:
            callback.on_failure(assembly, state)
        except Exception as saving_error:  # noqa: BLE001 - it must not mask the run's error
            logger.warning("Step %d could not be saved: %s", state.global_step, saving_error)
    assembly.techniques = current_techniques
