"""Compares the memory that each phase of a run needs with what the device has. Nothing is loaded.

    captions ─► pictures ─► loading ─► training, bucket by bucket ─► evaluation ─► previews ─►
    saving

Each phase has a peak on the device and one on the host. Without a GPU both share the machine's
memory and are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic

from simpletuner.budget.densities import find_densities
from simpletuner.budget.device import Device, compared
from simpletuner.budget.estimate import (
    FLOAT32_SHARE,
    Sent,
    Step,
    StepModel,
    exchange_seconds,
    sent_bytes,
)
from simpletuner.budget.workload import Bucket, Parts, Workload, parts_of, workload_of
from simpletuner.config.precision import vae_dtype
from simpletuner.config.schema import BY_COST, BY_SIZE, RunConfig
from simpletuner.config.speed import graph_key
from simpletuner.errors import Problems
from simpletuner.models.cost import BYTES
from simpletuner.models.vae_cost import TILE, VaeLoad
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

# Rate of a VAE's convolutions, relative to matmuls: assumed on GPUs, measured with the demos' VAEs
# on CPUs.
GPU_CONVOLUTIONS = 0.3
CPU_CONVOLUTIONS = 0.17
CAPTIONS = "encoding captions"
LOADING = "loading the transformer"
PREVIEWS = "rendering previews"
# Activations of one prompt, relative to the text encoders' weights. If more do not fit, batches are
# reduced.
TEXT_ACTIVATIONS = 0.03
# Share of these weights on the device when their blocks are streamed: embeddings, vision tower,
# slots.
STREAMED_TEXT = 0.3
# Share of the host's memory that must stay free beside a copy of the checkpoint.
SPARE = 0.1
# Limit of torch's `upsample_nearest3d` on CUDA, which refused more (pytorch #144855) and now counts
# in uint32.
MOST_UPSAMPLED = 2**31
DECODING = "validation_decoding"
# Room that faster previews must leave free, since estimates may be off by a tenth.
BATCHED = "validation_batched_guidance"
PREVIEW_ROOM = 0.1
# If the user set no interval: rounds of previews between start and end at most, the fewest steps
# between two, and the share of the run that all of them may take.
MILESTONES = 8
SHORTEST_INTERVAL = 100
PREVIEW_SHARE = 0.1
# Extra memory that cuDNN may take for 3D convolutions, as a share of a clip's decoding: 20 to 40 %,
# assumed.
WORKSPACE = 0.3


@dataclass(frozen=True)
class PhasePeak:
    """Peak memory of a phase, in bytes.

    Attributes:
        device: memory of one process on its device.
        host: host memory of all processes of a machine.
        passing: the part of `device` that passes through host memory on its way to a GPU, for all
            processes.
        trains: whether the phase is training.
        common: the part of `host` that exists once per machine.
        processes: number of processes per machine.
    """

    name: str
    device: float
    host: float
    passing: float = 0.0
    trains: bool = False
    common: float = 0.0
    processes: int = 1

    def times(self, processes: int) -> PhasePeak:
        """The peak of several processes, from the peak of one."""
        # Text encoders are loaded in turn, or by one process.
        readers = 1 if self.name == CAPTIONS else processes
        # Streamed and shared weights exist once, however many processes map them.
        host = self.common + processes * (self.host - self.common)
        return replace(self, host=host, passing=readers * self.passing, processes=processes)

    def on_host(self, device: Device) -> float:
        """Bytes of host memory, including weights on their way to a GPU."""
        return self.host + (self.passing if device.has_own_memory else 0.0)

    def needed(self, device: Device) -> float:
        """Bytes of the device's memory, which without a GPU is the machine's."""
        # On a CPU or an Apple chip, the device memory of every process is in the same RAM.
        return self.device if device.has_own_memory else self.device * self.processes + self.host

    def shortage(self, device: Device, *, headroom: float = 0.0) -> str | None:
        """Describe the missing memory; None if the phase fits.

        Args:
            headroom: share of the device's memory that must stay free.
        """
        room = device.usable
        needed = self.needed(device)
        if room is not None and needed > room * (1 - headroom):
            wants, has = compared(needed, room)
            if not device.is_gpu:
                return f"{self.name} needs {wants}, this machine has {has} and no GPU"
            if not device.has_own_memory:
                return (
                    f"{self.name} needs {wants} of the machine's memory, of which a process can "
                    f"use {has}"
                )
            taken = (
                f" ({device.taken_by_others}; plan --device-memory plans without it)"
                if device.taken
                else ""
            )
            return f"{self.name} needs {wants} on the device, where {has} can be used{taken}"
        # In shared memory, `needed` includes the host's part.
        host = device.host_memory
        wanted = self.on_host(device)
        if device.has_own_memory and host is not None and wanted > host:
            wants, has = compared(wanted, host)
            return f"{self.name} needs {wants} of host memory, this machine has {has}"
        return None


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
        return replace(
            self, plan=replace(self.plan, config=self.config.with_values(values, origin))
        )

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
        """Seconds of an optimizer step, averaged over buckets by share; communication overlaps with
        compute.
        """
        buckets = zip(self.workload.buckets, self.steps, strict=True)
        micro = sum(step.cost.seconds * bucket.share for bucket, step in buckets)
        computing = micro * self.config.schedule.gradient_accumulation_steps
        # Assumes that the shorter of the two is hidden behind the longer.
        return max(computing, exchange_seconds(self.sent, self.device, self.config.launch))

    @property
    def sent(self) -> Sent:
        """Bytes that each process sends in an optimizer step."""
        if not self.steps:
            return Sent()
        largest = self.steps[0]
        exchanged = self.config.schedule.gradient_accumulation_steps * largest.exchanged
        return replace(sent_bytes(self.model, self.model.added(largest.load)), exchanged=exchanged)

    @property
    def preview_seconds(self) -> float:
        """Seconds of one prompt's previews at all sizes."""
        passes = [
            self._step(self._sampled(preview)).forward_seconds for preview in self.workload.previews
        ]
        decoding = self.config.validation.num_validation_images * decoding_seconds(self)
        return self._forwards * sum(passes) + decoding

    @property
    def preview_flops(self) -> float:
        """FLOPs of sampling one prompt's previews at all sizes."""
        loads = (self.parts.load(self._sampled(preview)) for preview in self.workload.previews)
        return self._forwards * sum(
            self.model.cost.forward(load, self.model.adapters).total for load in loads
        )

    @property
    def _forwards(self) -> int:
        """Forward passes of one prompt's preview at one size."""
        validation = self.config.validation
        steps = (validation.validation_num_inference_steps or 1) * validation.num_validation_images
        alone = (
            self._is_guided
            and not self.parts.cost.guided_together
            and not validation.validation_batched_guidance
        )
        return steps * (2 if alone else 1)

    @property
    def _is_guided(self) -> bool:
        return (self.config.validation.validation_guidance or 1) > 1

    def _sampled(self, preview: Bucket) -> Bucket:
        """The batch that a preview is sampled in."""
        batched = self.config.validation.validation_batched_guidance and self._is_guided
        return replace(preview, batch=2) if batched else preview

    def shortages(self, *, headroom: float = 0.0) -> list[tuple[PhasePeak, str]]:
        """The phases that do not fit, with the missing memory."""
        lacking = ((phase, phase.shortage(self.device, headroom=headroom)) for phase in self.phases)
        return [(phase, text) for phase, text in lacking if text is not None]

    @property
    def fits(self) -> bool:
        """Whether every phase has the memory it needs."""
        return not self.shortages()

    @property
    def peaks(self) -> tuple[float, float]:
        """Most bytes of any phase on a device, and on the host of a machine."""
        return max(phase.device for phase in self.phases), max(
            phase.on_host(self.device) for phase in self.phases
        )

    @cached_property
    def phases(self) -> list[PhasePeak]:
        """Peaks of all phases, in order."""
        count = self.config.launch.local_processes
        return [phase.times(count) for phase in (*self._encoding(), *self._training())]

    def _encoding(self) -> Iterator[PhasePeak]:
        """The peaks of encoding, before training."""
        config = self.config
        parts = self.parts
        workload = self.workload
        vae, text = parts.encoder_bytes(config)
        if workload.encodes_text:
            # The language head, and a vision tower if no prompt has a picture, are dropped on the
            # host.
            kept = text * (1 - parts.text_dropped / parts.text_parameters)
            on_device = kept * (STREAMED_TEXT if config.offload.group_offload_text_encoder else 1.0)
            yield PhasePeak(
                CAPTIONS, on_device + text * TEXT_ACTIVATIONS, self.device.process_memory, text
            )
        if workload.encoded:
            samples = config.caching.vae_batch_size
            batches = [
                replace(load, samples=min(samples, load.samples)) for load in workload.encoded
            ]
            # bytes of the decoded RGB pixels of a batch
            clip = 3.0 * max(
                load.samples * load.frames * load.width * load.height for load in batches
            )
            # Bytes on the host, gathered into a batch and pinned.
            host = self.device.process_memory + workload.waiting + 2 * clip
            # `to_pixels` widens them to float32 on the device.
            peak = vae + self._vae_bytes(batches) + clip * BYTES["fp32"]
            yield PhasePeak(f"encoding {parts.spec.media_noun}", peak, host)
        if workload.encodes_features:
            yield PhasePeak(
                "encoding features",
                max(map(self._teaching, workload.buckets)),
                self.device.process_memory,
            )

    def _training(self) -> Iterator[PhasePeak]:
        """The peaks of loading, training, evaluation, previews and saving."""
        config = self.config
        parts = self.parts
        model = self.model
        workload = self.workload
        vae = parts.encoder_bytes(config)[0]
        frozen = model.frozen_bytes
        trained = model.trained_bytes
        later = workload.encoded_in_training
        beside = vae + self._vae_bytes(later) if later else 0.0
        on_disk = config.offload.group_offload_to_disk_path is not None
        streamed = 0.0 if on_disk else model.streamed_bytes  # shared by the processes of a machine
        # On the host, FSDP2's blocks wait to be sharded.
        common = streamed + (sum(model.unquantised_blocks) if model.is_sharded else 0.0)
        yield PhasePeak(
            LOADING, frozen, self.device.process_memory + common, model.passing_bytes, common=common
        )
        on_device = model.average_memory("device")
        on_host = model.average_memory("host")
        waiting = self.device.process_memory + streamed + on_host.kept + model.state_on_host_bytes
        idle = trained - model.gradient_bytes  # between two steps
        # Uncached features keep their encoder on the device beside the transformer.
        live = not all(
            kind.is_cached for technique in parts.techniques for kind in technique.features
        )
        for bucket, step in zip(workload.buckets, self.steps, strict=True):
            resident, teaching = (
                (self._teacher(bucket), self._teaching(bucket)) if live else (0.0, 0.0)
            )
            peak = step.memory.total + resident
            # Three peaks: the backward pass; the encoder before it; the average's update after it,
            # without gradients.
            peak = max(
                peak, frozen + trained + teaching, frozen + idle + resident + on_device.updating
            )
            host = waiting + max(model.inputs_on_host_bytes(step.load), on_host.updating)
            peak += beside + self._kept_for_previews()
            yield PhasePeak(f"training at {bucket.label}", peak, host, trains=True, common=streamed)
        if workload.evaluated:
            # Sample by sample, without gradients; in a sweep, with a LoRA loaded.
            sampling = model.sampling_bytes(parts.load(workload.evaluated[0]))
            peak = idle + frozen + sampling + parts.lora_bytes + on_device.waiting + beside
            peak += self._kept_for_previews()
            yield PhasePeak(
                "measuring the evaluation loss", peak, waiting + on_host.waiting, common=streamed
            )
        if workload.previews:
            # Optimizer state stays on the device during previews; gradients do not.
            peak = idle + self._rendering() + parts.lora_bytes + on_device.waiting + beside
            yield PhasePeak(PREVIEWS, peak, waiting + on_host.waiting, common=streamed)
        written = model.saving_bytes  # by one process
        peak = frozen + idle + on_device.waiting if on_device.waiting else 0.0
        yield PhasePeak(
            "saving", peak, waiting + written + on_host.waiting, common=streamed + written
        )

    def _vae_bytes(self, loads: Sequence[VaeLoad]) -> float:
        """Peak memory of the VAE's activations while it encodes these batches."""
        numbers = [self.parts.vae.encode(self._as_configured(load)) for load in loads]
        return max(numbers) * BYTES[vae_dtype(self.config.precision, self.config.caching)]

    def _as_configured(self, load: VaeLoad) -> VaeLoad:
        caching = self.config.caching
        return replace(load, tiled=caching.vae_enable_tiling, sliced=caching.vae_enable_patch_conv)

    def _teacher(self, bucket: Bucket) -> float:
        """Memory of the VAE and the vision encoder that compute features."""
        load = self.parts.load(bucket)
        kinds = [kind for technique in self.parts.techniques for kind in technique.features]
        vae, _ = self.parts.encoder_bytes(self.config)
        return vae + max(kind.cost(load.frames, load.height, load.width).memory for kind in kinds)

    def _teaching(self, bucket: Bucket) -> float:
        """Peak memory of computing the features of one clip."""
        numbers = self.parts.vae.decode(self._as_configured(bucket.clip))
        return (
            self._teacher(bucket)
            + numbers * BYTES[vae_dtype(self.config.precision, self.config.caching)]
        )

    def _kept_for_previews(self) -> float:
        """Memory that previews keep during training: the VAE, and background decoding."""
        background = self.config.validation.validation_decode_in_background
        if not self.workload.previews or not (background or self.config.caching.keep_vae_loaded):
            return 0.0
        return self.parts.encoder_bytes(self.config)[0] + (self._decoding() if background else 0.0)

    def _rendering(self) -> float:
        """Peak of sampling or decoding the largest preview, with the weights on the device at that
        time.
        """
        parts = self.parts
        largest = self.workload.previews[0]
        vae = parts.encoder_bytes(self.config)[0]
        weights = self.model.frozen_bytes
        sampling = weights + self.model.sampling_bytes(parts.load(self._sampled(largest)))
        decoding = vae + self._decoding()
        if self.config.offload.enable_model_cpu_offload:  # the VAE and the transformer take turns
            return max(sampling, decoding)
        return max(sampling + vae, decoding + weights)

    def _decoding(self) -> float:
        """Peak of decoding the largest preview, without the VAE's weights."""
        parts = self.parts
        largest = self.workload.previews[0]
        how = self.config.validation.validation_decoding
        tiled, tile = (
            (True, TILE)
            if how == "tiles"
            else (self.config.caching.vae_enable_tiling, VaeLoad.tile)
        )
        picture = replace(largest.clip, tiled=tiled, strips=how != "whole", tile=tile)
        workspace = WORKSPACE if how == "whole" and largest.frames > 1 and parts.on_gpu else 0.0
        return parts.vae.decode(picture) * BYTES[self.preview_dtype] * (1 + workspace)

    @property
    def preview_dtype(self) -> str:
        """The dtype in which the VAE decodes previews, independent of `vae_dtype`, which is for
        encoding.
        """
        return "fp32" if self.parts.spec.defaults.get("vae_dtype") == "fp32" else self.model.dtype


