"""Weights that autograd saves for the backward pass, while they stream.

Without activation checkpointing the graph keeps references to weights, views of a slot that holds another group by
then. So the graph gets their place instead: which group, where in its image. In the backward pass the group is
entered once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.memory.offload.image import Place
from simpletuner.memory.offload.streamer import Streamer


@dataclass(frozen=True)
class SlotView:
    """A tensor that lay in the slot of a group."""

    group: int
    place: Place


class RememberedPlaces(saved_tensors_hooks):
    """While this is entered, saved views of slots are remembered by their place; all else is saved as usual.

    Each operation reads the weights of one group: the hooks fetch one group at a time.
    """

    def __init__(self, streamer: Streamer) -> None:
        def pack(tensor: Tensor) -> Tensor | SlotView:
            # Wrappers have no memory of their own. Quantised weights stream with checkpointing only.
            group = streamer.group_at(tensor) if type(tensor) in (Tensor, torch.nn.Parameter) else None
            if group is None:
                return tensor
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return SlotView(group, Place(offset, tensor.size(), tensor.stride(), tensor.dtype))

        def unpack(saved: Tensor | SlotView) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            streamer.enter(saved.group)
            return saved.place.view(streamer.slot_of(saved.group))

        super().__init__(pack, unpack)
