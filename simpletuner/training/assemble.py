"""Builds all objects that take part in a step.

    load and quantise, block by block ─► adapter ─► fast blocks ─► activation checkpointing ─►
    compile ─► techniques ─► place or shard ─► optimizer ─► replicate ─► stream

Weights are read a few blocks at a time, cast, quantised, then packed (streamed blocks), moved to
the device, or shared with the processes of the machine (FSDP2 will shard them). Loading therefore
takes the host memory of a few blocks, and packed or shared weights exist once per machine.

The order matters. peft wraps the quantised layers. Checkpointing and compilation replace the
`forward` of blocks that already contain the LoRA, and hooks of techniques stay outside of compiled
code. The optimizer needs parameters on their final device. Streaming wraps `forward` last, so that
a block's weights arrive before anything else of it runs.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import distributed, nn
from torch.optim import Optimizer

from simpletuner.config.launch import LaunchConfig
from simpletuner.config.lora import LoraConfig
from simpletuner.config.optimizers import trained_precision
from simpletuner.config.precision import multiplies_in_int8, quantisation, transformer_dtype
from simpletuner.config.schema import OffloadConfig, PrecisionConfig
from simpletuner.config.speed import (
    compile_backend,
    keeps_attention,
    stores_modulation_in_bf16,
    uses_own_arithmetic,
)
from simpletuner.diffusion.seeds import seeded, step_seed
from simpletuner.distributed.world import World
from simpletuner.memory.heap import large_tensors_apart
from simpletuner.memory.offload.attach import Offload, place_model, streamed_blocks
from simpletuner.memory.offload.block_inputs import BlockInputs
from simpletuner.memory.offload.image import WeightImage, share_by_machine
from simpletuner.memory.offload.streamer import SlotReferences, Streamer
from simpletuner.memory.precision import DTYPES
from simpletuner.memory.quantisation.layers import quantise, use_quantised_products
from simpletuner.models.adapter import BlockLayout, FamilyAdapter
from simpletuner.models.adapter_kinds import adapter_kind
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.loading import DeferredWeights, keep_full_float32
from simpletuner.models.lora_layers import Targets, matching_modules
from simpletuner.models.placement import place
from simpletuner.models.sequence import SequenceGroup, TokenSplit
from simpletuner.models.spec import FamilySpec
from simpletuner.speed.attention import attention_kernel
from simpletuner.speed.compile import FirstGradients, can_tune_int8, compile_blocks
from simpletuner.speed.recomputation import enable_checkpointing
from simpletuner.techniques.base import HiddenStates, Site, Technique
from simpletuner.training.full_model import FullModel
from simpletuner.training.lora import add_lora, start_from
from simpletuner.training.meter import count_flops
from simpletuner.training.release import GradientRelease, HostState
from simpletuner.training.replicas import replicate, replicate_whole
from simpletuner.training.settings import AssemblySettings, TrainingSpec, TransformerSettings
from simpletuner.training.sharding import shard
from simpletuner.training.state import Assembly
from simpletuner.training.trained import Trained
from simpletuner.training.update import build_optimizer
from simpletuner.weights.published_lora import find_lora


def make_accelerator() -> Accelerator:
    """accelerate for devices, gradient synchronisation and collectives.

    Without its mixed precision: accelerate would wrap the transformer in autocast, which rounds
    tensors that must stay float32 (positions, modulation). Here, the dtypes of the loaded weights
    apply.
    """
    # Buffers are equal in all processes, and broadcasting them would delay every forward pass.
    # Gradients as views of DDP's buckets exist once in memory instead of twice.
    exchange = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    # Without a GPU, accelerate needs `cpu=True` to join several processes.
    on_cpus = distributed.is_initialized() and not torch.cuda.is_available()
    return Accelerator(mixed_precision="no", cpu=on_cpus, kwargs_handlers=[exchange])


@dataclass(frozen=True)
class _Placement:
    """Where a transformer computes.

    Attributes:
        device: the compute device of this process.
        world: the processes that train together.
        launch: how they share the weights.
    """

    device: torch.device
    world: World
    launch: LaunchConfig

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the weights."""
        return self.launch.fsdp_enable and self.world.size > 1

    @property
    def sharers(self) -> World:
        """The processes among which the weights are sharded; only this process without sharding."""
        return self.world if self.is_sharded else World()


