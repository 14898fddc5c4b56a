"""The ring of slots through which the groups of a model pass.

    forward            ─► 0 1 2 3 4 5   each is copied to a slot one group before it is needed,
    backward  3 2 1 0 ◄─               replacing the group that ran before

The last groups are still in their slots when the backward pass begins, so a training step makes 2 (groups - slots)
copies. Evicting a group points its tensors at the host image again; frozen weights never change, so nothing is copied
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.config.schema import SLOTS
from simpletuner.memory.offload.image import Span, WeightImage
from simpletuner.memory.offload.lane import Lane


class Streamer:
    """Copies groups to the device in the order in which they are entered.

    Args:
        images: one per group, in the order of the forward pass.
        lane: makes the copies.
        slots: groups on the device at a time: the one that computes and those being copied.
    """

    def __init__(self, images: Sequence[WeightImage], lane: Lane, slots: int = SLOTS) -> None:
        self.images, self.lane = list(images), lane
        largest = max(image.nbytes for image in images)
        self.slots: list[Tensor] = [lane.make_slot(largest) for _ in range(min(slots, len(images)))]
        self._held: list[int | None] = [None] * len(self.slots)  # the group in each slot
        self._tickets: dict[int, Any] = {}  # of groups that are being copied
        self._places = {slot.untyped_storage().data_ptr(): index for index, slot in enumerate(self.slots)}

    def enter(self, group: int) -> None:
        """Announce that the compute starts a group and is done with earlier ones.

        Loads the group, if necessary, then those that come next in this direction.
        """
        if group not in self._held:
            self._load(group, {group})
        if group in self._tickets:
            self.lane.wait(self._tickets.pop(group))
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
        """Seconds that the compute waited for weights since the last call."""
        return self.lane.waited()

    def _load(self, group: int, keep: set[int]) -> None:
        """Start to copy a group into a slot whose group is not in `keep`."""
        index = next(index for index, held in enumerate(self._held) if held not in keep)
        evicted = self._held[index]
        if evicted is not None:
            self.images[evicted].bind(self.images[evicted].flat)
        self._held[index] = group
        self._tickets[group] = self.lane.submit(self.slots[index], self.images[group].flat)

    def _ahead(self, group: int) -> list[int]:
        """The groups that come next, one for each other slot; in reverse order inside the autograd engine.

        Without gradients the model is called repeatedly, so the first group follows the last.
        """
        count, depth = len(self.images), len(self.slots) - 1
        if in_backward():
            return [group - step for step in range(1, depth + 1) if group - step >= 0]
        coming = [group + step for step in range(1, depth + 1)]
        if not torch.is_grad_enabled():
            return [each % count for each in coming]
        return [each for each in coming if each < count]


def in_backward() -> bool:
    """Whether this thread runs the backward pass, where activation checkpointing recomputes blocks."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class SlotView:
    """A saved tensor that was a view of a group's slot."""

    group: int
    place: Span


class RememberedPlaces(saved_tensors_hooks):
    """Hooks that save views of slots by their place instead of their values; all else is saved as usual.

    An operation reads the weights of only one group, so unpacking one group at a time suffices.
    """

    def __init__(self, streamer: Streamer) -> None:
        def pack(tensor: Tensor) -> Tensor | SlotView:
            # Wrappers have no memory of their own; quantised weights stream only with checkpointing.
            group = streamer.group_at(tensor) if type(tensor) in (Tensor, torch.nn.Parameter) else None
            if group is None:
                return tensor
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return SlotView(group, Span(offset, tensor.size(), tensor.stride(), tensor.dtype))

        def unpack(saved: Tensor | SlotView) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            streamer.enter(saved.group)
            return saved.place.view(streamer.slot_of(saved.group))

        super().__init__(pack, unpack)
