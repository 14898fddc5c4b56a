"""The ring of device slots for the groups of a model.

    forward            ─► 0 1 2 3 4 5   each group is prefetched one group ahead,
    backward  3 2 1 0 ◄─               and evicts the group that ran before

The last groups are still in their slots when the backward pass begins. So a training step copies
all other groups twice, once per direction: 2 (groups - slots) copies. Evicting a group points its
tensors at the host image again; frozen weights never change, so no data is copied back.

The backward pass ends at the first block that needs a gradient. The groups below it are copied once
a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
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
        self._group_in: list[int | None] = [None] * len(self.slots)  # by slot
        self._pending: dict[int, Any] = {}  # copies that compute has not waited for, by group
        self._turn = 0  # the group at which the last backward pass ended
        self._reached: int | None = None  # the lowest group of a backward pass so far
        # The slot of a storage: views of a slot share its storage, by which they are recognised.
        self._slot_of_storage = {
            slot.untyped_storage().data_ptr(): index for index, slot in enumerate(self.slots)
        }

    def enter(self, group: int) -> None:
        """Announce that compute starts a group and is done with earlier groups.

        Loads the group, if necessary, then prefetches the next groups in this direction.
        """
        self._follow(group)
        if group not in self._group_in:
            self._load(group, keep={group})
        if group in self._pending:
            self.copier.wait(self._pending.pop(group))
            # Only now, since before the copy the slot holds other weights.
            self.images[group].bind(self.slot_of(group))
        next_groups = self._next_groups(group)
        for next_group in next_groups:
            if next_group not in self._group_in:
                self._load(next_group, keep={group, *next_groups})

    def slot_of(self, group: int) -> Tensor:
        """The device memory of a loaded group."""
        return self.slots[self._group_in.index(group)]

    def group_at(self, tensor: Tensor) -> int | None:
        """The group whose slot holds a tensor; None if it is not in a slot."""
        slot = self._slot_of_storage.get(tensor.untyped_storage().data_ptr())
        return None if slot is None else self._group_in[slot]

    def waited(self) -> float:
        """Seconds that compute waited for weights since the last call."""
        return self.copier.waited()

    def _load(self, group: int, keep: set[int]) -> None:
        """Start copying a group into a slot whose group is not in `keep`."""
        slot = self._evictable_slot(keep)
        evicted = self._group_in[slot]
        if evicted is not None:
            # Before the copy starts, since no tensor may point at memory that is being overwritten.
            self.images[evicted].bind(self.images[evicted].flat)
        self._group_in[slot] = group
        self._pending[group] = self.copier.submit(self.slots[slot], self.images[group].flat)

    def _evictable_slot(self, keep: set[int]) -> int:
        # `keep` has at most one group per slot, and one of these is the group to load, which has no
        # slot yet. So the loop always finds one.
        for slot, group in enumerate(self._group_in):
            if group not in keep:
                return slot
        raise AssertionError("every slot is in use")

    def _follow(self, group: int) -> None:
        """Note where backward passes end."""
        if in_backward():
            self._reached = group if self._reached is None else min(group, self._reached)
        elif self._reached is not None:
            self._turn = self._reached
            self._reached = None

    def _next_groups(self, group: int) -> list[int]:
        """The next groups, one per remaining slot; in reverse order inside the autograd engine.

        Without gradients, the model is called repeatedly, so the first group follows the last.
        """
        count = len(self.images)
        distances = range(1, len(self.slots))
        if in_backward():
            # Down to the turn, then up again in the next forward pass.
            path = chain(range(group - 1, self._turn - 1, -1), range(count))
            return list(islice(path, len(distances)))
        following = [group + distance for distance in distances]
        if not torch.is_grad_enabled():
            return [index % count for index in following]
        return [index for index in following if index < count]


def in_backward() -> bool:
    """Whether this thread is in the backward pass, in which checkpointing recomputes blocks."""
    return torch._C._current_graph_task_id() != -1


class SlotReferences(saved_tensors_hooks):
    """Hooks that save views of slots by position instead of by value.

    In the backward pass, the group is loaded again, into any slot, and the view is made there. All
    other tensors are saved as usual. An operation reads the weights of one group only, so unpacking
    one group at a time suffices.
    """

    def __init__(self, streamer: Streamer) -> None:
        def pack(tensor: Tensor) -> Tensor | tuple[int, Span]:
            # Wrappers have no memory; quantised weights stream only with activation checkpointing.
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                return tensor
            group = streamer.group_at(tensor)
            if group is None:
                return tensor
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return group, Span(offset, tensor.size(), tensor.stride(), tensor.dtype)

        def unpack(saved: Tensor | tuple[int, Span]) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            group, span = saved
            streamer.enter(group)
            return span.view(streamer.slot_of(group))

        super().__init__(pack, unpack)
