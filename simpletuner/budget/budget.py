"""A plan on a device: whether each phase fits into memory, and how long the run takes.

Nothing is loaded. What a phase needs is estimated in `phases`, what a step takes in `step_memory`
and `step_cost`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic

from simpletuner.budget.communication import Sent, exchange_seconds, sent_bytes
from simpletuner.budget.densities import find_densities
from simpletuner.budget.device import Device
from simpletuner.budget.phases import PREVIEWS, PhasePeak, Phases, preview_dtype
from simpletuner.budget.step_cost import FLOAT32_SHARE, Step
from simpletuner.budget.step_memory import StepModel
from simpletuner.budget.workload import (
    Bucket,
    Parts,
    Workload,
    parts_of,
    sampled_together,
    workload_of,
)
from simpletuner.config.schema import BY_COST, BY_SIZE, RunConfig
from simpletuner.config.speed import graph_key
from simpletuner.errors import Problems
from simpletuner.planning.entries import (
    Listing,
    evaluated,
    list_entries,
    make_catalogue,
    previews_of_a_round,
)
from simpletuner.planning.plans import AnyPlan, AnyPlan_co, Plan, SamplePlan
from simpletuner.reporting.events import CACHING, EVALUATION, SAVING
from simpletuner.reporting.events import PREVIEWS as PREVIEW_ROUNDS
from simpletuner.reporting.intervals import Rounds
from simpletuner.rounding import ceil_div

# Settings that this module may choose.
DECODING = "validation_decoding"
BATCHED = "validation_batched_guidance"

# Rate of a VAE's convolutions, relative to matmuls: assumed on GPUs, measured with the demos' VAEs
# on CPUs.
GPU_CONVOLUTIONS = 0.3
CPU_CONVOLUTIONS = 0.17
# Limit of torch's `upsample_nearest3d` on CUDA, which refused more (pytorch #144855) and now counts
# in uint32.
MOST_UPSAMPLED = 2**31
# Share of the host's memory that must stay free beside a copy of the checkpoint.
SPARE_HOST_MEMORY = 0.1
# Share of the device that faster previews must leave free, since estimates may be off by a tenth.
PREVIEW_ROOM = 0.1
# Unless the user sets an interval: the most rounds of previews between start and end, the fewest
# steps between two rounds, and the share of the run that all rounds may take.
MILESTONES = 8
SHORTEST_INTERVAL = 100
PREVIEW_SHARE = 0.1


@dataclass(frozen=True)
class Budget(Generic[AnyPlan_co]):
    """A plan on a device, with the estimate of its memory and time.

    Attributes:
        plan: with the settings that are estimated; with `offload: auto` those that were chosen.
        listing: cache entries of the first epoch; None if the checkpoint is not on this machine.
        decisions: choices of `offload: auto`, with reasons.
        proposals: settings that a decision only proposes, since they change results.
        densities: densities of block-sparse attention that earlier runs measured, by tokens of a
            sample.
    """

    plan: AnyPlan_co
    parts: Parts
    workload: Workload
    device: Device
    listing: Listing | None = None
    decisions: Sequence[str] = ()
    proposals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    densities: Mapping[int, float] = field(default_factory=dict)

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def guess(self) -> str:
        """What is guessed because the family is not measured yet; empty if it is."""
        if self.parts.transformer.table.is_measured:
            return ""
        spec = self.plan.spec
        return (
            f"{spec.title} is not measured yet: FLOPs and activations are assumed from the shapes "
            "of its weights, and are rather too high; `python -m benchmarks.cost_table --only "
            f"{spec.name}` measures them"
        )

    def under(self, values: Mapping[str, Any], origin: str) -> Budget[AnyPlan_co]:
        """The same run with changed settings; see `RunConfig.with_values`."""
        config = self.config.with_values(values, origin)
        return replace(self, plan=replace(self.plan, config=config))

    @cached_property
    def model(self) -> StepModel:
        """The transformer under these settings."""
        return self.parts.model(self.config)

    @cached_property
    def steps(self) -> list[Step]:
        """A micro-step of each training bucket."""
        return [self._step(bucket) for bucket in self.workload.buckets]

    def _step(self, bucket: Bucket) -> Step:
        return Step(self.model, self.parts.load(bucket), self.device)

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of an optimizer step, averaged over the buckets by their share."""
        buckets = zip(self.workload.buckets, self.steps, strict=True)
        micro_step = sum(step.cost.seconds * bucket.share for bucket, step in buckets)
        computing = micro_step * self.config.schedule.gradient_accumulation_steps
        communicating = exchange_seconds(self.sent, self.device, self.config.launch)
        # Assumes that the shorter of the two is hidden behind the longer.
        return max(computing, communicating)

    @property
    def sent(self) -> Sent:
        """Bytes that each process sends in an optimizer step."""
        if not self.steps:
            return Sent()
        # Gradients and weights are the same in every bucket; tokens are most in the first one.
        largest = self.steps[0]
        exchanged = self.config.schedule.gradient_accumulation_steps * largest.exchanged
        return replace(sent_bytes(self.model, self.model.added(largest.load)), exchanged=exchanged)

    @property
    def preview_seconds(self) -> float:
        """Seconds of one prompt's previews at all sizes, as a mean over the prompts."""
        passes = 0.0
        for preview in self.workload.previews:
            seconds = self._step(self._sampled(preview)).forward_seconds
            passes += self._turns(preview) * preview.share * seconds
        decoding = self.config.validation.num_validation_images * decoding_seconds(self)
        return self._samplings_per_preview * passes + decoding

    @property
    def preview_flops(self) -> float:
        """FLOPs of sampling one prompt's previews at all sizes, as a mean over the prompts."""
        total = 0.0
        for preview in self.workload.previews:
            load = self.parts.load(self._sampled(preview))
            flops = self.model.cost.forward(load, self.model.adapters).total
            total += self._turns(preview) * preview.share * flops
        return self._samplings_per_preview * total

    @property
    def _samplings_per_preview(self) -> int:
        """Sampling steps of one prompt's previews at one size."""
        validation = self.config.validation
        return (validation.validation_num_inference_steps or 1) * validation.num_validation_images

    def _turns(self, preview: Bucket) -> int:
        """Forward passes of a sampling step: two if the passes of guidance are made in turn."""
        validation = self.config.validation
        is_batched = self.parts.cost.guided_together or validation.validation_batched_guidance
        return 2 if preview.guided and not is_batched else 1

    def _sampled(self, preview: Bucket) -> Bucket:
        return sampled_together(preview, self.config.validation)

    def shortages(self, *, headroom: float = 0.0) -> list[tuple[PhasePeak, str]]:
        """The phases that do not fit, with a text about the missing memory."""
        shortages = []
        for phase in self.phases:
            shortage = phase.shortage(self.device, headroom=headroom)
            if shortage is not None:
                shortages.append((phase, shortage))
        return shortages

    @property
    def fits(self) -> bool:
        """Whether every phase has the memory it needs."""
        return not self.shortages()

    @property
    def peaks(self) -> tuple[float, float]:
        """Most bytes of any phase on a device, and on the host of a machine."""
        on_device = max(phase.device for phase in self.phases)
        on_host = max(phase.on_host(self.device) for phase in self.phases)
        return on_device, on_host

    @cached_property
    def phases(self) -> list[PhasePeak]:
        """Peaks of all phases, in order."""
        processes = self.config.launch.local_processes
        phases = Phases(self.config, self.parts, self.workload, self.device, self.model, self.steps)
        return [phase.times(processes) for phase in phases.peaks()]


