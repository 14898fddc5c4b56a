"""The ring of device slots for the groups of a model.

    forward            ─► 0 1 2 3 4 5   each group is prefetched one group ahead,
    backward  3 2 1 0 ◄─               and evicts the group that ran before

The last groups are still in their slots when the backward pass begins, so a training step makes 2
(groups - slots) copies. Evicting a group points its tensors at the host image again; frozen weights
never change, so no data is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.memory.offload.copiers import Copier
from simpletuner.memory.offload.image import Span, WeightImage


class Streamer:
    """Copies groups to the device in the order of computation.

    Args:
        images: one per group, in the order of the forward pass.
        copier: copies groups into slots.
        slots: number of groups on the device: the group that computes and the groups being copied.
    """

    def __init__(self, images: Sequence[WeightImage], copier: Copier, slots: int) -> None:
        self.images = list(images)
        self.copier = copier
        largest = max(image.nbytes for image in images)
        self.slots: list[Tensor] = [
            copier.make_slot(largest) for _ in range(min(slots, len(images)))
        ]
        self._held: list[int | None] = [None] * len(self.slots)  # the group in each slot
        self._pending: dict[int, Any] = {}  # copies that the copier has started, by group
        # Saved views are recognised by the storage they share with a slot.
        self._places = {
            slot.untyped_storage().data_ptr(): index for index, slot in enumerate(self.slots)
        }

    def enter(self, group: int) -> None:
        """Announce that compute starts a group and is done with earlier groups.

        Loads the group, if necessary, then prefetches the next groups in this direction.
        """
        if group not in self._held:
            self._load(group, {group})
        if group in self._pending:
            self.copier.wait(self._pending.pop(group))
            # Only now, since before the copy the slot holds other weights.
            self.images[group].bind(self.slot_of(group))
        ahead = self._ahead(group)
        for coming in ahead:
            if coming not in self._held:
                self._load(coming, {group, *ahead})

    def slot_of(self, group: int) -> Tensor:
        """The device memory of a loaded group."""
        return self.slots[self._held.index(group)]

    def group_at(self, tensor: Tensor) -> int | None:
        """The group whose slot holds a tensor; None if it is not in a slot."""
        index = self._places.get(tensor.untyped_storage().data_ptr())
        return None if index is None else self._held[index]

    def waited(self) -> float:
        """Seconds that compute waited for weights since the last call."""
        return self.copier.waited()

    def _load(self, group: int, keep: set[int]) -> None:
        """Start copying a group into a slot whose group is not in `keep`."""
        # `keep` has at most one group per slot, including the one to load, which has no slot: one
        # slot is always free.
        index = next(index for index, held in enumerate(self._held) if held not in keep)
        evicted = self._held[index]
        if evicted is not None:
            # Before the copy starts, since no tensor may point at memory that is being overwritten.
            self.images[evicted].bind(self.images[evicted].flat)
        self._held[index] = group
        self._pending[group] = self.copier.submit(self.slots[index], self.images[group].flat)

    def _ahead(self, group: int) -> list[int]:
        """The next groups, one per remaining slot; in reverse order inside the autograd engine.

        Without gradients, the model is called repeatedly, so the first group follows the last.
        """
        count = len(self.images)
        depth = len(self.slots) - 1
        if in_backward():
            return [group - step for step in range(1, depth + 1) if group - step >= 0]
        coming = [group + step for step in range(1, depth + 1)]
        if not torch.is_grad_enabled():
            return [each % count for each in coming]
        return [each for each in coming if each < count]


def in_backward() -> bool:
    """Whether this thread is in the backward pass, where activation checkpointing recomputes
    blocks.
    """
    return torch._C._current_graph_task_id() != -1


class SlotReferences(saved_tensors_hooks):
    """Hooks that save views of slots by position instead of by value; all other tensors are saved
    as usual.

    An operation reads the weights of one group only, so unpacking one group at a time suffices.
    """

    def __init__(self, streamer: Streamer) -> None:
        def pack(tensor: Tensor) -> Tensor | tuple[int, Span]:
            # Wrappers have no memory; quantised weights stream only with activation checkpointing.
            group = (
                streamer.group_at(tensor) if type(tensor) in (Tensor, torch.nn.Parameter) else None
            )
            if group is None:
                return tensor
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return group, Span(offset, tensor.size(), tensor.stride(), tensor.dtype)

        def unpack(saved: Tensor | tuple[int, Span]) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            group, place = saved
            streamer.enter(group)
            return place.view(streamer.slot_of(group))

        super().__init__(pack, unpack)