def with_strips(budget: Budget[AnyPlan]) -> Budget[AnyPlan]:
    """Decode previews in strips if `check_decoding` warns or they fit only this way, unless the
    user has chosen.
    """
    if budget.config.is_explicit(DECODING) or not budget.parts.spec.decodes_in_strips:
        return budget
    strips = budget.under({DECODING: "strips"}, BY_SIZE)
    whole, lean = (
        any(phase.name == PREVIEWS for phase, _ in each.shortages()) for each in (budget, strips)
    )
    only_so = (
        whole and not lean and budget.config.offload.offload != "auto"
    )  # which has more to choose from
    too_large = Problems()
    check_decoding(budget, too_large)
    return strips if only_so or too_large else budget


def check_decoding(budget: Budget[SamplePlan], report: Problems) -> None:
    """Warn about previews that are too large for torch to decode whole."""
    sizes = (
        budget.workload.previews if budget.config.validation.validation_decoding == "whole" else ()
    )
    numbers = {size.label: budget.parts.vae.upsampled(size.clip) for size in sizes}
    if large := [label for label, count in numbers.items() if count >= MOST_UPSAMPLED]:
        message = (
            f"'whole': {', '.join(large)} upsamples 2**31 numbers or more, which kernels of torch "
            "get wrong;"
        )
        report.warn(DECODING, f"{message} strips and tiles do not.")