def with_strips(budget: Budget[AnyPlan]) -> Budget[AnyPlan]:
    """Decode previews in strips if they would fail or not fit whole, unless the user has chosen."""
    if budget.config.is_explicit(DECODING) or not budget.parts.spec.decodes_in_strips:
        return budget
    strips = budget.under({DECODING: "strips"}, BY_SIZE)
    too_large = Problems()
    check_decoding(budget, too_large)
    if too_large:
        return strips
    # `offload: auto` has more to choose from than strips.
    fit_in_strips_only = not _previews_fit(budget) and _previews_fit(strips)
    if fit_in_strips_only and budget.config.offload.offload != "auto":
        return strips
    return budget


def _previews_fit(budget: Budget[SamplePlan]) -> bool:
    return all(phase.name != PREVIEWS for phase, _ in budget.shortages())


def check_decoding(budget: Budget[SamplePlan], report: Problems) -> None:
    """Warn about previews that are too large for torch to decode whole."""
    if budget.config.validation.validation_decoding != "whole":
        return
    too_large = []
    for preview in budget.workload.previews:
        is_too_large = budget.parts.vae.upsampled(preview.clip) >= MOST_UPSAMPLED
        if is_too_large and preview.label not in too_large:
            too_large.append(preview.label)
    if too_large:
        report.warn(
            DECODING,
            f"'whole': {', '.join(too_large)} upsamples 2**31 numbers or more, which kernels of "
            "torch get wrong; strips and tiles do not.",
        )


