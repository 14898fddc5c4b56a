"""The bytes that autograd saves for the backward pass; every storage counts once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Meter:
    """Counts the tensors saved for the backward pass, except those known before."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._kept: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._known:
            self._kept[address] = tensor  # kept alive, so that its address is not used again
        return tensor

    @property
    def addresses(self) -> set[int]:
        return set(self._kept)

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._kept.values())

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


@contextmanager
def saved_bytes(known: Iterable[Tensor]) -> Iterator[Meter]:
    """Count what autograd saves in this context.

    Args:
        known: tensors that do not count, such as parameters and inputs.
    """
    meter = Meter(known)
    with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda tensor: tensor):
        yield meter
