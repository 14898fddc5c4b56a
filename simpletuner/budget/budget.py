"""Compares the memory that each phase of a run needs with what the device has. Nothing is loaded.

    captions ─► pictures ─► loading ─► training, bucket by bucket ─► previews ─► saving

Each phase has a peak on the device and one on the host. Without a GPU both share the machine's memory and are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from simpletuner.budget.communication import Sent, link_rate, sent_bytes
from simpletuner.budget.device import Device
from simpletuner.budget.duration import StepCost, forward_seconds, step_cost
from simpletuner.budget.estimate import (
    StepMemory,
    TrainingSetup,
    average_memory,
    frozen_bytes,
    gradient_bytes,
    inputs_on_host_bytes,
    passing_bytes,
    sampling_bytes,
    saving_bytes,
    shared_bytes,
    state_on_host_bytes,
    step_memory,
    streamed_bytes,
    technique_cost,
    trained_bytes,
)
from simpletuner.budget.parts import Parts, encoder_bytes, parts_of
from simpletuner.budget.workload import Bucket, Workload, workload_of
from simpletuner.config.load import RunConfig
from simpletuner.config.precision import vae_dtype
from simpletuner.config.schema import CachingConfig
from simpletuner.data.sample import Sample
from simpletuner.models.cost import BYTES, TILE, VaeLoad
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import Listing, feature_kinds, latent_storage, list_entries, make_catalogue
from simpletuner.techniques.spec import TechniqueCost

# Host memory of the process before any weight is loaded: the interpreter, torch, diffusers and transformers.
HOST_BASE = 1.2e9
CAPTIONS, LOADING, PREVIEWS = "encoding captions", "loading the transformer", "rendering previews"
# Activations of one prompt, relative to the text encoders' weights. Where more do not fit, batches become smaller.
TEXT_ACTIVATIONS = 0.03
# Share of these weights on the device when their blocks are streamed: embeddings, vision tower, slots.
STREAMED_TEXT = 0.3
# Of a clip's decoding, what cuDNN may take beside it for 3D convolutions: 20 to 40 %, assumed.
WORKSPACE = 0.3


@dataclass(frozen=True)
class PhasePeak:
    """Peak memory of a phase, in bytes.

    Attributes:
        device: of one process.
        host: of all processes of a machine.
        passing: the part of `device` that passes through host memory on its way to a GPU, of all processes.
        trains: whether the phase is training.
        common: the part of `host` that there is once on a machine.
        processes: on each machine.
    """

    name: str
    device: float
    host: float
    passing: float = 0.0
    trains: bool = False
    common: float = 0.0
    processes: int = 1

    def times(self, processes: int, readers: int) -> PhasePeak:
        """The peak of several processes from that of one, of which `readers` load weights through host memory."""
        host = self.common + processes * (self.host - self.common)
        return replace(self, host=host, passing=readers * self.passing, processes=processes)

    def on_host(self, device: Device) -> float:
        """Bytes of the host's memory, with weights on their way to a GPU."""
        return self.host + (self.passing if device.is_gpu else 0.0)

    def needed(self, device: Device) -> float:
        """Bytes of the device's memory, which without a GPU is the machine's."""
        return self.device if device.is_gpu else self.device * self.processes + self.host


@dataclass(frozen=True)
class BucketCost:
    """Memory, FLOPs and time of a bucket's micro-batch."""

    bucket: Bucket
    memory: StepMemory
    step: StepCost


@dataclass(frozen=True)
class Budget:
    """The estimate of a run.

    Attributes:
        config: the settings; with `offload: auto` those that were chosen.
        listing: cache entries of the first epoch; None if the checkpoint is not on this machine.
        decisions: what `offload: auto` chose, and why.
    """

    device: Device
    config: RunConfig
    parts: Parts
    workload: Workload
    setup: TrainingSetup
    phases: Sequence[PhasePeak]
    buckets: Sequence[BucketCost]
    listing: Listing | None
    decisions: Sequence[str] = ()

    @property
    def step_seconds(self) -> float:
        """Seconds of an optimizer step, averaged over buckets by their share; processes communicate meanwhile."""
        micro = sum(each.step.seconds * each.bucket.share for each in self.buckets)
        computing = micro * self.config.schedule.gradient_accumulation_steps
        return max(computing, self.sent.total / link_rate(self.device, self.config.launch.num_machines))

    @property
    def sent(self) -> Sent:
        """What each process sends in an optimizer step."""
        load = self.parts.load(self.buckets[0].bucket) if self.buckets else None
        added = technique_cost(self.parts.transformer, self.setup, load) if load else TechniqueCost()
        return sent_bytes(self.parts.transformer, self.setup, added, self.config.schedule.gradient_accumulation_steps)

    @property
    def preview_seconds(self) -> float:
        """Seconds of one prompt's previews at all sizes, without decoding."""
        validation = self.config.validation
        steps = (validation.validation_num_inference_steps or 1) * validation.num_validation_images
        guided = (validation.validation_guidance or 1) > 1 and not self.parts.cost.guided_together
        loads = [self.parts.load(preview) for preview in self.workload.previews]
        passes = [forward_seconds(self.parts.transformer, self.setup, load, self.device) for load in loads]
        return steps * (2 if guided else 1) * sum(passes)


