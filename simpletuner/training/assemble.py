"""Build everything a step needs.

    load and quantise, block by block ─► adapter ─► fast blocks ─► activation checkpointing ─► compile ─► techniques
    ─► place or shard ─► optimizer ─► prepare ─► stream

The order matters: peft wraps the quantised layers, checkpointing and compilation replace the `forward` of blocks that
hold the LoRA already, and the optimizer needs parameters on their final device.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from simpletuner.config.load import RunConfig
from simpletuner.config.optimizers import trained_precision
from simpletuner.config.precision import quantisation, transformer_dtype, vae_dtype
from simpletuner.config.schema import OffloadConfig
from simpletuner.config.speed import bf16_modulation, compile_backend, keeps_attention, plain_math
from simpletuner.diffusion.seeds import seeded, step_seed
from simpletuner.distributed.sharding import shard
from simpletuner.distributed.world import World
from simpletuner.memory.heap import large_tensors_apart
from simpletuner.memory.offload.attach import attach_offload, place_model
from simpletuner.memory.offload.block_inputs import BlockInputs
from simpletuner.memory.offload.image import WeightImage
from simpletuner.memory.offload.streamer import RememberedPlaces, Streamer
from simpletuner.memory.precision import DTYPES, use_quantised_products
from simpletuner.models.adapter import BlockLayout, FamilyAdapter
from simpletuner.models.adapter_kinds import adapter_kind
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.loading import keep_full_float32
from simpletuner.models.lora_keys import Targets
from simpletuner.models.spec import FamilySpec
from simpletuner.speed.attention import kernel_chooser
from simpletuner.speed.compile import FirstGradients, compile_blocks
from simpletuner.speed.recomputation import enable_checkpointing
from simpletuner.techniques.base import HiddenStates, Site, Technique
from simpletuner.training.frozen import blocks_to_stream, load_frozen
from simpletuner.training.lora import add_lora, start_from
from simpletuner.training.meter import count_flops
from simpletuner.training.optimizers import build_optimizer
from simpletuner.training.release import GradientRelease, HostState
from simpletuner.training.state import Assembly, StepSettings
from simpletuner.training.trained import FullModel, Trained


@dataclass(frozen=True)
class TrainingSpec:
    """The plan's decisions that training depends on.

    Attributes:
        lora_targets: modules that get a LoRA.
        seed: of the run; drawn by the plan if the user set none.
        total_steps: optimizer steps of the whole run.
        learning_rate: peak rate, after `lr_scale` and `lr_scale_sqrt`.
        timestep_offsets: `timestep_sampling_offset` of the datasets that set one, by id.
    """

    lora_targets: Targets
    seed: int
    total_steps: int
    learning_rate: float
    timestep_offsets: Mapping[str, float] = field(default_factory=dict)


def make_accelerator() -> Accelerator:
    """accelerate for devices, gradient synchronisation and collectives, without its mixed precision.

    That would wrap the transformer in autocast, which rounds what must stay float32 (positions, modulation). Here the
    dtypes of the loaded weights decide.
    """
    # Each process has the same buffers; sending them would make every forward pass wait for the others.
    exchange = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    # Without a GPU accelerate joins several processes only if it is told that they use CPUs.
    on_cpus = distributed.is_initialized() and not torch.cuda.is_available()
    return Accelerator(mixed_precision="no", cpu=on_cpus, kwargs_handlers=[exchange])


def assemble(
    config: RunConfig,
    spec: TrainingSpec,
    adapter: FamilyAdapter,
    techniques: Sequence[Technique],
    accelerator: Accelerator,
    world: World = World(),
) -> Assembly:
    """Load the transformer and make it trainable."""
    device = accelerator.device
    base_dtype = DTYPES[transformer_dtype(config.precision)]
    sharded = config.launch.fsdp_enable and world.size > 1
    trained, packed = _load(config, spec, adapter, device, world, world if sharded else World())
    transformer, is_lora = trained.transformer, config.model.model_type == "lora"
    layout = adapter.block_layout(transformer)
    fast = _use_fast_blocks(transformer, config, adapter, device)
    _checkpoint_blocks(transformer, layout, fast, config, device)
    _compile_blocks(transformer, layout, fast, config, device)
    hidden = HiddenStates(layout)
    load_vae = partial(adapter.load_latent_encoder, device, DTYPES[vae_dtype(config.precision, config.caching)])
    site = Site(adapter, transformer, layout, device, base_dtype, techniques, trained.disabled, hidden, load_vae, world,
                sharded)  # fmt: skip
    modules = _attach(techniques, site, spec.seed)
    if sharded:
        shard(transformer, layout.blocks, config.launch, device, world, keep_trained=is_lora)
    streamed = [] if sharded else _place(transformer, layout, config.offload, device)
    parameters = trained.parameters()
    optimizer = _build_optimizer(config, spec, parameters, modules)
    prepared = transformer if sharded and not is_lora else _replicate(transformer, accelerator, sharded=sharded)
    streamer = _stream(transformer, streamed, config, device, world, packed)
    if streamer is not None and fast is not None:
        fast.outside_checkpoint = RememberedPlaces(streamer)
    return Assembly(
        adapter=adapter,
        accelerator=accelerator,
        transformer=prepared,
        trained=trained,
        parameters=parameters,
        optimizer=optimizer,
        # Only float16 gradients underflow without a loss scale.
        scaler=torch.amp.GradScaler(device.type, enabled=base_dtype == torch.float16),
        settings=_step_settings(config, spec),
        hidden=hidden,
        techniques=list(techniques),
        modules=modules,
        wrapped_modules=_wrap_modules(techniques, modules, accelerator),
        streamer=streamer,
        sample_flops=count_flops(transformer, adapter.spec.cost, techniques),
        release=_release(config, parameters, optimizer, device),
        world=world,
        is_sharded=sharded,
    )


def _load(
    config: RunConfig, spec: TrainingSpec, adapter: FamilyAdapter, device: torch.device, world: World, sharers: World
) -> tuple[Trained, list[WeightImage]]:
    """Load the transformer with what is trained of it, and the images of the blocks that will stream.

    Args:
        sharers: the processes that will share its weights.
    """
    trained_dtype = DTYPES[trained_precision(config.optimizer, config.precision)]
    load = partial(load_frozen, config, adapter, device, world, sharers=sharers)
    with large_tensors_apart():
        if config.model.model_type != "lora":
            transformer, _ = load(adapted=r".+", dtype=trained_dtype)
            return FullModel(transformer.requires_grad_(True), sharers), []
        # A kind with a file of its own may choose any layer.
        adapted = r".+" if adapter_kind(config.lora).layers else spec.lora_targets
        transformer, packed = load(adapted=adapted, on_host=config.lora.starts_from_base)
        return _add_adapter(transformer, config, spec, adapter.spec, trained_dtype), packed


def load_for_sampling(config: RunConfig, adapter: FamilyAdapter, device: torch.device) -> nn.Module:
    """Load a transformer for sampling alone: frozen, quantised, sped up, placed and streamed as in training."""
    with large_tensors_apart():
        transformer, packed = load_frozen(config, adapter, device)
    transformer.eval()
    _use_fast_blocks(transformer, config, adapter, device)
    streamed = _place(transformer, adapter.block_layout(transformer), config.offload, device)
    _stream(transformer, streamed, config, device, World(), packed)
    return transformer


def _attach(techniques: Sequence[Technique], site: Site, seed: int) -> dict[str, nn.Module]:
    """Attach the techniques and return their modules by name, on the device.

    Each has its own seed, so that switching one on does not change how another one is initialised.
    """
    modules = {}
    for technique in techniques:
        with seeded(step_seed(seed, 0, 0, 0, technique.name), [site.device]):
            technique.attach(site)
        module = technique.module()
        if module is not None:
            modules[technique.name] = module.to(site.device)
    return modules


def _replicate(transformer: nn.Module, accelerator: Accelerator, *, sharded: bool) -> nn.Module:
    """Wrap the transformer for the exchange of gradients between processes; what is frozen stays out of it."""
    frozen = [name for name, each in transformer.named_parameters() if not each.requires_grad]
    frozen += [name for name, _ in transformer.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(transformer, frozen)
    if sharded:  # accelerate takes any sharded weight for one that DDP would exchange
        assert accelerator.ddp_handler is not None
        return DistributedDataParallel(transformer, **accelerator.ddp_handler.to_kwargs())
    # Placed already, streamed blocks on the CPU.
    prepared: nn.Module = accelerator.prepare(transformer, device_placement=[False])
    return prepared


def _wrap_modules(
    techniques: Sequence[Technique], modules: Mapping[str, nn.Module], accelerator: Accelerator
) -> list[nn.Module]:
    """Wrap the techniques' modules for gradient synchronisation, and have the techniques call the wrapped ones."""
    wrapped = {name: accelerator.prepare(module, device_placement=[False]) for name, module in modules.items()}
    for technique in techniques:
        if technique.name in wrapped:
            technique.adopt(wrapped[technique.name])
    return [*wrapped.values()]