@dataclass(frozen=True)
class _Model:
    """A loaded transformer.

    Attributes:
        trained: its trained weights.
        layout: its blocks.
        images: packed weights of the blocks that will stream, in order; see `Offload.stream`.
    """

    trained: Trained
    layout: BlockLayout
    images: list[WeightImage]

    @property
    def transformer(self) -> nn.Module:
        return self.trained.transformer


def assemble(
    settings: AssemblySettings,
    adapter: FamilyAdapter,
    techniques: Sequence[Technique],
    accelerator: Accelerator,
    world: World = World(),
) -> Assembly:
    """Load the transformer and prepare it for training, in the order of the module's docstring."""
    launch = settings.transformer.launch
    device = accelerator.device
    placement = _Placement(device, world, launch)
    model = _load(settings, adapter, placement)
    transformer = model.transformer
    layout = model.layout

    # What blocks compute.
    fast = _use_fast_blocks(transformer, settings.transformer, adapter, device)
    _checkpoint_and_compile(transformer, layout, fast, settings.transformer, device)
    sequence_group = _share_tokens(layout, fast, launch.sequence_parallel_size, world)

    # Techniques, whose modules are trained too.
    hidden = HiddenStates(layout, sequence_group)
    site = _site(settings, adapter, model, hidden, techniques, placement)
    modules, wrapped_modules = _attach(techniques, site, settings.step.seed, accelerator)

    # Devices and processes. The optimizer needs parameters in their final place.
    _place(model, settings, placement)
    parameters = model.trained.parameters()
    optimizer = _build_optimizer(settings, parameters, modules)
    prepared = _replicate(model, settings, accelerator, placement)
    streamer = None
    if not placement.is_sharded:
        streamer = _stream(transformer, layout, settings.transformer, placement, model.images)
    if streamer is not None and fast is not None:
        # The last function of a block may run outside of its checkpoint, where autograd would save
        # views of slots.
        fast.outside_checkpoint = SlotReferences(streamer)

    return Assembly(
        adapter=adapter,
        accelerator=accelerator,
        transformer=prepared,
        trained=model.trained,
        parameters=parameters,
        optimizer=optimizer,
        scaler=_loss_scaler(settings, device),
        settings=settings.step,
        hidden=hidden,
        techniques=list(techniques),
        modules=modules,
        wrapped_modules=wrapped_modules,
        streamer=streamer,
        sample_flops=count_flops(
            transformer, adapter.spec.cost, model.trained.adapters, techniques
        ),
        take_tiles=layout.take_tiles,
        release=_release(settings, parameters, optimizer, device),
        world=world,
        processes_per_sample=launch.sequence_parallel_size,
        is_sharded=placement.is_sharded,
    )


def _load(settings: AssemblySettings, adapter: FamilyAdapter, placement: _Placement) -> _Model:
    """Load the transformer with its trained weights."""
    trained_dtype = DTYPES[
        trained_precision(settings.step.optimizer, settings.transformer.precision)
    ]
    load = partial(
        load_frozen,
        settings.transformer,
        adapter,
        placement.device,
        placement.world,
        sharers=placement.sharers,
    )
    lora = settings.lora
    with large_tensors_apart():
        if lora is None:
            transformer, images = load(adapted=r".+", dtype=trained_dtype)
            trained: Trained = FullModel(transformer.requires_grad_(True), placement.sharers)
            images = []  # nothing is frozen, so nothing streams
        else:
            # A kind configured by a file may adapt any layer.
            adapted = r".+" if adapter_kind(lora).layers else settings.step.lora_targets
            transformer, images = load(adapted=adapted, on_host=lora.starts_from_base)
            trained = _add_adapter(transformer, lora, settings.step, adapter.spec, trained_dtype)
    return _Model(trained, adapter.block_layout(transformer), images)


