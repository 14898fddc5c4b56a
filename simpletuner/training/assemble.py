"""Put together what trains, in the one order that works.

load ─► quantise ─► LoRA ─► fast blocks ─► activation checkpointing ─► compile ─► techniques ─► optimizer ─► prepare
─► offload
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from simpletuner.config.load import RunConfig
from simpletuner.config.optimizers import keeps_bf16_weights, optimizer_name
from simpletuner.config.precision import quantisation, transformer_dtype
from simpletuner.config.schema import PrecisionConfig
from simpletuner.config.speed import compile_backend, keeps_attention, plain_math, uses
from simpletuner.diffusion.seeds import step_seed
from simpletuner.memory.offload.attach import attach_offload, place_model, streamed_blocks
from simpletuner.memory.offload.block_inputs import BlockInputs
from simpletuner.memory.precision import DTYPES
from simpletuner.memory.quantise import quantise
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.lora_targets import Targets
from simpletuner.models.spec import FamilySpec
from simpletuner.techniques.base import Technique
from simpletuner.training.activation_checkpointing import checkpoints_all, enable_checkpointing
from simpletuner.training.attention_kernel import kernel_chooser
from simpletuner.training.compile import compile_blocks
from simpletuner.training.flops import count_flops
from simpletuner.training.lora import LoraAdapter, add_lora, start_from
from simpletuner.training.optimizers import build_optimizer
from simpletuner.training.schedules import scaled_learning_rate
from simpletuner.training.state import Assembly, StepSettings


@dataclass(frozen=True)
class Intent:
    """What the plan decided and training needs to know.

    Attributes:
        lora_targets: modules that get a LoRA.
        seed: of the run, decided even where the user left it open.
        total_steps: optimizer steps of the whole run.
        learning_rate: peak rate, scaling rules applied.
    """

    lora_targets: Targets
    seed: int
    total_steps: int
    learning_rate: float


def make_accelerator() -> Accelerator:
    """Device placement, gradient synchronisation and collectives come from accelerate; precision does not.

    Its mixed precision would put autocast around the transformer, which rounds what must stay float32 (positions,
    modulation); dtypes are decided when weights are loaded.
    """
    return Accelerator(mixed_precision="no")


def assemble(
    config: RunConfig, intent: Intent, adapter: FamilyAdapter, techniques: Sequence[Technique], accelerator: Accelerator
) -> Assembly:
    """Load the transformer and make it trainable."""
    base_dtype = DTYPES[transformer_dtype(config.precision)]
    trained_dtype = _trained_dtype(config, base_dtype)
    is_lora = config.model.model_type == "lora"

    transformer = adapter.load_transformer(base_dtype if is_lora else trained_dtype)
    _quantise(transformer, config.precision, adapter.spec, accelerator.device)
    transformer.requires_grad_(not is_lora)
    lora = _add_lora(transformer, config, intent, trained_dtype) if is_lora else None
    layout = adapter.block_layout(transformer)
    fast = make_fast(transformer, config, adapter, accelerator.device)
    block_inputs = BlockInputs(accelerator.device) if config.offload.offload_block_inputs else None
    enable_checkpointing(
        transformer,
        layout,
        config.precision,
        dropout=config.lora.lora_dropout > 0,
        block_inputs=block_inputs,
        keep=fast.self_attention if fast is not None and keeps_attention(config.speed) else None,
    )
    backend = compile_backend(config.speed, config.launch, accelerator.device.type)
    if backend is not None:
        compile_blocks(layout, fast, backend, config.launch, sampling=config.validation.validation_torch_compile)
    for technique in techniques:
        technique.attach(adapter, transformer)
    parameters = trainable_parameters(transformer, techniques)
    residents = config.offload.group_offload_resident_blocks
    streamed = streamed_blocks(layout.blocks, residents) if config.offload.enable_group_offload else []
    place_model(transformer, streamed, accelerator.device)
    optimizer = build_optimizer(
        parameters.values(),
        config.optimizer,
        mixed_precision=config.precision.mixed_precision,
        learning_rate=intent.learning_rate,
    )
    prepared = accelerator.prepare(transformer, device_placement=[False])  # it is where it belongs already
    streamer = None
    if config.offload.enable_group_offload:
        keeps_saved = not checkpoints_all(config.precision)
        streamer = attach_offload(transformer, streamed, config.offload, accelerator.device, keeps_saved=keeps_saved)
    return Assembly(
        adapter=adapter,
        accelerator=accelerator,
        transformer=prepared,
        parameters=parameters,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(accelerator.device.type, enabled=base_dtype == torch.float16),
        settings=StepSettings(
            seed=intent.seed,
            accumulation=config.schedule.gradient_accumulation_steps,
            total_steps=intent.total_steps,
            base_learning_rate=intent.learning_rate,
            shift_is_explicit=config.is_explicit("flow_schedule_shift"),
            shared_noise=not config.run.seed_for_each_device,
            mixed_precision=config.precision.mixed_precision,
            flow=config.flow,
            loss=config.loss,
            optimizer=config.optimizer,
        ),
        lora=lora,
        techniques=list(techniques),
        streamer=streamer,
        sample_flops=count_flops(transformer, adapter.spec.cost, techniques),
    )


def make_fast(
    transformer: nn.Module, config: RunConfig, adapter: FamilyAdapter, device: torch.device
) -> FastBlocks | None:
    """Give the transformer what of `speed` belongs to its family; None: its blocks stay those of diffusers."""
    if uses(config.speed.speed_bf16_modulation, config.speed):
        adapter.store_modulation_in_bf16(transformer)
    fast = adapter.use_fast_blocks(transformer) if plain_math(config.speed) else None
    if fast is not None:
        dtype = DTYPES[transformer_dtype(config.precision)]
        choose = kernel_chooser(config.precision.attention_mechanism, device, dtype)
        fast.self_attention.choose = choose or fast.self_attention.choose
    return fast


def trainable_parameters(transformer: nn.Module, techniques: Sequence[Technique]) -> dict[str, nn.Parameter]:
    """What the optimizer updates, by name, in a fixed order."""
    parameters = {name: each for name, each in transformer.named_parameters() if each.requires_grad}
    for technique in techniques:
        parameters.update({f"{technique.name}.{name}": each for name, each in technique.parameters().items()})
    return parameters


def peak_learning_rate(config: RunConfig, processes: int = 1) -> float:
    """The configured or default rate, multiplied as `lr_scale` or `lr_scale_sqrt` say."""
    rate = config.optimizer.learning_rate or (1e-4 if config.model.model_type == "lora" else 5e-5)
    samples = processes * config.schedule.gradient_accumulation_steps * config.schedule.train_batch_size
    return scaled_learning_rate(config.optimizer, rate, samples)


def _quantise(transformer: nn.Module, config: PrecisionConfig, spec: FamilySpec, device: torch.device) -> None:
    """Store the family's linear layers in fewer bits, where `base_model_precision` says so."""
    stored = quantisation(config.base_model_precision)
    if stored is not None:
        quantise(transformer, spec.quantised_layers, stored, via=config.quantize_via, accelerator=device)


def _trained_dtype(config: RunConfig, base_dtype: torch.dtype) -> torch.dtype:
    """bfloat16 where the optimizer compensates for its rounding, else float32."""
    name = optimizer_name(config.optimizer, config.precision.mixed_precision)
    return base_dtype if base_dtype == torch.bfloat16 and keeps_bf16_weights(name) else torch.float32


def _add_lora(transformer: nn.Module, config: RunConfig, intent: Intent, dtype: torch.dtype) -> LoraAdapter:
    seed = step_seed(intent.seed, 0, 0, 0, "lora")
    lora = add_lora(transformer, config.lora, intent.lora_targets, seed=seed, dtype=dtype)
    if config.lora.init_lora is not None:
        start_from(lora, Path(config.lora.init_lora).expanduser())
    return lora
