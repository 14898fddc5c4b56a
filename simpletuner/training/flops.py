"""What training on a sample costs, for the utilisation that the record shows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from simpletuner.models.cost import NO_ADAPTERS, Adapters, FamilyCost, Load
from simpletuner.techniques.base import Technique
from simpletuner.training.state import SampleFlops

# A run has a few bucket shapes, each with captions of a few hundred lengths.
REMEMBERED = 4096


def count_flops(transformer: nn.Module, cost: FamilyCost, techniques: Sequence[Technique]) -> SampleFlops:
    """FLOPs of a sample, forward and backward, from its tokens and text tokens; what is computed twice counts once.

    Tokens that pass by blocks count in the others alone.
    """
    model: Any = transformer
    costs, adapters = cost.transformer(model.config), adapters_of(transformer)
    is_full = adapters is NO_ADAPTERS
    routes = [route for technique in techniques for route in technique.routes]

    @lru_cache(REMEMBERED)
    def flops(tokens: int, text_tokens: int) -> float:
        load = costs.routed(Load(samples=1, frames=1, height=1, width=tokens, text=text_tokens), routes)
        return (costs.forward(load, adapters) + costs.backward(load, adapters, full=is_full)).total

    return flops


def adapters_of(transformer: nn.Module) -> Adapters:
    """The LoRA inside a model; `NO_ADAPTERS` when it has none."""
    layers = {name: each for name, each in transformer.named_modules() if isinstance(each, BaseTunerLayer)}
    if not layers:
        return NO_ADAPTERS
    ranks = {rank for layer in layers.values() for rank in layer.r.values()}
    return Adapters(max(ranks), frozenset(layers))
