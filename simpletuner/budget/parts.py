"""Costs of the model of a run, from the files on this machine or from the published checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from simpletuner.budget.device import Device
from simpletuner.budget.estimate import TrainingSetup, optimizer_state_bytes, update_bytes
from simpletuner.budget.workload import Bucket
from simpletuner.config.load import RunConfig
from simpletuner.config.optimizers import optimizer_name, trained_precision, widens_second_moment
from simpletuner.config.precision import quantisation, text_encoder_dtype, transformer_dtype, vae_dtype
from simpletuner.config.schema import EmaConfig
from simpletuner.config.speed import compile_backend, keeps_attention, plain_math
from simpletuner.models.adapter_kinds import planned_adapters
from simpletuner.models.cost import BYTES, NO_ADAPTERS, BatchShape, FamilyCost, Kernels, TransformerCost
from simpletuner.models.lora_keys import Targets, weights_of
from simpletuner.models.source import Part
from simpletuner.models.spec import FamilySpec
from simpletuner.plan.build import Plan
from simpletuner.techniques.spec import TechniqueSpec


@dataclass(frozen=True)
class Parts:
    """The transformer, VAE and text encoders of a run.

    Attributes:
        transformer: cost of the transformer.
        targets: selection of the modules that get a LoRA.
        vae: the VAE's config; empty if it is not on this machine.
        vae_parameters, text_parameters: parameters of the VAE and of all text encoders.
        text_dropped: of the text encoders, what never gets to the device: the language head, and the vision tower
            where prompts hold no picture.
        assumed: parts that are not on this machine, so that the published checkpoint's dimensions are used.
        techniques: those in use, which may add memory and time to a step.
        trains: whether anything is trained; otherwise previews are all there is.
        on_gpu: whether cuDNN computes.
        lora_bytes: of the further LoRAs that previews are rendered with.
    """

    spec: FamilySpec
    transformer: TransformerCost
    targets: Targets
    vae: Mapping[str, object]
    vae_parameters: int
    text_parameters: int
    assumed: tuple[str, ...]
    techniques: tuple[TechniqueSpec, ...] = ()
    trains: bool = True
    lora_bytes: int = 0
    text_dropped: int = 0
    on_gpu: bool = False

    @property
    def cost(self) -> FamilyCost:
        return self.spec.cost

    def load(self, bucket: Bucket) -> BatchShape:
        """The micro-batch of a bucket, in tokens."""
        frames, height, width = self.spec.latent_size(bucket.width, bucket.height, bucket.frames)
        patch = self.spec.patch_size
        return BatchShape(bucket.batch, frames, height // patch, width // patch, bucket.text, bucket.timed)

    def setup(self, config: RunConfig) -> TrainingSetup:
        """The settings that determine memory and time."""
        is_lora, offload, precision = config.model.model_type == "lora", config.offload, config.precision
        trained = trained_precision(config.optimizer, precision)
        name, weights = optimizer_name(config.optimizer, precision.mixed_precision), weights_of(self.transformer.shapes)
        is_bf16, widened = trained == "bf16", widens_second_moment(config.optimizer, precision.mixed_precision)
        setup = TrainingSetup(
            dtype=transformer_dtype(precision) if is_lora else trained,
            adapters=planned_adapters(config.lora, self.spec, self.targets, weights)
            if is_lora and self.trains
            else NO_ADAPTERS,
            trained_bytes=BYTES[trained],
            state_bytes=optimizer_state_bytes(name, BYTES[trained], compensated=is_bf16, widened=is_bf16 and widened),
            checkpoint_interval=precision.checkpoint_interval,
            kept_blocks=precision.gradient_checkpointing_kept_blocks,
            keep_attention=precision.gradient_checkpointing and keeps_attention(config.speed),
            streamed=offload.enable_group_offload,
            residents=offload.group_offload_resident_blocks,
            group=offload.group_offload_blocks_per_group,
            overlapped=offload.group_offload_use_stream,
            inputs_on_host=offload.offload_block_inputs and precision.gradient_checkpointing,
            quantised=quantised_bytes(precision.base_model_precision),
            released=config.optimizer.optimizer_release_gradients and not is_lora,
            state_on_host=offload.offload_optimizer_state,
            multiplies=precision.quantized_matmul,
            routes=tuple(route for technique in self.techniques for route in technique.routes),
            techniques=self.techniques,
            averaged=average_place(config.ema),
            trains=self.trains,
            processes=config.launch.num_processes,
            sharded=config.launch.is_sharded,
            reshards=config.launch.fsdp_reshard_after_forward,
            whole_gradients=config.launch.fsdp_whole_gradients and config.schedule.gradient_accumulation_steps > 1,
            from_base=is_lora and config.lora.starts_from_base,
        )
        return replace(setup, update_bytes=update_bytes(self.transformer, setup, name))


def average_place(ema: EmaConfig) -> Literal["", "device", "host"]:
    """Where the moving average is kept; empty without one."""
    if not ema.use_ema:
        return ""
    return "host" if ema.ema_cpu_only or ema.ema_device == "cpu" else "device"


def kernels_on(config: RunConfig, spec: FamilySpec, *, is_gpu: bool) -> Kernels:
    """What the blocks run in. Compiled blocks are counted where they were measured: a family's own fast ones, and on a
    GPU stock ones, which on a CPU fail the check of their gradients."""
    backend = compile_backend(config.speed, config.launch, "cuda" if is_gpu else "cpu")
    measured = plain_math(config.speed) if spec.fast_blocks else is_gpu
    return Kernels(backend == "inductor" and measured, is_gpu)


def parts_of(plan: Plan, device: Device) -> Parts:
    """The parts of a plan on a device: measured from files on this machine, otherwise as published."""
    cost, assumed, kernels = plan.spec.cost, [], kernels_on(plan.config, plan.spec, is_gpu=device.is_gpu)
    settings, shapes = plan.source.read_config("transformer"), plan.source["transformer"].weight_shapes()
    if settings is None or not shapes:
        transformer = cost.of_flavour(plan.flavour.name, kernels)
        assumed.append("transformer")
    else:
        transformer = cost.transformer(settings, shapes, kernels)
    vae = plan.source.read_config("vae")
    vae_parameters = count_parameters(plan.source["vae"]) or cost.vae_parameters
    encoders = [plan.source[role] for role in ("text_encoder", "text_encoder_2") if role in plan.source.parts]
    counts = [count_parameters(part) for part in encoders]
    if vae is None:
        assumed.append("VAE")
    if not all(counts):
        assumed.append("text encoders")
    return Parts(
        plan.spec, transformer, plan.lora_targets, vae or {}, vae_parameters,
        sum(counts) if all(counts) else cost.text_parameters, tuple(assumed), plan.techniques, bool(plan.trained),
        plan.lora_bytes, _dropped_parameters(plan, encoders if all(counts) else ()),
        device.is_gpu,
    )  # fmt: skip


def _dropped_parameters(plan: Plan, encoders: Sequence[Part]) -> int:
    """Parameters of the text encoders that are dropped once they are loaded; as published if none is given."""
    sees, cost = plan.flavour.task in plan.spec.words.hold_picture, plan.spec.cost
    if not encoders:
        return cost.head_parameters + (0 if sees else cost.vision_parameters)
    names = ("lm_head.",) if sees else ("lm_head.", "visual.")
    shapes = [item for part in encoders for item in part.weight_shapes().items()]
    return sum(math.prod(shape) for name, shape in shapes if name.removeprefix("model.").startswith(names))


def count_parameters(part: Part) -> int:
    """Parameters in the files of a part; 0 if it has none on this machine, or they do not tell."""
    return sum(math.prod(shape) for shape in part.weight_shapes().values())


def encoder_bytes(parts: Parts, config: RunConfig) -> tuple[float, float]:
    """Bytes of the weights of the VAE, and of the text encoders together."""
    vae = parts.vae_parameters * BYTES[vae_dtype(config.precision, config.caching)]
    quantised = quantised_bytes(config.precision.text_encoder_1_precision)
    return float(vae), parts.text_parameters * (quantised or BYTES[text_encoder_dtype(config.precision)])


def quantised_bytes(precision: str) -> float:
    """Bytes per weight of a quantising precision; 0 for a plain one."""
    stored = quantisation(precision)
    return stored.bytes_per_weight if stored else 0.0
