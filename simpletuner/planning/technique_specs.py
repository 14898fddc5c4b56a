"""Techniques as seen by plan and budget: one function per technique, which imports no torch, and the table of all."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from simpletuner.caching.catalogue import FeatureCost, FeatureKind
from simpletuner.config.schema import RunConfig
from simpletuner.config.techniques import Route
from simpletuner.errors import Problems
from simpletuner.models.cost import BatchShape, TransformerCost
from simpletuner.models.vision import VisionEncoder

if TYPE_CHECKING:
    from simpletuner.techniques.base import Technique


@dataclass(frozen=True)
class TechniqueCost:
    """The cost of a technique per micro-batch.

    Attributes:
        parameters: number of weights in the technique's module, all trained in float32.
        held: bytes kept on the device from the forward to the backward pass.
        flops: FLOPs of the forward and backward pass.
        forwards: mean number of extra forward passes of the transformer without gradients, on all tokens.
        passes: mean number of extra forward and backward passes, on all tokens.
    """

    parameters: int = 0
    held: float = 0.0
    flops: float = 0.0
    forwards: float = 0.0
    passes: float = 0.0


@dataclass(frozen=True)
class TechniqueSpec:
    """A technique that a configuration enables.

    Attributes:
        build: creates the technique; imports torch.
        routes: ranges of blocks that some tokens skip.
        features: data per trained sample, cached beside the latents or computed in every step.
        cost: cost per micro-batch; zero by default.
    """

    build: Callable[[], Technique]
    routes: tuple[Route, ...] = ()
    features: tuple[FeatureKind, ...] = ()
    cost: Callable[[TransformerCost, BatchShape], TechniqueCost] = lambda transformer, load: TechniqueCost()


@dataclass(frozen=True)
class TrainedData:
    """Properties of a run's data that the specs depend on.

    Attributes:
        total_steps: optimizer steps of the run.
        regularised: share of the micro-batches by id of a dataset with regularisation data.
        strengths: `slider_strength` by id of a slider dataset.
        masked: share of the micro-batches that have masks.
    """

    total_steps: int = 1
    regularised: Mapping[str, float] = field(default_factory=dict)
    strengths: Mapping[str, float] = field(default_factory=dict)
    masked: float = 0.0

    @property
    def ids(self) -> frozenset[str]:
        """Ids of datasets whose target is the base model, which most techniques skip."""
        return frozenset(self.regularised)

    @property
    def plain(self) -> float:
        """Share of the micro-batches from all other datasets."""
        return 1 - sum(self.regularised.values())


def _slider(config: RunConfig, data: TrainedData) -> TechniqueSpec | None:
    return TechniqueSpec(_later("slider:Slider", data.strengths)) if data.strengths else None


def _scheduled_sampling(config: RunConfig, data: TrainedData) -> TechniqueSpec | None:
    sampling = config.scheduled_sampling
    if not sampling.is_on:
        return None
    steps = config.validation.validation_num_inference_steps  # every family sets it
    build = _later("scheduled_sampling:ScheduledSampling", sampling, steps, config.sampling_shift, data.ids)
    return TechniqueSpec(build, cost=_passes(data.plain * sampling.mean_passes(data.total_steps)))


def _regularisation(config: RunConfig, data: TrainedData) -> TechniqueSpec | None:
    if not data.regularised:
        return None
    return TechniqueSpec(_later("preservation:Regularisation", data.ids), cost=_passes(1 - data.plain))


def _crepa(config: RunConfig, data: TrainedData) -> TechniqueSpec | None:
    """CREPA, with its projector and the activations from the block's tokens to the loss, all in float32."""
    crepa = config.crepa
    if not crepa.crepa_enabled:
        return None
    encoder = VisionEncoder(crepa.crepa_encoder, "crepa_encoder", "crepa_feature_source backbone needs no encoder.")

    def cost(transformer: TransformerCost, load: BatchShape) -> TechniqueCost:
        inner, outer = transformer.hidden, transformer.hidden if crepa.from_backbone else encoder.width
        tokens, weights = load.samples * load.tokens, inner * outer
        numbers = 2 * inner + 3 * outer  # tokens on the grid and normalised; projected, unit length, and the teacher's
        # float32 takes 4 bytes; a weight costs 2 FLOPs per token forward and 4 backward.
        return TechniqueCost(weights + outer + 2 * inner, 4.0 * tokens * numbers, 6.0 * tokens * weights)

    def of_sample(frames: int, rows: int, columns: int) -> FeatureCost:
        patches, weights = frames * math.prod(crepa.patches(rows, columns)), encoder.parameters
        at_once = patches * min(max(crepa.crepa_encoder_frames_batch_size, 0) or frames, frames) / frames
        # In memory: bf16 weights, and at the widest layer about eight numbers per number of a token.
        memory = 2 * (weights + 8 * encoder.width * at_once)
        # Stored in bf16, at the resolution of the model's tokens; the encoder has no backward pass.
        return FeatureCost(2.0 * frames * rows * columns * encoder.width, 2.0 * weights * patches, memory)

    features = FeatureKind(
        "crepa",
        {"size": crepa.crepa_encoder_image_size, "resize": crepa.crepa_encoder_resize},
        lambda *loading: _later("teacher:load_teacher", encoder, crepa, *loading)(),
        encoder, of_sample, data.ids, is_cached=crepa.crepa_cache != "off",
        spared_by={"crepa_cache": "off"} if crepa.crepa_cache == "auto" else {},
    )  # fmt: skip
    kinds = (features,) if crepa.needs_encoder else ()

    def build() -> Technique:
        width = replace(encoder).width  # read again, now that the encoder is on this machine
        return _later("crepa:Crepa", crepa, width, data.ids, data.total_steps, kinds)()

    return TechniqueSpec(build, features=kinds, cost=cost)


