"""Attaches a streamer to a model: selects the blocks to stream and wraps their `forward`.

Names, shapes and `state_dict()` keys of the model are unchanged, and `model.to(...)` moves
everything but the streamed weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from simpletuner.config.schema import SLOTS, OffloadConfig
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.memory.heap import trim_heap
from simpletuner.memory.offload.copiers import choose_copier
from simpletuner.memory.offload.image import (
    WeightImage,
    frozen_tensors,
    on_disk,
    page_lock,
    shared_by_machine,
    without_tensors,
)
from simpletuner.memory.offload.streamer import SlotReferences, Streamer
from simpletuner.models.placement import place

logger = logging.getLogger(__name__)


def place_model(model: nn.Module, streamed: Sequence[nn.Module], device: torch.device) -> None:
    """Move a model to a device, except for the frozen weights of blocks that will stream."""
    staying = {id(tensor) for block in streamed for tensor in frozen_tensors(block)}
    with without_tensors(streamed, staying):
        place(model, device)
    trim_heap()


def streamed_blocks(blocks: Sequence[nn.Module], residents: int) -> list[nn.Module]:
    """All blocks but `residents` evenly spaced ones.

    Those stay on the device. While they compute, the copies of the next groups go on.
    """
    count = min(residents, len(blocks))
    # The model is divided into equal parts; the block in the middle of each part stays.
    resident_indices = {int((index + 0.5) * len(blocks) / count) for index in range(count)}
    return [block for index, block in enumerate(blocks) if index not in resident_indices]


class LayerQuantiser(Protocol):
    """Quantises layers of a model."""

    def __call__(self, *, within: Sequence[nn.Module]) -> None: ...


@dataclass(frozen=True)
class Offload:
    """Group offload as configured.

    Attributes:
        device: the compute device.
        world: the processes that train together; processes of a machine share one copy of the
            weights in host memory.
    """

    config: OffloadConfig
    device: torch.device
    world: World = field(default_factory=World)

    def attach(
        self,
        transformer: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        keeps_saved: bool,
        packed: list[WeightImage] | None = None,
    ) -> Streamer | None:
        """Stream the frozen weights of a transformer, after all other changes to it.

        Args:
            blocks: the blocks to stream, in the order of the forward pass; see `streamed_blocks`.
            keeps_saved: some blocks run without activation checkpointing, so autograd saves their
                weights.
            packed: see `stream`.

        Returns:
            the streamer, or None if nothing streams.
        """
        if not blocks:
            logger.warning(
                "group_offload_resident_blocks covers every block: nothing is left to offload."
            )
            return None
        group_size = self.config.group_offload_blocks_per_group
        if group_size > len(blocks):
            message = "group_offload_blocks_per_group: %d is more than the %d blocks that stream"
            logger.warning(f"{message}; they form one group.", group_size, len(blocks))
        streamer = self.stream(blocks, packed)
        # Autograd would save views of slots, which later groups overwrite before the backward pass.
        if keeps_saved:
            _wrap_forward(transformer, partial(SlotReferences, streamer))
        where = "in host memory" if self.config.group_offload_to_disk_path is None else "on disk"
        total = sum(image.nbytes for image in streamer.images)
        logger.info(
            "Streaming %d blocks through %d slots of %.0f MB; %.2f GB of weights stay %s.",
            len(blocks),
            len(streamer.slots),
            streamer.slots[0].nbytes / 1e6,
            total / 1e9,
            where,
        )
        return streamer

    def attach_to_stacks(
        self, model: nn.Module, quantise: LayerQuantiser | None = None
    ) -> list[Streamer]:
        """Move a frozen model to the device, streaming its long stacks of layers.

        Stacks are the outermost module lists, such as the layers of a language model or the up
        blocks of a VAE decoder. Every stack has a separate ring, because a call may run only some
        stacks.

        Args:
            quantise: called for each group of layers just before packing, and for the whole model
                at the end.
        """
        # A shorter stack would fit into its slots.
        stacks = [list(stack) for stack in _outermost_lists(model) if len(stack) > SLOTS]
        packed = []
        # Group by group, so that the host never holds all quantised layers twice.
        for stack in stacks:
            for group in self.groups(stack):
                if quantise is not None:
                    quantise(within=group)
                packed.append(self.pack(group))
        if quantise is not None:
            quantise(within=[model])
        # Last, so that modules that do not stream are quantised before they move to the device.
        place_model(model, [layer for stack in stacks for layer in stack], self.device)
        return [self.stream(stack, packed) for stack in stacks]

    def stream(
        self, blocks: Sequence[nn.Module], packed: list[WeightImage] | None = None
    ) -> Streamer:
        """Pack blocks into images, unless already packed, and stream them in each forward pass.

        Args:
            packed: images from `pack`, in order, removed from the list; stale images are rebuilt.

        Raises:
            UserError: the folder for images on disk cannot be created.
        """
        groups = self.groups(blocks)
        images = []
        for group in groups:
            image = packed.pop(0) if packed else None
            # Stale if layers have been replaced since packing, such as by an adapter.
            if image is None or not image.holds(group):
                image = self.pack(group)
            images.append(image)
        use_stream = self.config.group_offload_use_stream
        to_disk = self.config.group_offload_to_disk_path is not None
        if use_stream and self.device.type != "cuda":
            _warn_once(
                "group_offload_use_stream has no effect: the compute device is not a CUDA device."
            )
        largest = max(image.nbytes for image in images)
        copier = choose_copier(self.device, largest, use_stream=use_stream, on_disk=to_disk)
        streamer = Streamer(images, copier, SLOTS)
        for index, (group, image) in enumerate(zip(groups, images, strict=True)):
            for block in group:
                _wrap_forward(block, partial(_entering, streamer, index))
                _stay_put(block, frozenset(id(tensor) for tensor in image.tensors))
        return streamer

    def groups(self, blocks: Sequence[nn.Module]) -> list[Sequence[nn.Module]]:
        """Groups of blocks that share a slot."""
        size = self.config.group_offload_blocks_per_group
        return [blocks[start : start + size] for start in range(0, len(blocks), size)]

    def pack(self, group: Sequence[nn.Module]) -> WeightImage:
        """Pack the frozen weights of blocks into an image, which then holds their only copy.

        Raises:
            UserError: the folder for images on disk cannot be created.
        """
        return WeightImage(group, self._store)

    def _store(self, image: WeightImage, flat: Tensor) -> Tensor:
        """Store an image on disk, or in host memory, pinned for a GPU."""
        path = self.config.group_offload_to_disk_path
        is_shared = self.world.local_size > 1
        if path is None:
            if is_shared:
                flat = shared_by_machine(flat, self.world, None)
            if self.device.type == "cuda":
                page_lock(flat, image)
            return flat
        folder = Path(path).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"group_offload_to_disk_path: cannot create {str(folder)!r}: {error.strerror}."
            ) from None
        if is_shared:
            return shared_by_machine(flat, self.world, folder)
        return on_disk(flat, folder)


def _wrap_forward(module: nn.Module, around: Callable[[], AbstractContextManager[object]]) -> None:
    """Enter a context around the current `forward`, which may be compiled.

    The streamer stays outside of compiled code. Hooks of activation checkpointing are nested
    inside, so they take precedence.
    """
    inner = module.forward

    @wraps(inner)
    def forward(*inputs: Any, **settings: Any) -> Any:
        with around():
            return inner(*inputs, **settings)

    module.forward = forward


@contextmanager
def _entering(streamer: Streamer, group: int) -> Iterator[None]:
    streamer.enter(group)
    yield


def _stay_put(block: nn.Module, tensors: frozenset[int]) -> None:
    """Exclude the streamed tensors from `to`, `cuda`, `float` and similar calls.

    The other weights of the block, such as a LoRA's, move as usual.
    """
    apply: Callable[..., nn.Module] = block._apply

    def apply_to_rest(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with without_tensors([block], tensors):
            return apply(fn, recurse)

    block._apply = apply_to_rest  # type: ignore[method-assign]


def _outermost_lists(module: nn.Module) -> list[nn.ModuleList]:
    """Module lists that are not nested in another list, in the order of the model."""
    if isinstance(module, nn.ModuleList):
        return [module]
    return [stack for child in module.children() for stack in _outermost_lists(child)]


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
