"""Puts the streamer around a model: which blocks stream, what stays, and where `forward` meets the ring.

Nothing of this is seen from outside: names, shapes and `state_dict()` keys are those of the model without it, and
`model.to(...)` moves everything but the streamed weights.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.config.schema import SLOTS, OffloadConfig
from simpletuner.errors import UserError
from simpletuner.memory.offload.image import WeightImage, frozen_tensors, on_disk, page_lock, set_aside
from simpletuner.memory.offload.lane import choose_lane
from simpletuner.memory.offload.streamer import RememberedPlaces, Streamer

logger = logging.getLogger(__name__)


def place_model(model: nn.Module, streamed: Sequence[nn.Module], device: torch.device) -> None:
    """Move a model to a device, and leave the frozen weights of blocks that will stream where they are."""
    frozen = {id(tensor) for block in streamed for tensor in frozen_tensors(block)}
    with set_aside(streamed, frozen):
        model.to(device)


def streamed_blocks(blocks: Sequence[nn.Module], residents: int) -> list[nn.Module]:
    """All blocks but so many that stay on the device, evenly spaced: each gives the copy behind it more time."""
    count = min(residents, len(blocks))
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
) -> Streamer | None:
    """Let the frozen weights of a transformer stream; the last thing that is done to it before training.

    Args:
        blocks: those that stream, in the order in which the forward pass enters them; see `streamed_blocks`.
        keeps_saved: some blocks run without activation checkpointing, so the graph keeps what they save.
        slots: groups on the device at a time.

    Returns:
        the streamer, or None where nothing streams.
    """
    if not blocks:
        logger.warning("group_offload_resident_blocks covers every block: nothing is left to offload.")
        return None
    wanted = config.group_offload_blocks_per_group
    if wanted > len(blocks):
        message = "group_offload_blocks_per_group: %d is more than the %d blocks that stream; they come as one group."
        logger.warning(message, wanted, len(blocks))
    streamer = stream(blocks, device, config, slots)
    if keeps_saved:
        _remember_places(transformer, streamer)
    where = "in host memory" if config.group_offload_to_disk_path is None else "on disk"
    total = sum(image.nbytes for image in streamer.images)
    logger.info(
        "%d blocks stream through %d x %.0f MB; %.2f GB of weights wait %s.",
        len(blocks), len(streamer.slots), streamer.slots[0].nbytes / 1e6, total / 1e9, where,
    )  # fmt: skip
    return streamer


def offload_layers(model: nn.Module, config: OffloadConfig, device: torch.device) -> list[Streamer]:
    """Move a frozen model to a device, and stream the layers of each stack of layers that is worth it.

    Stacks are the outermost module lists: the layers of a language model, the up blocks of a VAE's decoder. Each gets
    a ring of its own, because not every call passes through all of them.
    """
    stacks = [stack for stack in _outermost_lists(model) if len(stack) > SLOTS]
    place_model(model, [layer for stack in stacks for layer in stack], device)
    return [stream(list(stack), device, config) for stack in stacks]


def stream(blocks: Sequence[nn.Module], device: torch.device, config: OffloadConfig, slots: int = SLOTS) -> Streamer:
    """Pack blocks into images and let each forward pass enter them through a streamer.

    Raises:
        UserError: the folder for images on disk cannot be made.
    """
    size = config.group_offload_blocks_per_group
    groups = [blocks[start : start + size] for start in range(0, len(blocks), size)]
    images = [WeightImage(group, _settle(config, device)) for group in groups]
    if config.group_offload_use_stream and device.type != "cuda":
        _warn_once("group_offload_use_stream has no effect: the compute device is no CUDA device.")
    to_disk = config.group_offload_to_disk_path is not None
    largest = max(image.nbytes for image in images)
    lane = choose_lane(device, largest, use_stream=config.group_offload_use_stream, on_disk=to_disk)
    streamer = Streamer(images, lane, slots)
    for index, (group, image) in enumerate(zip(groups, images, strict=True)):
        for block in group:
            _enter_before_forward(block, streamer, index)
            _stay_put(block, frozenset(id(tensor) for tensor in image.tensors))
    return streamer


def _enter_before_forward(block: nn.Module, streamer: Streamer, group: int) -> None:
    """Around whatever `forward` is by now: a compiled one is not looked into."""
    inner = block.forward

    @functools.wraps(inner)
    def forward(*inputs: Any, **settings: Any) -> Any:
        streamer.enter(group)
        return inner(*inputs, **settings)

    block.forward = forward


def _stay_put(block: nn.Module, tensors: frozenset[int]) -> None:
    """Let `to`, `cuda`, `float` and their like pass the streamed tensors by; LoRA weights move as ever."""
    apply: Callable[..., nn.Module] = block._apply

    def apply_to_others(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with set_aside([block], tensors):
            return apply(fn, recurse)

    block._apply = apply_to_others  # type: ignore[method-assign]


def _remember_places(transformer: nn.Module, streamer: Streamer) -> None:
    """Around the whole forward pass, so that the hooks of activation checkpointing, further in, come first."""
    inner = transformer.forward

    @functools.wraps(inner)
    def forward(*inputs: Any, **settings: Any) -> Any:
        with RememberedPlaces(streamer):
            return inner(*inputs, **settings)

    transformer.forward = forward


def _outermost_lists(module: nn.Module) -> list[nn.ModuleList]:
    """Module lists that lie in no other one, in the order of the model."""
    if isinstance(module, nn.ModuleList):
        return [module]
    return [found for child in module.children() for found in _outermost_lists(child)]


def _settle(config: OffloadConfig, device: torch.device) -> Callable[[WeightImage, Tensor], Tensor]:
    """Where images are kept: on disk, or in host memory that a GPU can read directly."""
    path = config.group_offload_to_disk_path
    if path is None:
        return _lock if device.type == "cuda" else _keep
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"group_offload_to_disk_path: {str(folder)!r} cannot be made: {error.strerror}.") from None
    return lambda image, flat: on_disk(flat, folder)


def _keep(image: WeightImage, flat: Tensor) -> Tensor:
    return flat


def _lock(image: WeightImage, flat: Tensor) -> Tensor:
    page_lock(flat, image)
    return flat


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