def load_frozen(
    settings: TransformerSettings,
    adapter: FamilyAdapter,
    device: torch.device,
    world: World = World(),
    *,
    sharers: World = World(),
    adapted: Targets = "",
    dtype: torch.dtype | None = None,
    on_host: bool = False,
) -> tuple[nn.Module, list[WeightImage]]:
    """Load a frozen transformer in the configured precision. Collective.

    Args:
        device: the compute device. Blocks that stay there are moved to it immediately.
        world: the processes that share the images.
        sharers: the processes that will shard the weights; until then, each machine has one copy.
        adapted: the modules that will be trained, or get an adapter.
        dtype: overrides the configured dtype.
        on_host: leave all blocks on the CPU.

    Returns:
        the transformer, and the images of the blocks that will stream, in order; see
        `Offload.stream`.
    """
    precision = settings.precision
    dtype = dtype or DTYPES[transformer_dtype(precision)]
    stored = quantisation(precision.base_model_precision)
    layers = adapter.spec.quantised_layers
    transformer = adapter.load_transformer(dtype, empty=True).requires_grad_(False)
    layout = adapter.block_layout(transformer)
    in_bf16 = stores_modulation_in_bf16(settings.speed)
    in_bf16 = in_bf16 and _adapts_only(transformer, adapted, layers)
    weights = DeferredWeights(transformer, adapter.source["transformer"], dtype)

    def fill_and_quantise(modules: Sequence[nn.Module]) -> None:
        weights.fill(modules)
        if stored is not None:
            quantise(
                transformer,
                layers,
                stored,
                via=precision.quantize_via,
                accelerator=device,
                within=modules,
            )
        if in_bf16:
            for module in modules:
                adapter.store_modulation_in_bf16(module)

    offload = Offload(settings.offload, device, world)
    streamed = blocks_to_stream(layout, settings.offload)
    images: list[WeightImage] = []
    for group in offload.groups(streamed):
        fill_and_quantise(group)
        images.append(offload.pack(group))
    for block in layout.blocks:
        if block in streamed:
            continue
        fill_and_quantise([block])
        if sharers.size > 1:
            share_by_machine([block], sharers)
        else:
            place(block, torch.device("cpu") if on_host else device)
    fill_and_quantise([transformer])  # the layers outside of blocks
    return transformer, images


def _adapts_only(transformer: nn.Module, adapted: Targets, layers: str) -> bool:
    """Whether all modules that get an adapter are quantisable layers.

    Modulation layers are not quantisable. One that gets an adapter keeps its dtype until then.
    """
    names = [name for name, _ in transformer.named_modules()]
    return all(re.fullmatch(layers, name) for name in matching_modules(names, adapted))


def load_for_sampling(
    settings: TransformerSettings, adapter: FamilyAdapter, device: torch.device
) -> nn.Module:
    """Load a transformer for sampling only: frozen, and otherwise prepared as in training."""
    with large_tensors_apart():
        transformer, images = load_frozen(settings, adapter, device)
    transformer.eval()
    _use_fast_blocks(transformer, settings, adapter, device)
    layout = adapter.block_layout(transformer)
    place_model(transformer, blocks_to_stream(layout, settings.offload), device)
    placement = _Placement(device, World(), settings.launch)
    _stream(transformer, layout, settings, placement, images)
    return transformer


def blocks_to_stream(layout: BlockLayout, config: OffloadConfig) -> list[nn.Module]:
    """The blocks whose weights do not stay on the device."""
    if not config.enable_group_offload:
        return []
    return streamed_blocks(layout.blocks, config.group_offload_resident_blocks)


def _add_adapter(
    transformer: nn.Module,
    config: LoraConfig,
    spec: TrainingSpec,
    family: FamilySpec,
    dtype: torch.dtype,
) -> Trained:
    """Add the configured kind of adapter to a frozen transformer."""
    seed = step_seed(spec.seed, 0, 0, 0, "lora")
    name_of_add = adapter_kind(config).add
    if name_of_add is not None:
        add = pkgutil.resolve_name(name_of_add)
        trained: Trained = add(
            transformer, config, spec.lora_targets, family, seed=seed, dtype=dtype
        )
        return trained
    lora = add_lora(transformer, config, spec.lora_targets, seed=seed, dtype=dtype)
    if config.init_lora is not None:
        # The plan has downloaded a LoRA of the hub.
        start_from(lora, find_lora(config.init_lora) or Path(config.init_lora))
    return lora


