"""The doors through which a technique may change the mathematics of a step.

Whoever only watches is a callback (`training.loop`). At its neutral setting a technique equals plain training.
What the plan must know of a technique stands in its `spec.TechniqueSpec`, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.config.tread import Route
from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.models.adapter import BlockLayout, FamilyAdapter
from simpletuner.techniques.hidden_states import HiddenStates

# The velocity that the model predicts now, without gradients; techniques leave such a forward pass alone.
Predict = Callable[[NoisyBatch], Tensor]


class Technique:
    """Base of all techniques: every door is closed, a technique opens the ones it needs."""

    @property
    def name(self) -> str:
        """Names its module and its state in a checkpoint; a run has one technique of a kind."""
        return type(self).__name__

    @property
    def routes(self) -> Sequence[Route]:
        """Windows of blocks that see fewer tokens than there are, so that a step takes less arithmetic."""
        return ()

    def attach(self, site: Site) -> None:
        """Look around once, after the model is built and before the optimizer is: put hooks on blocks, build a module.

        Hooks must do nothing under `no_grad`, and draw no random numbers inside a block: activation checkpointing
        runs a block and its hooks twice. Hidden states come from `site.hidden`, which sees each once.
        torch's global generators are seeded for the technique, and put back afterwards.
        """

    def module(self) -> nn.Module | None:
        """Weights of its own, built in `attach`, float32; None without any.

        They are moved to the device, trained in a parameter group of their own, and saved in checkpoints alone: never
        in what is published, never in the moving average.
        """
        return None

    def adopt(self, module: nn.Module) -> None:
        """Take the module as it is prepared for several processes: this one must be called from now on."""

    def before_forward(self, noisy: NoisyBatch, predict: Predict) -> NoisyBatch:
        """Replace what the transformer is about to see or what it is compared with."""
        return noisy

    def kept_tokens(self, block: int) -> Tensor | None:
        """Which tokens this technique lets through a visual block in this micro-step: int64, `B K`; None for all."""
        return None

    def weigh(self, noisy: NoisyBatch, prediction: Tensor, loss: Tensor) -> Tensor:
        """The elementwise loss `B C F H W`, float32, weighted; its mean is what is trained."""
        return loss

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> Mapping[str, Tensor]:
        """Scalars that are added to the loss, by the name under which they are logged."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the module for an exact continuation."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""


@dataclass(frozen=True)
class Site:
    """What a technique may see when it is attached.

    Attributes:
        transformer: with its LoRA, checkpointing and compilation; not yet on the device.
        device: where a step computes.
        dtype: of the transformer's hidden states.
        others: all techniques of the run, this one among them, in the order in which their doors are passed.
        disabled: while entered, the model is what it was before training.
        hidden: hidden states of visual blocks in the forward pass of each micro-step.
    """

    adapter: FamilyAdapter
    transformer: nn.Module
    layout: BlockLayout
    device: torch.device
    dtype: torch.dtype
    others: Sequence[Technique]
    disabled: Callable[[], AbstractContextManager[None]]
    hidden: HiddenStates

    def kept_tokens(self, block: int) -> Tensor | None:
        """Which tokens the hidden states of a visual block hold, int64, `B K`; None when all do."""
        found = (technique.kept_tokens(block) for technique in self.others)
        return next((kept for kept in found if kept is not None), None)