def with_faster_previews(budget: Budget[AnyPlan]) -> Budget[AnyPlan]:
    """Enable settings for faster previews if they fit with room to spare and the user has not
    decided.
    """
    if not budget.workload.previews or budget.device.memory is None:
        return budget
    for key in _faster_previews(budget):
        faster = budget.under({key: True}, BY_SIZE)
        lacking = any(
            each.trains or each.name == PREVIEWS
            for each, _ in faster.shortages(headroom=PREVIEW_ROOM)
        )
        if not lacking and not budget.config.is_explicit(key):
            budget = faster
    return budget


def _faster_previews(budget: Budget[SamplePlan]) -> Iterator[str]:
    """Keys of settings that make previews faster if memory allows."""
    config = budget.config
    if not budget.parts.cost.guided_together and config.speed.speed == "auto":
        yield BATCHED
    if budget.device.torch_type != "cuda" or not budget.parts.trains:
        return
    moves = config.offload.enable_model_cpu_offload or config.offload.group_offload_vae
    if not moves:
        yield "keep_vae_loaded"
    # Decoding in float32 changes process-wide settings.
    if not moves and config.launch.num_processes == 1 and budget.preview_dtype != "fp32":
        yield "validation_decode_in_background"


def decoding_seconds(budget: Budget[SamplePlan]) -> float:
    """Seconds of decoding a preview of each size."""
    parts = budget.parts
    device = budget.device
    flops = sum(parts.vae.decode_flops(preview.clip) for preview in budget.workload.previews)
    on_gpu = GPU_CONVOLUTIONS * (FLOAT32_SHARE if budget.preview_dtype == "fp32" else 1.0)
    return flops / ((on_gpu if device.is_gpu else CPU_CONVOLUTIONS) * device.rates.matmul)