def _use_fast_blocks(
    transformer: nn.Module,
    settings: TransformerSettings,
    adapter: FamilyAdapter,
    device: torch.device,
) -> FastBlocks | None:
    """Enable quantised matmuls and the family's fast blocks; None if diffusers' blocks remain."""
    precision = settings.precision
    if precision.quantized_matmul:
        use_quantised_products(transformer)
    if stores_modulation_in_bf16(settings.speed):
        adapter.store_modulation_in_bf16(transformer)
    if device.type == "cuda" and not precision.disable_tf32:
        keep_full_float32(transformer)
    if not uses_own_arithmetic(settings.speed):
        return None
    fast = adapter.use_fast_blocks(transformer)
    if fast is not None:
        fast.self_attention.kernel = attention_kernel(precision.attention_mechanism)
    return fast


def _checkpoint_and_compile(
    transformer: nn.Module,
    layout: BlockLayout,
    fast: FastBlocks | None,
    settings: TransformerSettings,
    device: torch.device,
) -> None:
    """Checkpoint blocks, then compile them.

    With `quantized_matmul`, the first visual block logs the error of its gradients, uncompiled.
    """
    has_dropout = any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in transformer.modules()
    )
    keeps = keeps_attention(settings.speed)
    inputs_leave = settings.offload.offload_block_inputs
    enable_checkpointing(
        transformer,
        layout,
        settings.precision,
        dropout=has_dropout,
        block_inputs=BlockInputs(device) if inputs_leave else None,
        keep=fast.self_attention if fast is not None and keeps else None,
    )
    # Made before compilation, to keep the uncompiled `forward`; installed after it, outside of
    # compiled code.
    comparison = _product_comparison(layout.visual_blocks[0], fast, settings.precision)
    backend = compile_backend(settings.speed, settings.launch, device.type)
    if backend is not None:
        if settings.speed.speed == "reference":
            layout = replace(layout, compiled=None)  # diffusers' code
        compile_blocks(
            layout,
            fast,
            backend,
            settings.launch,
            sampling=settings.compiles_previews,
            # The last functions of checkpointed blocks can recompute themselves if the output of
            # attention is kept, inputs stay on the device, and no generator state is restored.
            recomputing=keeps and not inputs_leave and not has_dropout,
            tunes_int8=(
                multiplies_in_int8(settings.precision)
                and can_tune_int8(backend, settings.launch, device)
            ),
        )
    if comparison is not None:
        comparison.install()


def _product_comparison(
    block: nn.Module, fast: FastBlocks | None, precision: PrecisionConfig
) -> FirstGradients | None:
    """The comparison of a block's quantised products with unpacked ones; None if it has none."""
    stored = quantisation(precision.base_model_precision)
    if stored is None or not precision.quantized_matmul:
        return None
    dtype, _ = stored.name.split("-")
    message = (
        f"{dtype} products: on the first batch, gradients of block 0 differ by up to %.1e from "
        "unpacked products."
    )
    return FirstGradients(message, block, fast)


def _share_tokens(
    layout: BlockLayout, fast: FastBlocks | None, processes_per_sample: int, world: World
) -> SequenceGroup | None:
    """Enable sequence parallelism if configured."""
    if processes_per_sample == 1:
        return None
    if fast is None or layout.rope is None:  # `check_sequence` refuses such runs
        raise ValueError("these blocks do not support sequence parallelism")
    group = SequenceGroup.connect(world, processes_per_sample)
    fast.self_attention.group = group
    TokenSplit(group, layout.rope).attach(layout.visual_blocks)
    return group


def _site(
    settings: AssemblySettings,
    adapter: FamilyAdapter,
    model: _Model,
    hidden: HiddenStates,
    techniques: Sequence[Technique],
    placement: _Placement,
) -> Site:
    """What techniques are attached to."""
    return Site(
        adapter=adapter,
        transformer=model.transformer,
        layout=model.layout,
        device=placement.device,
        dtype=DTYPES[transformer_dtype(settings.transformer.precision)],
        others=techniques,
        disabled=model.trained.disabled,
        hidden=hidden,
        load_latent_encoder=partial(
            adapter.load_latent_encoder, placement.device, DTYPES[settings.vae_dtype]
        ),
        world=placement.world,
        is_sharded=placement.is_sharded,
    )


