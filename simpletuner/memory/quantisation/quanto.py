"""Weights as optimum-quanto quantises them: 8 bits with a scale per row, or 2 or 4 per group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from simpletuner.memory.quantisation.formats import Packed, WeightFormat
from simpletuner.memory.quantisation.scaled_rows import ScaledRows

# Weights per scale below 8 bits: the first size that divides the row, else the whole row.
GROUP_SIZES = (128, 96, 64, 32)


@dataclass(frozen=True)
class ScaledGroups(WeightFormat):
    """2 or 4 bits per weight, and a scale and shift per group: w = scale · level - shift.

    Groups are packed in slices: byte row i holds group i in its lowest bits, then group i of the
    next slice.
    """

    bits: int
    groups: int
    shape: tuple[int, int]

    def unpack(self, *packed: Tensor) -> Tensor:
        data, scale, shift = packed
        mask = 2**self.bits - 1
        # Lowest bits first. The last slice may be padded.
        slices = [(data >> offset) & mask for offset in range(0, 8, self.bits)]
        return (scale * torch.cat(slices)[: self.groups] - shift).reshape(self.shape)


def pack_quanto(weight: Tensor, kind: str) -> Packed:
    """Quantise a weight to the qtype of this name."""
    from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qtypes, quantize_weight

    qtype = qtypes[kind]
    exact = weight.float()  # in bf16, levels would be off by up to a quarter
    if qtype.bits == 8:
        scale = _usable(AbsmaxOptimizer()(exact, qtype=qtype, axis=0), weight.dtype)
        packed = quantize_weight(exact, qtype=qtype, axis=0, scale=scale.float(), optimized=False)
        return ScaledRows(), {"data": packed._data, "scale": scale}
    group = _group_size(weight.shape[1])
    scale, shift = MaxOptimizer()(exact, qtype=qtype, axis=0, group_size=group)
    scale = _usable(scale, weight.dtype)
    shift = shift.to(weight.dtype)
    settings = {"qtype": qtype, "axis": 0, "group_size": group, "optimized": False}
    packed = quantize_weight(exact, scale=scale.float(), shift=shift.float(), **settings)
    format_ = ScaledGroups(qtype.bits, weight.numel() // group, (weight.shape[0], weight.shape[1]))
    return format_, {"data": packed._data._data, "scale": scale, "shift": shift}


def _group_size(width: int) -> int:
    for size in GROUP_SIZES:
        if width % size == 0:
            return size
    return width


def _usable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale in the stored dtype; 1 for rows of zeros, to avoid division by zero."""
    kept = scale.to(dtype)
    return torch.where(kept == 0, torch.ones_like(kept), kept)