def with_faster_previews(budget: Budget[AnyPlan]) -> Budget[AnyPlan]:
    """Enable settings for faster previews that fit with room to spare.

    Settings of the user are not changed.
    """
    if not budget.workload.previews or budget.device.memory is None:
        return budget
    for key in _faster_previews(budget):
        if budget.config.is_explicit(key):
            continue
        faster = budget.under({key: True}, BY_SIZE)
        lacking = [phase for phase, _ in faster.shortages(headroom=PREVIEW_ROOM)]
        if not any(phase.trains or phase.name == PREVIEWS for phase in lacking):
            budget = faster
    return budget


def _faster_previews(budget: Budget[SamplePlan]) -> Iterator[str]:
    """Keys of settings that make previews faster if memory allows."""
    config = budget.config
    if not budget.parts.cost.guided_together and config.speed.speed == "auto":
        yield BATCHED
    if budget.device.torch_type != "cuda" or not budget.parts.trains:
        return
    if config.offload.enable_model_cpu_offload or config.offload.group_offload_vae:
        return  # the VAE leaves the device anyway
    yield "keep_vae_loaded"
    # Decoding in float32 changes process-wide settings.
    if config.launch.num_processes == 1 and preview_dtype(budget.parts, budget.model) != "fp32":
        yield "validation_decode_in_background"


def decoding_seconds(budget: Budget[SamplePlan]) -> float:
    """Seconds of decoding one prompt's previews, one of each size, as a mean over the prompts."""
    vae = budget.parts.vae
    flops = sum(
        preview.share * vae.decode_flops(preview.clip) for preview in budget.workload.previews
    )
    share = CPU_CONVOLUTIONS
    if budget.device.is_gpu:
        share = GPU_CONVOLUTIONS
        if preview_dtype(budget.parts, budget.model) == "fp32":
            share *= FLOAT32_SHARE
    return flops / (share * budget.device.rates.matmul)


def saves_in_background(budget: Budget) -> bool:
    """Whether the host has room for a copy of the checkpoint in every phase."""
    device = budget.device
    model = budget.model
    copied = model.checkpoint_bytes(copies=2)  # weights as trained and as published
    if device.has_own_memory:
        copied *= 2  # torch rounds pinned memory up to powers of two
        room = device.host_memory
        taken = max(phase.on_host(device) for phase in budget.phases)
    else:
        room = device.memory
        taken = max(phase.needed(device) for phase in budget.phases)
    return room is not None and taken + copied <= room * (1 - SPARE_HOST_MEMORY)


def make_budget(plan: AnyPlan, device: Device) -> Budget[AnyPlan]:
    """Estimate a plan as configured."""
    catalogue = make_catalogue(plan)
    listing = list_entries(plan, catalogue) if catalogue else None
    workload = workload_of(plan, listing)
    budget = Budget(plan, parts_of(plan, device.torch_type), workload, device, listing)
    # With assumed densities, since measured ones are specific to this machine.
    budget = with_milestones(budget)
    densities = find_densities(plan, workload, device)
    return replace(budget, parts=budget.parts.with_densities(densities), densities=densities)


def with_milestones(budget: Budget[AnyPlan]) -> Budget[AnyPlan]:
    """Set the interval of previews, unless the user has set one.

    The first and the last round are always rendered. `PREVIEW_SHARE` limits the number of rounds in
    between, in model FLOPs, which are independent of the machine, so that all processes and resumed
    sessions agree.
    """
    plan = budget.plan
    config = budget.config
    validation = config.validation
    is_set = (
        validation.validation_step_interval is not None
        or validation.validation_epoch_interval is not None
    )
    if is_set or not isinstance(plan, Plan) or not plan.prompts or not budget.steps:
        return budget

    total_steps = plan.length.total_steps
    buckets = zip(budget.workload.buckets, budget.steps, strict=True)
    micro_step_flops = sum(step.cost.model * bucket.share for bucket, step in buckets)
    step_flops = config.schedule.gradient_accumulation_steps * micro_step_flops
    # Rounds of which previews take PREVIEW_SHARE of the run; the steps take the rest of it.
    affordable = (
        PREVIEW_SHARE
        / (1 - PREVIEW_SHARE)
        * total_steps
        * step_flops
        / (_prompts_per_process(plan) * budget.preview_flops)
    )
    ends = 1 if validation.disable_benchmark else 2  # the untrained model, and the result
    between = min(MILESTONES, max(0, int(affordable) - ends))
    # A multiple of ten, for readable file names.
    interval = math.ceil(total_steps / (between + 1) / 10) * 10
    interval = max(SHORTEST_INTERVAL, interval)
    return budget.under({"validation_step_interval": interval}, BY_COST)


