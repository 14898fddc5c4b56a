"""The doors through which a technique may change the mathematics of a step.

Whoever only watches is a callback (`training.loop`). At its neutral setting a technique equals plain training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from simpletuner.config.tread import Route
from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.models.adapter import FamilyAdapter


class Technique:
    """Base of all techniques: every door is closed, a technique opens the ones it needs."""

    @property
    def name(self) -> str:
        """What its parameters and its state go by in a checkpoint; a run has one technique of a kind."""
        return type(self).__name__

    @property
    def routes(self) -> Sequence[Route]:
        """Windows of blocks that see fewer tokens than there are, so that a step takes less arithmetic."""
        return ()

    def attach(self, adapter: FamilyAdapter, transformer: nn.Module) -> None:
        """Put forward hooks on the transformer. They must do nothing under `no_grad`, and draw no random numbers
        inside a block: activation checkpointing runs a block twice."""

    def before_forward(self, noisy: NoisyBatch) -> NoisyBatch:
        """Replace what the transformer is about to see or what it is compared with."""
        return noisy

    def loss_weight(self, noisy: NoisyBatch) -> Tensor | None:
        """Factor per sample for the diffusion loss, `B`; None is 1."""
        return None

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> Mapping[str, Tensor]:
        """Scalars that are added to the loss, by the name under which they are logged."""
        return {}

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Weights of the technique's own that are trained with the model."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold for an exact continuation."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint."""