def saves_in_background(budget: Budget) -> bool:
    """Whether the host has room for a copy of the checkpoint in every phase."""
    device = budget.device
    model = budget.model
    room = device.host_memory if device.has_own_memory else device.memory
    # Weights as trained and as published, optimizer state, and the moving average in both forms.
    copied = 2 * model.number_bytes + model.state_bytes + model.average_bytes
    # torch rounds pinned memory up to powers of two.
    copies = model.trained_numbers * copied * (2 if device.has_own_memory else 1)
    if device.has_own_memory:
        taken = max(phase.on_host(device) for phase in budget.phases)
    else:
        taken = max(phase.needed(device) for phase in budget.phases)
    return room is not None and taken + copies <= room * (1 - SPARE)


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
    intervals = (
        config.validation.validation_step_interval,
        config.validation.validation_epoch_interval,
    )
    if (
        not isinstance(plan, Plan)
        or not plan.prompts
        or not budget.steps
        or intervals != (None, None)
    ):
        return budget
    total = plan.length.total_steps
    buckets = zip(budget.workload.buckets, budget.steps, strict=True)
    step = config.schedule.gradient_accumulation_steps * sum(
        each.cost.model * bucket.share for bucket, each in buckets
    )
    affordable = (
        PREVIEW_SHARE
        / (1 - PREVIEW_SHARE)
        * total
        * step
        / (_previews_alone(plan) * budget.preview_flops)
    )
    ends = 1 if config.validation.disable_benchmark else 2
    between = min(MILESTONES, max(0, int(affordable) - ends))
    # A multiple of ten, for readable file names.
    interval = max(SHORTEST_INTERVAL, math.ceil(total / (between + 1) / 10) * 10)
    return budget.under({"validation_step_interval": interval}, BY_COST)


