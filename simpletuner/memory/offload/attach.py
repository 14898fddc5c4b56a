"""Attaches a streamer to a model: chooses the blocks that stream, and wraps their `forward`.

Names, shapes and `state_dict()` keys of the model are unchanged, and `model.to(...)` moves everything but the streamed
weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from simpletuner.config.schema import SLOTS, OffloadConfig
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.memory.heap import trim_heap
from simpletuner.memory.offload.image import (
    Settle,
    WeightImage,
    frozen_tensors,
    on_disk,
    page_lock,
    set_aside,
    shared_by_machine,
)
from simpletuner.memory.offload.streamer import RememberedPlaces, Streamer, choose_lane

logger = logging.getLogger(__name__)


def place_model(model: nn.Module, streamed: Sequence[nn.Module], device: torch.device) -> None:
    """Move a model to a device, except for the frozen weights of blocks that will stream."""
    frozen = {id(tensor) for block in streamed for tensor in frozen_tensors(block)}
    with set_aside(streamed, frozen):
        model.to(device)
    trim_heap()


def streamed_blocks(blocks: Sequence[nn.Module], residents: int) -> list[nn.Module]:
    """All blocks except `residents` evenly spaced ones, which stay on the device and give the next copy more time."""
    count = min(residents, len(blocks))
    # The middles of equal parts.
    staying = {int((index + 0.5) * len(blocks) / count) for index in range(count)}
    return [block for index, block in enumerate(blocks) if index not in staying]


def attach_offload(
    transformer: nn.Module,
    blocks: Sequence[nn.Module],
    config: OffloadConfig,
    device: torch.device,
    *,
    keeps_saved: bool,
    slots: int = SLOTS,
    world: World = World(),
    packed: list[WeightImage] | None = None,
) -> Streamer | None:
    """Let the frozen weights of a transformer stream; call it last, after all other changes to the transformer.

    Args:
        blocks: the blocks that stream, in the order of the forward pass; see `streamed_blocks`.
        keeps_saved: some blocks run without activation checkpointing, so autograd saves their weights.
        slots: groups on the device at a time.
        world: the processes that train together; those of a machine share one copy of the weights in host memory.
        packed: images from `pack_group` in order, taken out of the list; one that no longer holds is made again.

    Returns:
        the streamer, or None if nothing streams.
    """
    if not blocks:
        logger.warning("group_offload_resident_blocks covers every block: nothing is left to offload.")
        return None
    wanted = config.group_offload_blocks_per_group
    if wanted > len(blocks):
        message = "group_offload_blocks_per_group: %d is more than the %d blocks that stream; they come as one group."
        logger.warning(message, wanted, len(blocks))
    streamer = stream(blocks, device, config, slots, world, packed)
    # Autograd would save views of slots, which later groups overwrite before the backward pass.
    if keeps_saved:
        _wrap_forward(transformer, partial(RememberedPlaces, streamer))
    where = "in host memory" if config.group_offload_to_disk_path is None else "on disk"
    total = sum(image.nbytes for image in streamer.images)
    logger.info(
        "Streaming %d blocks through %d slots of %.0f MB; %.2f GB of weights stay %s.",
        len(blocks), len(streamer.slots), streamer.slots[0].nbytes / 1e6, total / 1e9, where,
    )  # fmt: skip
    return streamer


class LayerQuantiser(Protocol):
    """Quantises layers of a model."""

    def __call__(self, *, within: Sequence[nn.Module]) -> None: ...


def offload_layers(
    model: nn.Module, config: OffloadConfig, device: torch.device, quantise: LayerQuantiser | None = None
) -> list[Streamer]:
    """Move a frozen model to a device, streaming its stacks of layers that are longer than the ring.

    Stacks are the outermost module lists: the layers of a language model, the up blocks of a VAE's decoder. Each has
    its own ring, because not every call runs all of them.

    Args:
        quantise: called for some layers just before they are packed, and for the model as a whole at the end.
    """
    # A shorter stack would fit into its slots as a whole.
    stacks, packed = [list(stack) for stack in _outermost_lists(model) if len(stack) > SLOTS], []
    # Group by group, so that the host never holds all quantised layers twice.
    for group in (group for stack in stacks for group in in_groups(stack, config)):
        if quantise is not None:
            quantise(within=group)
        packed.append(pack_group(group, config, device))
    if quantise is not None:
        quantise(within=[model])
    # Last: what does not stream goes to the device only after it was quantised.
    place_model(model, [layer for stack in stacks for layer in stack], device)
    return [stream(stack, device, config, packed=packed) for stack in stacks]


def stream(
    blocks: Sequence[nn.Module],
    device: torch.device,
    config: OffloadConfig,
    slots: int = SLOTS,
    world: World = World(),
    packed: list[WeightImage] | None = None,
) -> Streamer:
    """Pack blocks into images, unless they are packed, and stream them in each forward pass.

    Raises:
        UserError: the folder for images on disk cannot be created.
    """
    groups = in_groups(blocks, config)
    images = []
    for group in groups:
        image = packed.pop(0) if packed else None
        # Layers may have been replaced since they were packed.
        still_holds = image is not None and image.holds(group)
        images.append(image if image and still_holds else pack_group(group, config, device, world))
    if config.group_offload_use_stream and device.type != "cuda":
        _warn_once("group_offload_use_stream has no effect: the compute device is no CUDA device.")
    to_disk = config.group_offload_to_disk_path is not None
    largest = max(image.nbytes for image in images)
    lane = choose_lane(device, largest, use_stream=config.group_offload_use_stream, on_disk=to_disk)
    streamer = Streamer(images, lane, slots)
    for index, (group, image) in enumerate(zip(groups, images, strict=True)):
        for block in group:
            _wrap_forward(block, partial(_entering, streamer, index))
            _stay_put(block, frozenset(id(tensor) for tensor in image.tensors))
    return streamer


def in_groups(blocks: Sequence[nn.Module], config: OffloadConfig) -> list[Sequence[nn.Module]]:
    """The blocks that share a slot."""
    size = config.group_offload_blocks_per_group
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def pack_group(
    group: Sequence[nn.Module], config: OffloadConfig, device: torch.device, world: World = World()
) -> WeightImage:
    """Pack the frozen weights of blocks into an image, which is the only copy of them from then on.

    Raises:
        UserError: the folder for images on disk cannot be created.
    """
    return WeightImage(group, _settle(config, device, world))


def _wrap_forward(module: nn.Module, around: Callable[[], AbstractContextManager[object]]) -> None:
    """Enter a context around the current `forward`, which may be compiled: the streamer stays outside of compiled code,
    and the hooks of activation checkpointing are nested inside and so take precedence."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*inputs: Any, **settings: Any) -> Any:
        with around():
            return inner(*inputs, **settings)

    module.forward = forward