def _attach(
    techniques: Sequence[Technique], site: Site, seed: int, accelerator: Accelerator
) -> tuple[dict[str, nn.Module], list[nn.Module]]:
    """Attach the techniques.

    Every technique has a separate seed, so that enabling one does not change the initialisation of
    another.

    Returns:
        the techniques' modules on the device, by name, and the same modules wrapped for gradient
        synchronisation.
    """
    modules: dict[str, nn.Module] = {}
    wrapped_modules: list[nn.Module] = []
    for technique in techniques:
        with seeded(step_seed(seed, 0, 0, 0, technique.name), [site.device]):
            technique.attach(site)
        module = technique.module()
        if module is not None:
            modules[technique.name] = module.to(site.device)
            wrapped = replicate_whole(module, accelerator)
            wrapped_modules.append(wrapped)
            technique.adopt(wrapped)
    return modules, wrapped_modules


def _place(model: _Model, settings: AssemblySettings, placement: _Placement) -> None:
    """Shard the weights, or move all but the streamed ones to the device."""
    if placement.is_sharded:
        shard(
            model.transformer,
            model.layout.blocks,
            placement.launch,
            placement.device,
            placement.world,
            keep_trained=settings.lora is not None,
        )
    else:
        streamed = blocks_to_stream(model.layout, settings.transformer.offload)
        place_model(model.transformer, streamed, placement.device)


def _build_optimizer(
    settings: AssemblySettings,
    parameters: Mapping[str, nn.Parameter],
    modules: Mapping[str, nn.Module],
) -> Optimizer:
    # LoRA+ (Hayou et al., arXiv:2402.12354): B matrices at a multiple of the learning rate.
    ratio = None if settings.lora is None else settings.lora.lora_plus_ratio
    faster: list[nn.Parameter] = []
    if ratio is not None:
        faster = [weight for name, weight in parameters.items() if ".lora_B." in name]
    return build_optimizer(
        parameters.values(),
        settings.step.optimizer,
        settings.transformer.precision.mixed_precision,
        settings.step.learning_rate,
        modules,
        faster,
        ratio,
    )


def _replicate(
    model: _Model, settings: AssemblySettings, accelerator: Accelerator, placement: _Placement
) -> nn.Module:
    """The transformer as it is called in a step, which synchronises the gradients of replicas."""
    # FSDP2 reduces the gradients of sharded weights. A LoRA is whole in every process and needs
    # DDP.
    if settings.lora is None and placement.is_sharded:
        return model.transformer
    return replicate(model.transformer, accelerator, sharded=placement.is_sharded)


def _stream(
    transformer: nn.Module,
    layout: BlockLayout,
    settings: TransformerSettings,
    placement: _Placement,
    images: list[WeightImage],
) -> Streamer | None:
    """Stream the frozen weights of blocks, if configured."""
    if not settings.offload.enable_group_offload:
        return None
    offload = Offload(settings.offload, placement.device, placement.world)
    return offload.attach(
        transformer,
        blocks_to_stream(layout, settings.offload),
        # Without recomputation, autograd saves weights that are evicted before the backward pass.
        keeps_saved=not settings.precision.checkpoints_all,
        packed=images,
    )


def _loss_scaler(settings: AssemblySettings, device: torch.device) -> torch.amp.GradScaler:
    """The loss scaler, enabled in float16: only its gradients underflow."""
    dtype = DTYPES[transformer_dtype(settings.transformer.precision)]
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)


def _release(
    settings: AssemblySettings,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer,
    device: torch.device,
) -> GradientRelease | None:
    """Updates during the backward pass, if configured."""
    config = settings.step.optimizer
    if not config.optimizer_release_gradients:
        return None
    host = None
    if settings.transformer.offload.offload_optimizer_state:
        host = HostState(optimizer, device)
    return GradientRelease(parameters, optimizer, config, host)