def make_budget(plan: Plan, device: Device) -> Budget:
    """Estimate a plan as configured."""
    catalogue = make_catalogue(plan)
    listing = list_entries(plan, catalogue) if catalogue else None
    ahead, later = _to_encode(plan, listing)
    workload = workload_of(plan, len(listing.texts.missing) if listing else 1, ahead, later)
    if feature_kinds(plan) and (listing is None or listing.features.missing):
        workload = replace(workload, encodes_features=True)
    return estimate(plan.config, parts_of(plan, device), workload, device, listing)


def _to_encode(plan: Plan, listing: Listing | None) -> tuple[list[Sample], list[Sample]]:
    """The samples that are encoded before training, and those that training encodes.

    All samples, if the checkpoint is not on this machine yet.
    """
    if listing is not None:
        groups = listing.ahead.missing, listing.encoded_in_training
        return [entry.sample for entry in groups[0]], [entry.sample for entry in groups[1]]
    samples = [sample for dataset in plan.trained for sample in dataset.samples]
    first = {dataset.id for dataset in plan.trained if latent_storage(plan, dataset) == "ahead"}
    return [each for each in samples if each.dataset_id in first], [
        each for each in samples if each.dataset_id not in first
    ]


def estimate(config: RunConfig, parts: Parts, workload: Workload, device: Device, listing: Listing | None) -> Budget:
    """Estimate a workload under these settings."""
    setup = parts.setup(config)
    phases = list(find_phases(config, parts, workload, setup))
    buckets = []
    for bucket in workload.buckets:
        load = parts.load(bucket)
        memory = step_memory(parts.transformer, setup, load)
        buckets.append(BucketCost(bucket, memory, step_cost(parts.transformer, setup, load, device)))
    return Budget(device, config, parts, workload, setup, phases, buckets, listing)


def find_phases(config: RunConfig, parts: Parts, workload: Workload, setup: TrainingSetup) -> Iterator[PhasePeak]:
    """Peaks of all phases, in order."""
    processes = config.launch.local_processes
    for phase in _phases_of_one(config, parts, workload, setup):
        # Text encoders are loaded one after the other, or by one process.
        yield phase.times(processes, 1 if phase.name == CAPTIONS else processes)


def _phases_of_one(config: RunConfig, parts: Parts, workload: Workload, setup: TrainingSetup) -> Iterator[PhasePeak]:
    """The same for one process."""
    vae, text = encoder_bytes(parts, config)
    cost = parts.transformer
    if workload.encodes_text:
        kept = text * (1 - parts.text_dropped / parts.text_parameters)
        on_device = kept * (STREAMED_TEXT if config.offload.group_offload_text_encoder else 1.0)
        yield PhasePeak(CAPTIONS, on_device + text * TEXT_ACTIVATIONS, HOST_BASE, text)
    if workload.encoded:
        loads = [_at_a_time(load, config.caching) for load in workload.encoded]
        clip = 3.0 * max(load.samples * load.frames * load.width * load.height for load in loads)
        peak = vae + _encoding_bytes(config, parts, loads) + clip * BYTES["fp32"]
        # Bytes on the host, gathered into a batch and page-locked.
        yield PhasePeak(f"encoding {parts.spec.media_noun}", peak, HOST_BASE + workload.waiting + 2 * clip)
    in_training = [_at_a_time(load, config.caching) for load in workload.encoded_in_training]
    beside = vae + _encoding_bytes(config, parts, in_training) if in_training else 0.0
    if workload.encodes_features:
        teaching = max(_teacher_bytes(config, parts, bucket, vae)[1] for bucket in workload.buckets)
        yield PhasePeak("encoding features", teaching, HOST_BASE)
    on_disk = config.offload.group_offload_to_disk_path is not None
    streamed = 0.0 if on_disk else streamed_bytes(cost, setup)  # the processes of a machine share them
    common, loading = streamed + shared_bytes(cost, setup), passing_bytes(cost, setup)
    yield PhasePeak(LOADING, frozen_bytes(cost, setup), HOST_BASE + common, loading, common=common)
    there, here = average_memory(cost, setup, "device"), average_memory(cost, setup, "host")
    waiting = HOST_BASE + streamed + here.kept + state_on_host_bytes(cost, setup)
    trained, frozen = trained_bytes(cost, setup), frozen_bytes(cost, setup)
    idle = trained - gradient_bytes(cost, setup)  # between two steps
    live = not all(kind.is_cached for technique in parts.techniques for kind in technique.features)
    for bucket in workload.buckets:
        load = parts.load(bucket)
        resident, teaching = _teacher_bytes(config, parts, bucket, vae) if live else (0.0, 0.0)
        step = step_memory(cost, setup, load).total + resident
        device = max(step, frozen + trained + teaching, frozen + idle + resident + there.updating)
        host = waiting + max(inputs_on_host_bytes(cost, setup, load), here.updating)
        yield PhasePeak(f"training at {bucket.label}", device + beside, host, trains=True, common=streamed)
    if workload.previews:
        rendering = _preview_peak(config, parts, workload, setup, vae)
        rendering += parts.lora_bytes
        device = idle + rendering + there.waiting + beside
        yield PhasePeak(PREVIEWS, device, waiting + here.waiting, common=streamed)
    written = saving_bytes(cost, setup)  # by one process
    device = frozen + idle + there.waiting if there.waiting else 0.0
    yield PhasePeak("saving", device, waiting + written + here.waiting, common=streamed + written)


