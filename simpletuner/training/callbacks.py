"""Who watches a run: callbacks see every step and change nothing that is trained."""

from __future__ import annotations

from typing import Protocol

from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import StepReport


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
