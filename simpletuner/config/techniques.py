"""Keys of techniques that change a training step: token routing (TREAD), loss terms (distance, masks, preservation) and
scheduled sampling with ReflexFlow; derived values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from simpletuner.config.option import Group, TechniqueGroup, common, option, unless, when
from simpletuner.config.types import Flag, Integer, Number, Text, parse_json_text


@dataclass(frozen=True)
class Route:
    """A range of blocks that some of the tokens skip.

    Attributes:
        ratio: share of tokens that skip the blocks, in [0, 1).
        first, last: first and last block of the range, inclusive; negative numbers count from the end.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # pydantic's attribute for plain dataclasses

    ratio: Annotated[Number, Field(alias="selection_ratio", ge=0, lt=1)]
    first: Annotated[Integer, Field(alias="start_layer_idx")]
    last: Annotated[Integer, Field(alias="end_layer_idx")]

    def among(self, blocks: int) -> Route:
        """The same range in a model of `blocks` blocks, both ends counted from the start."""
        first, last = (edge + blocks if edge < 0 else edge for edge in (self.first, self.last))
        return replace(self, first=first, last=last)

    def holds(self, *blocks: int) -> bool:
        """Whether the range, counted from the start, contains any of these blocks."""
        return any(self.first <= block <= self.last for block in blocks)

    @property
    def written(self) -> str:
        """The ends of the range, as in the config."""
        return f"{self.first} to {self.last}"


def _around_middle(share: float) -> dict[str, Any]:
    return {"routes": [{"selection_ratio": share, "start_layer_idx": 2, "end_layer_idx": -2}]}


# Presets of `tread_config`: one route around all but the outermost blocks.
ROUTES: Mapping[str, Any] = {"none": None, "quarter": _around_middle(0.25), "half": _around_middle(0.5)}


class RouteGroup(Group):
    """The value of `tread_config`."""

    routes: Annotated[list[Route], Field(min_length=1)]


class TreadConfig(TechniqueGroup):
    """TREAD"""

    tread_config: Annotated[RouteGroup, BeforeValidator(parse_json_text)] | None = common(
        None, form="JSON", label="TREAD Routes"
    )
    """Token routing: {"routes": [{"selection_ratio", "start_layer_idx", "end_layer_idx"}]}, see docs/TREAD.md."""

    @property
    def routes(self) -> tuple[Route, ...]:
        """The ranges of blocks that tokens skip; empty without `tread_config`."""
        return () if self.tread_config is None else tuple(self.tread_config.routes)


def count_kept(ratio: float, units: int) -> int:
    """Number of a sample's units that a route keeps: `(1 - ratio) * units`, rounded, at least 1."""
    return max(1, round((1 - ratio) * units))