def free_batch(budget: Budget[SamplePlan], steps: float) -> int | None:
    """The largest train_batch_size that fits and does not slow down a step; None if the current one
    is the largest.

    With small pictures on a fast GPU, a step is bound by the host's kernel launches. CUDA graphs
    avoid launches.

    Args:
        steps: steps per epoch; the samples of each bucket must still fill a step.
    """
    batches = {bucket.batch for bucket in budget.workload.buckets}
    if len(batches) != 1 or graph_key(budget.config.launch) is not None:
        return None
    (present,) = batches
    enough = present * steps * min(bucket.share for bucket in budget.workload.buckets)
    for batch in range(
        int(min(enough, *(step.free_samples for step in budget.steps))), present, -1
    ):
        buckets = [replace(bucket, batch=batch) for bucket in budget.workload.buckets]
        if replace(budget, workload=replace(budget.workload, buckets=buckets)).fits:
            return batch
    return None


def steps_per_epoch(plan: Plan) -> float:
    """Optimizer steps per epoch, possibly fractional."""
    return plan.length.batches_per_epoch / plan.config.schedule.gradient_accumulation_steps


def find_rounds(budget: Budget) -> dict[str, Rounds]:
    """Recurring work (previews, evaluations, saves, encoding of new crops) by kind, with expected
    durations.
    """
    plan = budget.plan
    evaluation = budget.config.evaluation
    epoch = steps_per_epoch(budget.plan)
    rounds = {SAVING: Rounds(plan.config.checkpoints.checkpoint_step_interval, at_end=True)}
    if plan.prompts:
        rounds[PREVIEW_ROUNDS] = Rounds(preview_interval(plan), round_seconds(budget), at_end=True)
    if evaluated(plan):
        every = evaluation.eval_steps_interval or epoch * (evaluation.eval_epoch_interval or 1.0)
        rounds[EVALUATION] = Rounds(every, at_end=True)
    if any(dataset.changes_each_epoch for dataset in plan.trained):
        rounds[CACHING] = Rounds(epoch)
    return rounds