def _encoding_bytes(config: RunConfig, parts: Parts, loads: Sequence[VaeLoad]) -> float:
    """Peak memory of the VAE's activations over these batches."""
    size = BYTES[vae_dtype(config.precision, config.caching)]
    return max(parts.cost.vae_encode(parts.vae, load) for load in loads) * size


def _teacher_bytes(config: RunConfig, parts: Parts, bucket: Bucket, vae: float) -> tuple[float, float]:
    """Memory of what computes features, VAE and encoder, and its peak while it does so for one clip."""
    load, caching = parts.load(bucket), config.caching
    kinds = [kind for technique in parts.techniques for kind in technique.features]
    resident = vae + max(kind.cost(load.frames, load.height, load.width).memory for kind in kinds)
    tiled, sliced = caching.vae_enable_tiling, caching.vae_enable_patch_conv
    clip = VaeLoad(1, bucket.frames, bucket.width, bucket.height, tiled, sliced)
    return resident, resident + parts.cost.vae_decode(parts.vae, clip) * BYTES[vae_dtype(config.precision, caching)]


def _at_a_time(load: VaeLoad, caching: CachingConfig) -> VaeLoad:
    """The batch that the VAE encodes at a time."""
    samples = min(caching.vae_batch_size, load.samples)
    return replace(load, samples=samples, tiled=caching.vae_enable_tiling, sliced=caching.vae_enable_patch_conv)


def _preview_peak(config: RunConfig, parts: Parts, workload: Workload, setup: TrainingSetup, vae: float) -> float:
    """Peak of sampling or decoding the largest preview, with the weights that are on the device at that time."""
    largest, caching = workload.previews[0], config.caching
    weights = frozen_bytes(parts.transformer, setup)
    sampling = weights + sampling_bytes(parts.transformer, setup, parts.load(largest))
    picture = VaeLoad(1, largest.frames, largest.width, largest.height, tiled=caching.vae_enable_tiling)
    how = config.validation.validation_decoding
    if how != "whole":
        picture = replace(picture, strips=True)
    if how == "tiles":
        picture = replace(picture, tiled=True, tile=TILE)
    size = BYTES["fp32" if parts.spec.defaults.get("vae_dtype") == "fp32" else setup.dtype]
    workspace = WORKSPACE if how == "whole" and largest.frames > 1 and parts.on_gpu else 0.0
    decoding = vae + parts.cost.vae_decode(parts.vae, picture) * size * (1 + workspace)
    if config.offload.enable_model_cpu_offload:  # the VAE and the transformer take turns
        return max(sampling, decoding)
    return max(sampling + vae, decoding + weights)


def shortage(phase: PhasePeak, device: Device, *, headroom: float = 0.0) -> str | None:
    """Describe the memory that a phase lacks; None if it fits.

    Args:
        headroom: share of the device's memory that must stay free.
    """
    room, others = device.usable, taken_by_others(device)
    if not device.is_gpu:
        needed = phase.needed(device)
        if room is not None and needed > room * (1 - headroom):
            return f"{phase.name} needs {gigabytes(needed)}, this machine has {gigabytes(room)} and no GPU"
        return None
    if room is not None and phase.device > room * (1 - headroom):
        taken = f" ({others}; plan_device_memory_gb plans without it)" if others else ""
        return f"{phase.name} needs {gigabytes(phase.device)} on the device, where {gigabytes(room)} can be used{taken}"
    host, wanted = device.host_memory, phase.on_host(device)
    if host is not None and wanted > host:
        return f"{phase.name} needs {gigabytes(wanted)} of host memory, this machine has {gigabytes(host)}"
    return None


def taken_by_others(device: Device) -> str:
    """What other programs use of the device's memory, as a phrase; empty if they use none."""
    if not device.taken:
        return ""
    return f"{gigabytes(device.taken)} in use by {device.users or 'other programs'}"


def fits(phases: Sequence[PhasePeak], device: Device, *, headroom: float = 0.0) -> bool:
    """Whether every phase has the memory it needs."""
    return all(shortage(phase, device, headroom=headroom) is None for phase in phases)


def gigabytes(number: float) -> str:
    """Bytes as text, in GB or MB (10^9 or 10^6 bytes)."""
    if number < 0.95e8:
        return f"{number / 1e6:.3g} MB"
    return f"{number / 1e9:.1f} GB"