def _add_adapter(
    transformer: nn.Module, config: RunConfig, spec: TrainingSpec, family: FamilySpec, dtype: torch.dtype
) -> Trained:
    add, seed = adapter_kind(config.lora).add, step_seed(spec.seed, 0, 0, 0, "lora")
    if add is not None:
        kind = pkgutil.resolve_name(add)
        trained: Trained = kind(transformer, config.lora, spec.lora_targets, family, seed=seed, dtype=dtype)
        return trained
    lora = add_lora(transformer, config.lora, spec.lora_targets, seed=seed, dtype=dtype)
    if config.lora.init_lora is not None:
        start_from(lora, Path(config.lora.init_lora).expanduser())
    return lora


def _build_optimizer(
    config: RunConfig, spec: TrainingSpec, parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module]
) -> Optimizer:
    slower, faster = _split_factors(parameters, config.lora.lora_plus_ratio)
    precision = config.precision.mixed_precision
    return build_optimizer(slower, config.optimizer, precision, spec.learning_rate, modules, faster)


def _release(
    config: RunConfig, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, device: torch.device
) -> GradientRelease | None:
    if not config.optimizer.optimizer_release_gradients:
        return None
    host = HostState(optimizer, device) if config.offload.offload_optimizer_state else None
    return GradientRelease(parameters, optimizer, config.optimizer, host)