def remaining_steps(plan: Plan) -> int:
    """Steps left for a session that starts now."""
    return max(0, plan.length.total_steps - plan.steps_done)


def preview_interval(plan: Plan) -> float:
    """Steps between two rounds of previews; the shorter interval, if there are two."""
    validation = plan.config.validation
    epochs = validation.validation_epoch_interval
    intervals = validation.validation_step_interval, epochs and epochs * steps_per_epoch(plan)
    return min((interval for interval in intervals if interval), default=math.inf)


def preview_rounds(plan: Plan) -> int:
    """Rounds of previews left for a session that starts now, including the untrained model's."""
    if not plan.prompts:
        return 0
    total = plan.length.total_steps
    rounds = Rounds(preview_interval(plan), at_end=True)
    # A resumed run already has previews of the untrained model.
    untrained = plan.resume is None and not plan.config.validation.disable_benchmark
    return rounds.after(total - remaining_steps(plan), total) + untrained


def round_seconds(budget: Budget) -> float:
    """Seconds of a round of previews."""
    return _previews_alone(budget.plan) * budget.preview_seconds


def _previews_alone(plan: Plan) -> float:
    """Prompts per process in a round of previews: split among the processes, unless weights are
    sharded (FSDP2).
    """
    launch = plan.config.launch
    previews, subjects = previews_of_a_round(plan)
    alone = previews if launch.is_sharded else ceil_div(previews, launch.num_processes)
    return subjects * alone / max(previews, 1)


def remaining_seconds(budget: Budget) -> tuple[float, float]:
    """Seconds of training and of previews left for a session that starts now."""
    return remaining_steps(budget.plan) * budget.step_seconds, preview_rounds(
        budget.plan
    ) * round_seconds(budget)
