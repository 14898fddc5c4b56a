"""What autograd really keeps: storages, each counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Meter:
    """Bytes of tensors that the backward pass will need, beside those that are there anyway."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._kept: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self._known:
            self._kept[address] = tensor  # alive, so that its address is not given away again
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
    """Count what autograd saves inside the block; `known` tensors (parameters, inputs) do not
    count.
    """
    meter = Meter(known)
    with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda tensor: tensor):
        yield meter
