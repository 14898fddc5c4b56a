"""Loads a transformer some blocks at a time.

    read ─► cast ─► quantise ─► pack, if the blocks stream
                              ─► move to the device
                              ─► share with the processes of the machine, if FSDP2 will split them

So loading takes the host memory of a few blocks, and what is packed or shared is there once on a machine.
"""

from __future__ import annotations

import re

import torch
from torch import nn

from simpletuner.config.load import RunConfig
from simpletuner.config.precision import quantisation, transformer_dtype
from simpletuner.config.schema import OffloadConfig
from simpletuner.config.speed import bf16_modulation
from simpletuner.distributed.world import World
from simpletuner.memory.offload.attach import in_groups, pack_group, streamed_blocks
from simpletuner.memory.offload.image import WeightImage, share_by_machine
from simpletuner.memory.precision import DTYPES, quantise
from simpletuner.models.adapter import BlockLayout, FamilyAdapter
from simpletuner.models.loading import DeferredWeights
from simpletuner.models.lora_keys import Targets, matching_modules


def load_frozen(
    config: RunConfig,
    adapter: FamilyAdapter,
    device: torch.device,
    world: World = World(),
    *,
    sharers: World = World(),
    adapted: Targets = "",
    dtype: torch.dtype | None = None,
    on_host: bool = False,
) -> tuple[nn.Module, list[WeightImage]]:
    """Load a frozen transformer, in the precision of the settings. Collective.

    Args:
        device: what it will compute on. Blocks that stay there are moved to it at once.
        world: the processes that share the images.
        sharers: the processes that will split the weights among them; until then each machine has one copy.
        adapted: the modules that will be trained, or get an adapter.
        dtype: another one than that of the settings.
        on_host: leave all blocks on the CPU.

    Returns:
        the transformer, and the images of the blocks that will stream, in order; see `attach_offload`.
    """
    dtype = dtype or DTYPES[transformer_dtype(config.precision)]
    stored = quantisation(config.precision.base_model_precision)
    transformer = adapter.load_transformer(dtype, empty=True).requires_grad_(False)
    layout, images = adapter.block_layout(transformer), []
    in_bf16 = bf16_modulation(config.speed) and _adapts_only(transformer, adapted, adapter.spec.quantised_layers)
    weights = DeferredWeights(transformer, adapter.source["transformer"], dtype)
    streamed = in_groups(blocks_to_stream(layout, config.offload), config.offload)
    staying = [[block] for block in layout.blocks if not any(block in group for group in streamed)]
    for modules in [*streamed, *staying, [transformer]]:
        weights.fill(modules)
        if stored is not None:
            via, layers = config.precision.quantize_via, adapter.spec.quantised_layers
            quantise(transformer, layers, stored, via=via, accelerator=device, within=modules)
        for module in modules if in_bf16 else ():
            adapter.store_modulation_in_bf16(module)
        if modules in streamed:
            images.append(pack_group(modules, config.offload, device, world))
        elif modules in staying and sharers.size > 1:
            share_by_machine(modules, sharers)
        elif modules in staying and not on_host:
            for block in modules:
                block.to(device)
    return transformer, images


def blocks_to_stream(layout: BlockLayout, config: OffloadConfig) -> list[nn.Module]:
    """The blocks whose weights do not stay on the device."""
    return streamed_blocks(layout.blocks, config.group_offload_resident_blocks) if config.enable_group_offload else []


def _adapts_only(transformer: nn.Module, adapted: Targets, layers: str) -> bool:
    """Whether all modules that get an adapter are layers that can be quantised: others keep their dtype till then."""
    names = [name for name, _ in transformer.named_modules()]
    return all(re.fullmatch(layers, name) for name in matching_modules(names, adapted))
