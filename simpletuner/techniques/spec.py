"""What the plan needs to know about techniques, as plain data without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from simpletuner.caching.catalogue import FeatureKind
from simpletuner.config.load import RunConfig
from simpletuner.config.tread import Route
from simpletuner.models.cost import BatchShape, TransformerCost

if TYPE_CHECKING:
    from simpletuner.techniques.base import Technique


@dataclass(frozen=True)
class TechniqueCost:
    """What a technique adds to one micro-batch.

    Attributes:
        parameters: number of weights in its module, all trained in float32.
        held: bytes kept on the device from the forward to the backward pass.
        flops: of forward and backward.
        forwards: mean number of extra forward passes of the transformer without gradients, through all tokens.
        passes: mean number of extra forward and backward passes, also through all tokens.
    """

    parameters: int = 0
    held: float = 0.0
    flops: float = 0.0
    forwards: float = 0.0
    passes: float = 0.0


def no_cost(transformer: TransformerCost, load: BatchShape) -> TechniqueCost:
    """The cost of a technique that adds no computation."""
    return TechniqueCost()


@dataclass(frozen=True)
class TechniqueSpec:
    """A technique that a configuration switches on.

    Attributes:
        build: creates the technique; imports torch.
        routes: ranges of blocks that some tokens skip.
        features: what it needs for every trained sample, cached beside the latents.
        cost: what it adds to a micro-batch.
    """

    build: Callable[[], Technique]
    routes: tuple[Route, ...] = ()
    features: tuple[FeatureKind, ...] = ()
    cost: Callable[[TransformerCost, BatchShape], TechniqueCost] = no_cost


def chosen_techniques(
    config: RunConfig, regularised: Mapping[str, float], strengths: Mapping[str, float] | None = None
) -> tuple[TechniqueSpec, ...]:
    """The techniques that a configuration switches on, in the order in which they are called.

    Args:
        regularised: datasets with regularisation data: their share of the micro-batches, by id.
        strengths: datasets of a slider: their `slider_strength`, by id.
    """
    specs = []
    if strengths:
        specs.append(TechniqueSpec(lambda: _load("slider:Slider")(strengths)))
    if regularised:
        forwards = TechniqueCost(forwards=sum(regularised.values()))
        ids = frozenset(regularised)
        specs.append(
            TechniqueSpec(lambda: _load("regularisation:Regularisation")(ids), cost=lambda transformer, load: forwards)
        )
    if config.crepa.crepa_enabled:
        specs.append(_crepa(config, frozenset(regularised)))
    routes = config.tread.routes
    if routes:
        specs.append(TechniqueSpec(lambda: _load("tread:Tread")(routes), routes=routes))
    preservation = config.preservation
    if preservation.is_on:
        weight, probability = preservation.preservation_weight, preservation.preservation_probability
        share = probability * (1 - sum(regularised.values()))
        again = TechniqueCost(forwards=share, passes=share)
        specs.append(
            TechniqueSpec(
                lambda: _load("preservation:Preservation")(weight, probability), cost=lambda transformer, load: again
            )
        )
    return tuple(specs)


def _crepa(config: RunConfig, regularised: frozenset[str]) -> TechniqueSpec:
    """CREPA, with its projector and the activations from the block's tokens to the loss, all in float32."""
    crepa, width = config.crepa, None

    def cost(transformer: TransformerCost, load: BatchShape) -> TechniqueCost:
        inner, outer = transformer.hidden, width or transformer.hidden
        side = int(crepa.irepa_projector_kernel_size) if crepa.irepa_enabled else 1
        tokens, weights = load.samples * load.tokens, inner * outer * side**2
        numbers = 2 * inner + 3 * outer  # tokens on the grid and normalised; projected, unit, and the teacher's
        return TechniqueCost(weights + outer, 4.0 * tokens * numbers, 6.0 * tokens * weights)

    return TechniqueSpec(lambda: _load("crepa:Crepa")(crepa, width, regularised), cost=cost)


def _load(name: str) -> Callable[..., Technique]:
    module, _, attribute = name.partition(":")
    found: Callable[..., Technique] = getattr(import_module(f"simpletuner.techniques.{module}"), attribute)
    return found