def tokens_by_block(routes: Sequence[Route], blocks: int, tokens: int, unit: int) -> tuple[int, ...]:
    """Number of tokens that each block processes; empty if every block processes all tokens.

    Protected tokens beyond a route's share are not counted. Block indices beyond the model are ignored.

    Args:
        unit: number of tokens kept or dropped together.
    """
    counts = [tokens] * blocks
    for route in (each.among(blocks) for each in routes):
        kept = count_kept(route.ratio, tokens // unit)
        if kept < tokens // unit:
            counts = [kept * unit if route.holds(block) else n for block, n in enumerate(counts)]
    # A small ratio may not drop a single unit.
    return tuple(counts) if min(counts) < tokens else ()


MOST_NOISE = 10  # standard deviations; 0.1 is usual
HEAVIEST = 1000  # weight of a loss term; the loss itself has weight 1
huber = partial(option, requires=when(loss_type=("huber", "smooth_l1")))
preserved = partial(option, requires=when("preservation_probability"))


class LossConfig(Group):
    """Loss"""

    loss_type: Literal["l2", "huber", "smooth_l1"] = common("l2")
    """Distance between prediction and target."""
    huber_schedule: Literal["snr", "exponential", "constant"] = huber("snr")
    """How huber_c depends on the timestep."""
    huber_c: Number = huber(0.1, gt=0, le=1000, common=True)
    """Threshold between the quadratic and the linear part of huber and smooth_l1."""
    input_perturbation: Number = option(0.0, ge=0, le=MOST_NOISE)
    """Extra noise on the input only."""
    input_perturbation_steps: Integer = option(0, ge=0, requires=when("input_perturbation"))
    """Step at which input_perturbation has decayed linearly to 0; 0 keeps it constant."""
    noise_offset: Number = option(0.0, ge=0, le=MOST_NOISE)
    """Offset of the noise mean per sample and channel."""
    noise_offset_probability: Number = option(1.0, ge=0, le=1, requires=when("noise_offset"))
    """Share of samples with noise_offset."""

    def input_perturbation_at(self, step: int) -> float:
        """The strength of `input_perturbation` after `step` optimizer steps."""
        if not self.input_perturbation_steps:
            return self.input_perturbation
        return self.input_perturbation * max(0.0, 1 - step / self.input_perturbation_steps)


class MaskedLossConfig(TechniqueGroup):
    """Masked loss"""

    masked_loss_probability: Number = common(1.0, ge=0, le=1)
    """Share of batches that use masks; all other batches learn from the whole picture."""
    masked_loss_normalise: Flag = option(False)
    """Divide a sample's loss by the mean of its mask (at least 0.05), so that small masks learn as fast as large
    ones."""
    masked_loss_floor: Number = option(0.0, ge=0, le=1)
    """Weight of black areas; white areas have weight 1."""
    masked_loss_prior: Number = option(
        0.0,
        ge=0,
        le=HEAVIEST,
        requires=when(model_type="lora", because="the base model is the model with the LoRA off", fatal=True),
    )
    """Weight of a term that keeps the base model's prediction in black areas (LoRA only, one more forward pass)."""


class PreservationConfig(TechniqueGroup):
    """Preservation"""

    requires = when("preservation_weight")

    preservation_weight: Number = common(
        0.0,
        ge=0,
        le=HEAVIEST,
        requires=when(
            model_type="lora",
            because="the untrained model is the model with the LoRA off. Or also train on pictures of what to keep",
            fatal=True,
        ),
    )
    """LoRA only: weight of preserving the predictions for other captions; 0 disables it. See docs/DREAMBOOTH.md."""
    preservation_probability: Number = option(0.5, ge=0, le=1)
    """Share of micro-batches with preservation, which add two forward passes, one without gradients."""
    preservation_prompt: Text | None = preserved(None, default_note="the empty caption", common=True)
    """The class word that replaces preservation_trigger or, without a trigger, the whole caption."""
    preservation_trigger: Text | None = preserved(None)
    """The words in captions that name the subject."""

    @property
    def is_on(self) -> bool:
        """Whether preservation is enabled."""
        return self.preservation_weight > 0 and self.preservation_probability > 0

    def other_caption(self, caption: str) -> str:
        """The caption whose prediction is preserved while a sample with `caption` is trained."""
        prompt = self.preservation_prompt or ""
        # A function, since a replacement text would interpret backslashes.
        replaced, count = self._trigger.subn(lambda match: prompt, caption)
        return replaced if count else prompt

    def names_subject(self, caption: str) -> bool:
        """Whether a caption has the trigger."""
        return bool(self._trigger.search(caption))

    @property
    def _trigger(self) -> re.Pattern[str]:
        """Matches the trigger as whole words in any letter case; without a trigger, matches nothing."""
        if self.preservation_trigger is None:
            return re.compile(r"(?!)")
        # Not \b, which fails next to punctuation, as in the trigger <me>.
        return re.compile(rf"(?<!\w){re.escape(self.preservation_trigger)}(?!\w)", re.IGNORECASE)


PREFIX = "scheduled_sampling_"
OFFSET, PROBABILITY, RAMP = (f"{PREFIX}{name}" for name in ("max_step_offset", "probability", "ramp_steps"))
ramped = partial(option, requires=when(RAMP))
reflexflow = partial(option, requires=when(f"{PREFIX}reflexflow"))

FINENESS = 1000  # sample points for means
# (uniform number in [0, 1), largest offset) -> offset
STRATEGIES: Mapping[str, Callable[[float, int], int]] = {
    # The share is below 1, so 0 to `most` are equally likely; squaring favours small offsets.
    "uniform": lambda share, most: int(share * (most + 1)),
    "biased_early": lambda share, most: round(share * share * most),
    "biased_late": lambda share, most: round((1 - share * share) * most),
}


class ScheduledSamplingConfig(TechniqueGroup):
    """Scheduled sampling"""

    requires = when(OFFSET)

    scheduled_sampling_max_step_offset: Integer = common(0, ge=0)
    """Maximum number of sampler steps rolled out to make an input; see docs/experimental/SCHEDULED_SAMPLING.md."""
    scheduled_sampling_probability: Number = common(
        0.0,
        ge=0,
        le=1,
        requires=unless(RAMP, because=f"{RAMP} is set, so the probability follows prob_start and prob_end"),
    )
    """Probability per sample, without a ramp."""
    scheduled_sampling_prob_start: Number = ramped(0.0, ge=0, le=1)
    """Probability before and at the start of a ramp."""
    scheduled_sampling_prob_end: Number = ramped(0.5, ge=0, le=1)
    """Probability from the end of a ramp on."""
    scheduled_sampling_ramp_steps: Integer = option(0, ge=0)
    """Length of the ramp in steps; 0 disables it."""
    scheduled_sampling_start_step: Integer = option(0, ge=0)
    """First step of the ramp, or of a fixed probability."""
    scheduled_sampling_ramp_shape: Literal["linear", "cosine"] = ramped("linear")
    """Shape of the ramp."""
    scheduled_sampling_strategy: Literal["uniform", "biased_early", "biased_late"] = option("uniform")
    """Distribution of the number of rolled-out steps: uniform, mostly few, or mostly many."""
    scheduled_sampling_sampler: Literal["unipc", "euler", "dpm"] = option("unipc")
    """Solver of the rollout."""
    scheduled_sampling_order: Integer = option(
        2, ge=1, le=3, requires=when(scheduled_sampling_sampler=("unipc", "dpm"))
    )
    """Order of unipc and dpm."""
    scheduled_sampling_reflexflow: Flag = common(True)
    """Correct the drift of rolled-out samples in the loss (ReflexFlow)."""
    scheduled_sampling_reflexflow_alpha: Number = reflexflow(1.0, ge=0, le=HEAVIEST)
    """Extra weight of positions where sampling lost content."""
    scheduled_sampling_reflexflow_beta1: Number = reflexflow(10.0, ge=0, le=HEAVIEST)
    """Weight of the direction term (reflexflow_adr)."""
    scheduled_sampling_reflexflow_beta2: Number = reflexflow(1.0, ge=0, le=HEAVIEST)
    """Factor on the loss of rolled-out samples."""

    @property
    def is_on(self) -> bool:
        """Whether any sample can have an offset."""
        fixed, ramp = self.scheduled_sampling_probability, self.scheduled_sampling_ramp_steps
        # A ramp may also descend.
        highest = max(self.scheduled_sampling_prob_start, self.scheduled_sampling_prob_end) if ramp else fixed
        return self.scheduled_sampling_max_step_offset > 0 and highest > 0

    @property
    def compares_clean(self) -> bool:
        """Whether the loss also needs the prediction for the plain input."""
        return self.scheduled_sampling_reflexflow and self.scheduled_sampling_reflexflow_alpha > 0

    def probability_at(self, step: int) -> float:
        """Probability per sample after `step` optimizer steps."""
        since = step - self.scheduled_sampling_start_step
        if not self.scheduled_sampling_ramp_steps:
            return self.scheduled_sampling_probability if since >= 0 else 0.0
        share = min(max(since / self.scheduled_sampling_ramp_steps, 0.0), 1.0)
        if self.scheduled_sampling_ramp_shape == "cosine":
            share = 0.5 - 0.5 * math.cos(math.pi * share)
        start, end = self.scheduled_sampling_prob_start, self.scheduled_sampling_prob_end
        return start + (end - start) * share

    def offset_at(self, share: float) -> int:
        """The offset for a uniform number in [0, 1)."""
        return STRATEGIES[self.scheduled_sampling_strategy](share, self.scheduled_sampling_max_step_offset)

    def mean_passes(self, total_steps: int) -> float:
        """Mean number of extra forward passes per sample, over a run of that length."""
        # At most FINENESS steps of the run, and the midpoints of FINENESS equal slices of [0, 1).
        steps = range(0, max(total_steps, 1), total_steps // FINENESS + 1)
        offsets = [self.offset_at((index + 0.5) / FINENESS) for index in range(FINENESS)]
        passes = fmean(offset + (self.compares_clean and offset > 0) for offset in offsets)
        return fmean(map(self.probability_at, steps)) * passes

    @property
    def late(self) -> Mapping[str, str]:
        return {f"{PREFIX}start_step": "no input is rolled out"} if self.is_on else {}

    @property
    def related(self) -> Sequence[str]:
        """The rollout uses the schedule of the preview sampler."""
        return ("validation_num_inference_steps",) if self.is_on else ()
