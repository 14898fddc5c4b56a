"""Techniques as the plan sees them: plain data without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from statistics import fmean
from typing import TYPE_CHECKING, Any

from simpletuner.caching.catalogue import FeatureCost, FeatureKind
from simpletuner.config.crepa import CrepaConfig
from simpletuner.config.load import RunConfig
from simpletuner.config.scheduled_sampling import ScheduledSamplingConfig
from simpletuner.config.tread import Route
from simpletuner.models.cost import BYTES, BatchShape, TransformerCost
from simpletuner.models.vision import VisionEncoder

if TYPE_CHECKING:
    from simpletuner.techniques.base import Technique

FINENESS = 1000  # points at which means are computed


@dataclass(frozen=True)
class TechniqueCost:
    """The cost of a technique per micro-batch.

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


CostOf = Callable[[TransformerCost, BatchShape], TechniqueCost]


def constantly(cost: TechniqueCost) -> CostOf:
    """A cost that depends on neither the model nor the micro-batch."""
    return lambda transformer, load: cost


@dataclass(frozen=True)
class TechniqueSpec:
    """A technique that a configuration enables.

    Attributes:
        build: creates the technique; imports torch.
        routes: ranges of blocks that some tokens skip.
        features: data per trained sample, cached beside the latents or computed in every step.
        cost: of a micro-batch.
    """

    build: Callable[[], Technique]
    routes: tuple[Route, ...] = ()
    features: tuple[FeatureKind, ...] = ()
    cost: CostOf = no_cost


def chosen_techniques(
    config: RunConfig,
    regularised: Mapping[str, float],
    total_steps: int,
    strengths: Mapping[str, float] | None = None,
    masked: float = 0.0,
) -> tuple[TechniqueSpec, ...]:
    """The techniques that a configuration enables, in calling order.

    Args:
        regularised: datasets with regularisation data: their share of the micro-batches, by id.
        total_steps: optimizer steps of the run.
        strengths: datasets of a slider: their `slider_strength`, by id.
        masked: the share of the micro-batches that have masks.
    """
    ids, others = frozenset(regularised), 1 - sum(regularised.values())
    specs = []
    # First, so that all forward passes have the strength, those of rollouts included.
    if strengths:
        specs.append(TechniqueSpec(lambda: _load("slider:Slider")(strengths)))
    if config.scheduled_sampling.is_on:
        forwards = TechniqueCost(forwards=others * mean_forwards(config.scheduled_sampling, total_steps))
        specs.append(TechniqueSpec(lambda: _load("scheduled_sampling:build")(config, ids), cost=constantly(forwards)))
    if regularised:
        forwards = TechniqueCost(forwards=sum(regularised.values()))
        specs.append(TechniqueSpec(lambda: _load("regularisation:Regularisation")(ids), cost=constantly(forwards)))
    if config.crepa.crepa_enabled:
        specs.append(_crepa(config.crepa, ids, total_steps))
    if masked:  # after techniques that change the input, before TREAD, which keeps the tokens of masks
        masks = config.masked_loss
        extra = TechniqueCost(forwards=masked * masks.masked_loss_probability if masks.masked_loss_prior else 0.0)
        specs.append(TechniqueSpec(lambda: _load("masked_loss:MaskedLoss")(masks), cost=constantly(extra)))
    routes = config.tread.routes
    if routes:
        specs.append(TechniqueSpec(lambda: _load("tread:Tread")(routes), routes=routes))
    weight = config.layersync.weight(config.model.model_type)
    if weight:
        blocks = config.layersync.blocks.values()
        specs.append(TechniqueSpec(lambda: _load("layersync:LayerSync")(*blocks, weight, ids), cost=_layersync_cost))
    preservation = config.preservation
    if preservation.is_on:
        chosen = preservation.preservation_weight, preservation.preservation_probability
        share = preservation.preservation_probability * others
        again = TechniqueCost(forwards=share, passes=share)
        specs.append(TechniqueSpec(lambda: _load("preservation:Preservation")(*chosen), cost=constantly(again)))
    return tuple(specs)


def _crepa(crepa: CrepaConfig, regularised: frozenset[str], total_steps: int) -> TechniqueSpec:
    """CREPA, with its projector and the activations from the block's tokens to the loss, all in float32."""
    encoder = VisionEncoder(crepa.crepa_encoder)
    kinds = (_teacher(crepa, encoder, regularised),) if crepa.needs_encoder else ()
    planned = encoder.width  # known only once the encoder is on this machine, so it is recomputed

    def cost(transformer: TransformerCost, load: BatchShape) -> TechniqueCost:
        inner, outer = transformer.hidden, transformer.hidden if crepa.from_backbone else planned
        side, norm = (int(crepa.irepa_projector_kernel_size), 0) if crepa.irepa_enabled else (1, 2 * inner)
        tokens, weights = load.samples * load.tokens, inner * outer * side**2
        numbers = 2 * inner + 3 * outer  # tokens on the grid and normalised; projected, unit length, and the teacher's
        return TechniqueCost(weights + outer + norm, 4.0 * tokens * numbers, 6.0 * tokens * weights)

    def build() -> Technique:
        technique: Technique = _load("crepa:Crepa")(crepa, encoder.width, regularised, total_steps, kinds)
        return technique

    return TechniqueSpec(build, features=kinds, cost=cost)


def _teacher(crepa: CrepaConfig, encoder: VisionEncoder, regularised: frozenset[str]) -> FeatureKind:
    """The features of a vision encoder on the grid of tokens."""
    width, weights = encoder.width, encoder.parameters

    def cost(frames: int, rows: int, columns: int) -> FeatureCost:
        patches = frames * math.prod(crepa.patches(rows, columns))
        at_once = patches * min(max(crepa.crepa_encoder_frames_batch_size, 0) or frames, frames) / frames
        # In memory: bf16 weights, and in the widest layer about eight numbers per number of a token.
        return FeatureCost(
            2.0 * frames * rows * columns * width, 2.0 * weights * patches, 2 * (weights + 8 * width * at_once)
        )

    return FeatureKind(
        "crepa",
        {"size": crepa.crepa_encoder_image_size, "resize": crepa.crepa_encoder_resize},
        lambda adapter, load_vae, device: _load("teacher:load_teacher")(encoder, crepa, adapter, load_vae, device),
        encoder, cost, regularised, is_cached=crepa.crepa_cache != "off",
    )  # fmt: skip


def _layersync_cost(transformer: TransformerCost, load: BatchShape) -> TechniqueCost:
    """The tokens of two blocks, and float32 copies of them."""
    return TechniqueCost(held=2 * (BYTES["bf16"] + BYTES["fp32"]) * load.samples * load.tokens * transformer.hidden)


def _load(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"simpletuner.techniques.{module}"), attribute)
    return found


def mean_forwards(config: ScheduledSamplingConfig, total_steps: int) -> float:
    """Mean number of extra forward passes of a sample of scheduled sampling, over a run of that length."""
    steps = range(0, max(total_steps, 1), total_steps // FINENESS + 1)
    offsets = [config.offset_at((index + 0.5) / FINENESS) for index in range(FINENESS)]
    passes = fmean(offset + (config.compares_clean and offset > 0) for offset in offsets)
    return fmean(map(config.probability_at, steps)) * passes
