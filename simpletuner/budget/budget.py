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

# Names of phases that others ask for.
CAPTIONS = "encoding captions"
LOADING = "loading the transformer"
PREVIEWS = "rendering previews"

# Settings that this module may choose.
DECODING = "validation_decoding"
BATCHED = "validation_batched_guidance"

# Rate of a VAE's convolutions, relative to matmuls: assumed on GPUs, measured with the demos' VAEs
# on CPUs.
GPU_CONVOLUTIONS = 0.3
CPU_CONVOLUTIONS = 0.17
# Activations of one prompt, relative to the text encoders' weights. If a batch of prompts does not
# fit, it is reduced.
TEXT_ACTIVATIONS = 0.03
# Share of the text encoders' weights on the device when their blocks are streamed: embeddings,
# vision tower, slots.
STREAMED_TEXT = 0.3
# Extra memory that cuDNN may take for 3D convolutions, as a share of a clip's decoding: 20 to 40 %,
# assumed.
CUDNN_WORKSPACE = 0.3
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
        if device.has_own_memory:
            return self.device
        # On a CPU or an Apple chip, the device memory of every process is in the same RAM.
        return self.device * self.processes + self.host

    def shortage(self, device: Device, *, headroom: float = 0.0) -> str | None:
        """Describe the missing memory; None if the phase fits.

        Args:
            headroom: share of the device's memory that must stay free.
        """
        needed = self.needed(device)
        usable = device.usable
        if usable is not None and needed > usable * (1 - headroom):
            return self._device_shortage(device, needed, usable)
        # In shared memory, `needed` includes the host's part.
        on_host = self.on_host(device)
        host = device.host_memory
        if device.has_own_memory and host is not None and on_host > host:
            wants, has = compared(on_host, host)
            return f"{self.name} needs {wants} of host memory, this machine has {has}"
        return None

    def _device_shortage(self, device: Device, needed: float, usable: float) -> str:
        wants, has = compared(needed, usable)
        if not device.is_gpu:
            return f"{self.name} needs {wants}, this machine has {has} and no GPU"
        if not device.has_own_memory:
            return (
                f"{self.name} needs {wants} of the machine's memory, of which a process can use "
                f"{has}"
            )
        taken = ""
        if device.taken:
            taken = f" ({device.taken_by_others}; plan --device-memory plans without it)"
        return f"{self.name} needs {wants} on the device, where {has} can be used{taken}"


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
        return self._passes_per_preview * sum(passes) + decoding

    @property
    def preview_flops(self) -> float:
        """FLOPs of sampling one prompt's previews at all sizes."""
        total = 0.0
        for preview in self.workload.previews:
            load = self.parts.load(self._sampled(preview))
            total += self.model.cost.forward(load, self.model.adapters).total
        return self._passes_per_preview * total

    @property
    def _passes_per_preview(self) -> int:
        """Forward passes of one prompt's previews at one size."""
        validation = self.config.validation
        passes = (validation.validation_num_inference_steps or 1) * validation.num_validation_images
        is_batched = self.parts.cost.guided_together or validation.validation_batched_guidance
        if self._is_guided and not is_batched:
            return 2 * passes  # with and without the prompt, in turn
        return passes

    @property
    def _is_guided(self) -> bool:
        return (self.config.validation.validation_guidance or 1) > 1

    def _sampled(self, preview: Bucket) -> Bucket:
        """A preview with the batch in which it is sampled."""
        if self.config.validation.validation_batched_guidance and self._is_guided:
            return replace(preview, batch=2)  # with and without the prompt
        return preview

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
        return [phase.times(processes) for phase in self._phases_of_a_process()]

    def _phases_of_a_process(self) -> Iterator[PhasePeak]:
        """The peaks of one process, in the order of the phases."""
        workload = self.workload
        if workload.encodes_text:
            yield self._encoding_captions()
        if workload.encoded:
            yield self._encoding_media()
        if workload.encodes_features:
            yield self._encoding_features()
        yield self._loading()
        for bucket, step in zip(workload.buckets, self.steps, strict=True):
            yield self._training(bucket, step)
        if workload.evaluated:
            yield self._evaluating()
        if workload.previews:
            yield self._rendering_previews()
        yield self._saving()

    def _encoding_captions(self) -> PhasePeak:
        parts = self.parts
        _, weights = parts.encoder_bytes(self.config)
        # The language head, and a vision tower if no prompt has a picture, are dropped on the host.
        on_device = weights * (1 - parts.text_dropped / parts.text_parameters)
        if self.config.offload.group_offload_text_encoder:
            on_device *= STREAMED_TEXT
        return PhasePeak(
            CAPTIONS,
            device=on_device + weights * TEXT_ACTIVATIONS,
            host=self.device.process_memory,
            passing=weights,
        )

    def _encoding_media(self) -> PhasePeak:
        vae_weights, _ = self.parts.encoder_bytes(self.config)
        most = self.config.caching.vae_batch_size
        batches = [replace(load, samples=min(most, load.samples)) for load in self.workload.encoded]
        # A byte per colour of a pixel.
        decoded = 3.0 * max(
            load.samples * load.frames * load.width * load.height for load in batches
        )
        return PhasePeak(
            f"encoding {self.parts.spec.media_noun}",
            # `to_pixels` widens the bytes to float32 on the device.
            device=vae_weights + self._vae_bytes(batches) + decoded * BYTES["fp32"],
            # A batch is on the host twice: as gathered, and in pinned memory.
            host=self.device.process_memory + self.workload.waiting + 2 * decoded,
        )

    def _encoding_features(self) -> PhasePeak:
        return PhasePeak(
            "encoding features",
            device=max(self._teaching_bytes(bucket) for bucket in self.workload.buckets),
            host=self.device.process_memory,
        )

    def _loading(self) -> PhasePeak:
        common = self._streamed_bytes
        if self.model.is_sharded:
            common += sum(self.model.unquantised_blocks)  # they wait on the host to be sharded
        return PhasePeak(
            LOADING,
            device=self.model.frozen_bytes,
            host=self.device.process_memory + common,
            passing=self.model.passing_bytes,
            common=common,
        )

    def _training(self, bucket: Bucket, step: Step) -> PhasePeak:
        model = self.model
        on_device = model.average_memory("device")
        on_host = model.average_memory("host")
        # The encoder of uncached features stays on the device beside the transformer.
        teacher = 0.0
        teaching = 0.0
        if not self._features_are_cached:
            teacher = self._teacher_bytes(bucket)
            teaching = self._teaching_bytes(bucket)
        # A step has three moments, in this order, any of which may be the peak. The average is
        # updated when the gradients are gone.
        encoding_features = model.frozen_bytes + model.trained_bytes + teaching
        backward = step.memory.total + teacher
        updating_average = model.frozen_bytes + self._idle_bytes + teacher + on_device.updating
        peak = max(encoding_features, backward, updating_average)
        beside = self._encoding_beside_bytes + self._kept_for_previews()
        return PhasePeak(
            f"training at {bucket.label}",
            device=peak + beside,
            host=self._host_bytes + max(model.inputs_on_host_bytes(step.load), on_host.updating),
            trains=True,
            common=self._streamed_bytes,
        )

    def _evaluating(self) -> PhasePeak:
        model = self.model
        # Sample by sample, the largest first, without gradients.
        sampling = model.sampling_bytes(self.parts.load(self.workload.evaluated[0]))
        peak = (
            self._idle_bytes
            + model.frozen_bytes
            + sampling
            + self.parts.lora_bytes  # in a sweep
            + model.average_memory("device").waiting
            + self._encoding_beside_bytes
        )
        return PhasePeak(
            "measuring the evaluation loss",
            device=peak + self._kept_for_previews(),
            host=self._host_bytes + model.average_memory("host").waiting,
            common=self._streamed_bytes,
        )

    def _rendering_previews(self) -> PhasePeak:
        model = self.model
        # Optimizer state stays on the device during previews; gradients do not.
        peak = (
            self._idle_bytes
            + self._rendering_bytes()
            + self.parts.lora_bytes
            + model.average_memory("device").waiting
            + self._encoding_beside_bytes
        )
        return PhasePeak(
            PREVIEWS,
            device=peak,
            host=self._host_bytes + model.average_memory("host").waiting,
            common=self._streamed_bytes,
        )

    def _saving(self) -> PhasePeak:
        model = self.model
        waiting = model.average_memory("device").waiting
        # Without a second set of weights, saving takes less than a step.
        peak = model.frozen_bytes + self._idle_bytes + waiting if waiting else 0.0
        written = model.saving_bytes  # by one process
        return PhasePeak(
            "saving",
            device=peak,
            host=self._host_bytes + written + model.average_memory("host").waiting,
            common=self._streamed_bytes + written,
        )

    @property
    def _idle_bytes(self) -> float:
        """Bytes of what is trained between two steps, when there are no gradients."""
        return self.model.trained_bytes - self.model.gradient_bytes

    @property
    def _streamed_bytes(self) -> float:
        """Bytes of streamed weights in host memory, shared by the processes of a machine."""
        if self.config.offload.group_offload_to_disk_path is not None:
            return 0.0
        return self.model.streamed_bytes

    @property
    def _host_bytes(self) -> float:
        """Host memory of a process throughout training."""
        return (
            self.device.process_memory
            + self._streamed_bytes
            + self.model.average_memory("host").kept
            + self.model.state_on_host_bytes
        )

    @property
    def _encoding_beside_bytes(self) -> float:
        """Memory of a VAE that encodes samples during training."""
        samples = self.workload.encoded_in_training
        if not samples:
            return 0.0
        vae_weights, _ = self.parts.encoder_bytes(self.config)
        return vae_weights + self._vae_bytes(samples)

    @property
    def _features_are_cached(self) -> bool:
        for technique in self.parts.techniques:
            if not all(kind.is_cached for kind in technique.features):
                return False
        return True

    def _vae_bytes(self, loads: Sequence[VaeLoad]) -> float:
        """Peak memory of the VAE's activations while it encodes these batches."""
        numbers = [self.parts.vae.encode(self._as_configured(load)) for load in loads]
        return max(numbers) * BYTES[vae_dtype(self.config.precision, self.config.caching)]

    def _as_configured(self, load: VaeLoad) -> VaeLoad:
        caching = self.config.caching
        return replace(load, tiled=caching.vae_enable_tiling, sliced=caching.vae_enable_patch_conv)

    def _teacher_bytes(self, bucket: Bucket) -> float:
        """Memory of the VAE and the vision encoder that compute features."""
        load = self.parts.load(bucket)
        vision_encoders = []
        for technique in self.parts.techniques:
            for kind in technique.features:
                cost = kind.cost(load.frames, load.height, load.width)
                vision_encoders.append(cost.memory)
        vae_weights, _ = self.parts.encoder_bytes(self.config)
        return vae_weights + max(vision_encoders)

    def _teaching_bytes(self, bucket: Bucket) -> float:
        """Peak memory of computing the features of one clip."""
        numbers = self.parts.vae.decode(self._as_configured(bucket.clip))
        dtype = vae_dtype(self.config.precision, self.config.caching)
        return self._teacher_bytes(bucket) + numbers * BYTES[dtype]

    def _kept_for_previews(self) -> float:
        """Memory that previews keep during training: the VAE, and background decoding."""
        in_background = self.config.validation.validation_decode_in_background
        keeps_vae = in_background or self.config.caching.keep_vae_loaded
        if not self.workload.previews or not keeps_vae:
            return 0.0
        vae_weights, _ = self.parts.encoder_bytes(self.config)
        return vae_weights + (self._decoding_bytes() if in_background else 0.0)

    def _rendering_bytes(self) -> float:
        """Peak of sampling or decoding the largest preview, with the weights on the device."""
        largest = self.parts.load(self._sampled(self.workload.previews[0]))
        vae_weights, _ = self.parts.encoder_bytes(self.config)
        transformer = self.model.frozen_bytes
        sampling = transformer + self.model.sampling_bytes(largest)
        decoding = vae_weights + self._decoding_bytes()
        if self.config.offload.enable_model_cpu_offload:  # the VAE and the transformer take turns
            return max(sampling, decoding)
        return max(sampling + vae_weights, decoding + transformer)

    def _decoding_bytes(self) -> float:
        """Peak of decoding the largest preview, without the VAE's weights."""
        largest = self.workload.previews[0]
        decoding = self.config.validation.validation_decoding
        load = replace(
            largest.clip,
            strips=decoding != "whole",
            tiled=self.config.caching.vae_enable_tiling,
        )
        if decoding == "tiles":
            load = replace(load, tiled=True, tile=TILE)
        workspace = 0.0
        if decoding == "whole" and largest.frames > 1 and self.parts.on_gpu:
            workspace = CUDNN_WORKSPACE
        return self.parts.vae.decode(load) * BYTES[self.preview_dtype] * (1 + workspace)

    @property
    def preview_dtype(self) -> str:
        """The dtype in which the VAE decodes previews; `vae_dtype` is for encoding."""
        if self.parts.spec.defaults.get("vae_dtype") == "fp32":
            return "fp32"
        return self.model.dtype


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
        if budget.parts.vae.upsampled(preview.clip) >= MOST_UPSAMPLED:
            too_large.append(preview.label)
    if too_large:
        report.warn(
            DECODING,
            f"'whole': {', '.join(too_large)} upsamples 2**31 numbers or more, which kernels of "
            "torch get wrong; strips and tiles do not.",
        )


def with_faster_previews(budget: Budget[AnyPlan]) -> Budget[AnyPlan]:
    """Enable settings for faster previews that fit with room to spare, unless the user has chosen
    them.
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
    if config.launch.num_processes == 1 and budget.preview_dtype != "fp32":
        yield "validation_decode_in_background"


def decoding_seconds(budget: Budget[SamplePlan]) -> float:
    """Seconds of decoding a preview of each size."""
    vae = budget.parts.vae
    flops = sum(vae.decode_flops(preview.clip) for preview in budget.workload.previews)
    share = CPU_CONVOLUTIONS
    if budget.device.is_gpu:
        share = GPU_CONVOLUTIONS
        if budget.preview_dtype == "fp32":
            share *= FLOAT32_SHARE
    return flops / (share * budget.device.rates.matmul)


def saves_in_background(budget: Budget) -> bool:
    """Whether the host has room for a copy of the checkpoint in every phase."""
    device = budget.device
    model = budget.model
    # Weights as trained and as published, optimizer state, and the moving average in both forms.
    bytes_per_number = 2 * model.number_bytes + model.state_bytes + model.average_bytes
    copied = model.trained_numbers * bytes_per_number
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
