"""The memory peak of each phase of a run, for one process.

    captions ─► pictures ─► loading ─► training, bucket by bucket ─► evaluation ─► previews ─►
    saving

Each phase has a peak on the device and one on the host. Without a GPU both share the machine's
memory and are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from simpletuner.budget.device import Device, compared
from simpletuner.budget.step_cost import Step
from simpletuner.budget.step_memory import StepModel
from simpletuner.budget.workload import Bucket, Parts, Workload, sampled_together
from simpletuner.config.precision import vae_dtype
from simpletuner.config.schema import RunConfig
from simpletuner.models.cost import BYTES
from simpletuner.models.vae_cost import TILE, VaeLoad

# Names of phases that others ask for.
CAPTIONS = "encoding captions"
LOADING = "loading the transformer"
PREVIEWS = "rendering previews"

# Activations of one prompt, relative to the text encoders' weights. If a batch of prompts does not
# fit, it is reduced.
TEXT_ACTIVATIONS = 0.03
# Share of the text encoders' weights on the device when their blocks are streamed: embeddings,
# vision tower, slots.
STREAMED_TEXT = 0.3
# Extra memory that cuDNN may take for 3D convolutions, as a share of a clip's decoding: 20 to 40 %,
# assumed.
CUDNN_WORKSPACE = 0.3


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
class Phases:
    """The phases of a run in one process.

    Attributes:
        steps: a micro-step of each training bucket of the workload.
    """

    config: RunConfig
    parts: Parts
    workload: Workload
    device: Device
    model: StepModel
    steps: Sequence[Step]

    def peaks(self) -> Iterator[PhasePeak]:
        """The peaks, in the order of the phases."""
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
        encoding_features = (
            model.frozen_bytes + model.trained_bytes + model.accumulated_bytes + teaching
        )
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
        return self.model.trained_bytes + self.model.bucket_bytes

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
        validation = self.config.validation
        sampled = [sampled_together(preview, validation) for preview in self.workload.previews]
        largest = self.parts.load(max(sampled, key=lambda preview: preview.pixels))
        vae_weights, _ = self.parts.encoder_bytes(self.config)
        transformer = self.model.frozen_bytes
        sampling = transformer + self.model.sampling_bytes(largest)
        decoding = vae_weights + self._decoding_bytes()
        if validation.validation_decode_in_background:  # while the next preview is sampled
            return sampling + decoding
        if self.config.offload.enable_model_cpu_offload:  # the VAE and the transformer take turns
            return max(sampling, decoding)
        return max(sampling + vae_weights, decoding + transformer)

    def _decoding_bytes(self) -> float:
        """Peak of decoding the largest preview, without the VAE's weights."""
        largest = max(self.workload.previews, key=lambda preview: preview.pixels / preview.batch)
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
        numbers = self.parts.vae.decode(load)
        return numbers * BYTES[preview_dtype(self.parts, self.model)] * (1 + workspace)


def preview_dtype(parts: Parts, model: StepModel) -> str:
    """The dtype in which the VAE decodes previews; `vae_dtype` is for encoding."""
    if parts.spec.defaults.get("vae_dtype") == "fp32":
        return "fp32"
    return model.dtype