def _split_factors(
    parameters: Mapping[str, nn.Parameter], ratio: float | None
) -> tuple[list[nn.Parameter], tuple[list[nn.Parameter], float]]:
    """With LoRA+ (Hayou et al., arXiv:2402.12354) the B matrices apart, with the ratio of their learning rate."""
    fast = {name: each for name, each in parameters.items() if ratio is not None and ".lora_B." in name}
    return [each for name, each in parameters.items() if name not in fast], ([*fast.values()], ratio or 1.0)


def _use_fast_blocks(
    transformer: nn.Module, config: RunConfig, adapter: FamilyAdapter, device: torch.device
) -> FastBlocks | None:
    """Apply products in few bits and the family's own speed-ups; None if its blocks stay those of diffusers."""
    if config.precision.quantized_matmul:
        use_quantised_products(transformer)
    if bf16_modulation(config.speed):
        adapter.store_modulation_in_bf16(transformer)
    if device.type == "cuda" and not config.precision.disable_tf32:
        keep_full_float32(transformer)
    fast = adapter.use_fast_blocks(transformer) if plain_math(config.speed) else None
    if fast is not None:
        dtype = DTYPES[transformer_dtype(config.precision)]
        choose = kernel_chooser(config.precision.attention_mechanism, device, dtype)
        fast.self_attention.choose = choose or fast.self_attention.choose
    return fast


def _checkpoint_blocks(
    transformer: nn.Module, layout: BlockLayout, fast: FastBlocks | None, config: RunConfig, device: torch.device
) -> None:
    enable_checkpointing(
        transformer,
        layout,
        config.precision,
        dropout=_has_dropout(transformer),
        block_inputs=BlockInputs(device) if config.offload.offload_block_inputs else None,
        keep=fast.self_attention if fast is not None and keeps_attention(config.speed) else None,
    )


def _has_dropout(transformer: nn.Module) -> bool:
    return any(isinstance(each, nn.Dropout) and each.p > 0 for each in transformer.modules())


def _recomputes_inside(transformer: nn.Module, config: RunConfig) -> bool:
    """Whether the last functions of checkpointed blocks recompute themselves: they keep the attention's result, and
    their inputs on the device, and do not restore the state of the random generator."""
    stays = not config.offload.offload_block_inputs
    return keeps_attention(config.speed) and stays and not _has_dropout(transformer)


def _compile_blocks(
    transformer: nn.Module, layout: BlockLayout, fast: FastBlocks | None, config: RunConfig, device: torch.device
) -> None:
    """Compile the blocks; with `quantized_matmul` the first visual one tells the error of its gradients, uncompiled."""
    stored = quantisation(config.precision.base_model_precision) if config.precision.quantized_matmul else None
    first = stored and FirstGradients(stored.name.partition("-")[0], layout.visual_blocks[0], fast)
    backend = compile_backend(config.speed, config.launch, device.type)
    if backend is not None:
        sampling, inside = config.validation.validation_torch_compile, _recomputes_inside(transformer, config)
        compile_blocks(layout, fast, backend, config.launch, sampling=sampling, recomputing=inside)
    if first:
        first.install()


def _place(transformer: nn.Module, layout: BlockLayout, config: OffloadConfig, device: torch.device) -> list[nn.Module]:
    """Move the transformer to the device, except for the frozen weights of blocks to stream; returns those blocks."""
    streamed = blocks_to_stream(layout, config)
    place_model(transformer, streamed, device)
    return streamed


def _stream(
    transformer: nn.Module, streamed: Sequence[nn.Module], config: RunConfig, device: torch.device, world: World,
    packed: list[WeightImage],
) -> Streamer | None:  # fmt: skip
    if not config.offload.enable_group_offload:
        return None
    keeps_saved, offload = not config.precision.checkpoints_all, config.offload
    return attach_offload(transformer, streamed, offload, device, keeps_saved=keeps_saved, world=world, packed=packed)


def _step_settings(config: RunConfig, spec: TrainingSpec) -> StepSettings:
    return StepSettings(
        seed=spec.seed,
        accumulation=config.schedule.gradient_accumulation_steps,
        total_steps=spec.total_steps,
        base_learning_rate=spec.learning_rate,
        shift_is_explicit=config.is_explicit("flow_schedule_shift"),
        shared_noise=not config.run.seed_for_each_device,
        mixed_precision=config.precision.mixed_precision,
        flow=config.flow,
        loss=config.loss,
        optimizer=config.optimizer,
        timestep_offsets=spec.timestep_offsets,
    )