def free_batch(budget: Budget[SamplePlan], steps: float) -> int | None:
    """The largest train_batch_size that fits and does not slow down a step.

    With small pictures on a fast GPU, a step is bound by the host's kernel launches. CUDA graphs
    avoid launches.

    Args:
        steps: steps per epoch; the samples of each bucket must still fill a step.

    Returns:
        None if the current size is the largest.
    """
    sizes = {bucket.batch for bucket in budget.workload.buckets}
    if len(sizes) != 1 or graph_key(budget.config.launch) is not None:
        return None
    present = sizes.pop()
    enough = present * steps * min(bucket.share for bucket in budget.workload.buckets)
    most = int(min(enough, *(step.free_samples for step in budget.steps)))
    for batch in range(most, present, -1):
        buckets = [replace(bucket, batch=batch) for bucket in budget.workload.buckets]
        if replace(budget, workload=replace(budget.workload, buckets=buckets)).fits:
            return batch
    return None


def steps_per_epoch(plan: Plan) -> float:
    """Optimizer steps per epoch, possibly fractional."""
    return plan.length.batches_per_epoch / plan.config.schedule.gradient_accumulation_steps


def find_rounds(budget: Budget) -> dict[str, Rounds]:
    """Previews, evaluations, saves and encoding of new crops, by kind: when, and how long."""
    plan = budget.plan
    epoch = steps_per_epoch(plan)
    rounds = {SAVING: Rounds(plan.config.checkpoints.checkpoint_step_interval, at_end=True)}
    if plan.prompts:
        rounds[PREVIEW_ROUNDS] = Rounds(preview_interval(plan), round_seconds(budget), at_end=True)
    if evaluated(plan):
        evaluation = plan.config.evaluation
        steps = evaluation.eval_steps_interval or epoch * (evaluation.eval_epoch_interval or 1.0)
        rounds[EVALUATION] = Rounds(steps, at_end=True)
    if any(dataset.changes_each_epoch for dataset in plan.trained):
        rounds[CACHING] = Rounds(epoch)
    return rounds


def remaining_steps(plan: Plan) -> int:
    """Steps left for a session that starts now."""
    return max(0, plan.length.total_steps - plan.steps_done)


def preview_interval(plan: Plan) -> float:
    """Steps between two rounds of previews; the shorter interval, if there are two."""
    validation = plan.config.validation
    interval = math.inf
    if validation.validation_step_interval:
        interval = validation.validation_step_interval
    if validation.validation_epoch_interval:
        steps = validation.validation_epoch_interval * steps_per_epoch(plan)
        if steps:
            interval = min(interval, steps)
    return interval


def preview_rounds(plan: Plan) -> int:
    """Rounds of previews left for a session that starts now, including the untrained model's."""
    if not plan.prompts:
        return 0
    total = plan.length.total_steps
    rounds = Rounds(preview_interval(plan), at_end=True).after(total - remaining_steps(plan), total)
    # A resumed run already has previews of the untrained model.
    if plan.resume is None and not plan.config.validation.disable_benchmark:
        rounds += 1
    return rounds


def round_seconds(budget: Budget) -> float:
    """Seconds of a round of previews."""
    return _prompts_per_process(budget.plan) * budget.preview_seconds


def _prompts_per_process(plan: Plan) -> float:
    """Prompts that each process renders in a round of previews, as a mean."""
    launch = plan.config.launch
    previews, subjects = previews_of_a_round(plan)
    # With sharded weights (FSDP2), all processes render all previews; otherwise they split them.
    share = previews if launch.is_sharded else ceil_div(previews, launch.num_processes)
    return subjects * share / max(previews, 1)


def remaining_seconds(budget: Budget) -> tuple[float, float]:
    """Seconds of training and of previews left for a session that starts now."""
    plan = budget.plan
    training = remaining_steps(plan) * budget.step_seconds
    previews = preview_rounds(plan) * round_seconds(budget)
    return training, previews