@contextmanager
def _entering(streamer: Streamer, group: int) -> Iterator[None]:
    streamer.enter(group)
    yield


def _stay_put(block: nn.Module, tensors: frozenset[int]) -> None:
    """Exclude the streamed tensors from `to`, `cuda`, `float` and the like; LoRA weights move as usual."""
    apply: Callable[..., nn.Module] = block._apply

    def apply_to_others(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with set_aside([block], tensors):
            return apply(fn, recurse)

    block._apply = apply_to_others  # type: ignore[method-assign]


def _outermost_lists(module: nn.Module) -> list[nn.ModuleList]:
    """Module lists that are not inside another, in the order of the model."""
    if isinstance(module, nn.ModuleList):
        return [module]
    return [found for child in module.children() for found in _outermost_lists(child)]


def _settle(config: OffloadConfig, device: torch.device, world: World) -> Settle:
    """How images are stored: on disk, or in host memory, page-locked for a GPU."""
    path = config.group_offload_to_disk_path
    if path is None:

        def keep(image: WeightImage, flat: Tensor) -> Tensor:
            kept = shared_by_machine(flat, world, None) if world.local_size > 1 else flat
            if device.type == "cuda":
                page_lock(kept, image)
            return kept

        return keep
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"group_offload_to_disk_path: {str(folder)!r} cannot be made: {error.strerror}.") from None
    if world.local_size > 1:
        return lambda image, flat: shared_by_machine(flat, world, folder)
    return lambda image, flat: on_disk(flat, folder)


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