def _masked_loss(config: RunConfig, data: TrainedData) -> TechniqueSpec | None:
    masks = config.masked_loss
    if not data.masked:
        return None
    forwards = data.masked * masks.masked_loss_probability if masks.masked_loss_prior else 0.0
    return TechniqueSpec(_later("masked_loss:MaskedLoss", masks), cost=_passes(forwards))


def _tread(config: RunConfig, data: TrainedData) -> TechniqueSpec | None:
    routes = config.tread.routes
    return TechniqueSpec(_later("tread:Tread", routes), routes=routes) if routes else None


def _preservation(config: RunConfig, data: TrainedData) -> TechniqueSpec | None:
    weight, probability = config.preservation.preservation_weight, config.preservation.preservation_probability
    if not config.preservation.is_on:
        return None
    # The base model's pass has no gradients; the LoRA's pass has a backward pass.
    share = probability * data.plain
    return TechniqueSpec(_later("preservation:Preservation", weight, probability), cost=_passes(share, share))


def _later(name: str, *arguments: Any) -> Callable[[], Any]:
    """A deferred call of `module:function` in this package, which imports the module, and so torch, only when made."""
    return lambda: pkgutil.resolve_name(f"simpletuner.techniques.{name}")(*arguments)


def _passes(forwards: float, passes: float = 0.0) -> Callable[[TransformerCost, BatchShape], TechniqueCost]:
    """A cost that depends neither on the model nor on the micro-batch."""
    cost = TechniqueCost(forwards=forwards, passes=passes)
    return lambda transformer, load: cost


# In calling order. The slider is first, so that all forward passes, including rollouts, have its strength. Masks come
# after techniques that change the input, and before TREAD, which keeps the tokens of masks.
TECHNIQUES = (
    _slider, _scheduled_sampling, _regularisation, _crepa, _masked_loss, _tread, _preservation
)  # fmt: skip


def chosen_techniques(config: RunConfig, data: TrainedData = TrainedData()) -> tuple[TechniqueSpec, ...]:
    """The techniques that a configuration and the data enable, in calling order."""
    return tuple(spec for make in TECHNIQUES if (spec := make(config, data)) is not None)


def check_encoders(config: RunConfig, report: Problems) -> None:
    """Report vision encoders that techniques need and that cannot be used."""
    for kind in (kind for technique in chosen_techniques(config) for kind in technique.features):
        if kind.encoder is not None:
            kind.encoder.check(report)
