"""Weights in few bits: how a library packs one into plain tensors, and how it is had back.

The libraries choose scales and levels; their tensor classes and layers stay out of the model. Those of optimum-quanto
crash on a CPU for some widths, refuse strided inputs, want a CUDA compiler for some dtypes, and change their layout,
with other roundings, on the way to another device. Plain tensors can be moved, streamed, copied, saved and compiled
like any others, and one product serves every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from simpletuner.config.precision import Quantisation

GROUP_SIZES = (128, 96, 64, 32)  # weights that share a scale below 8 bits, where a row divides into such groups
NF4_BLOCK = 64


class WeightFormat(Protocol):
    """How the plain tensors of a packed weight (out, in) become numbers again."""

    def unpack(self, *packed: Tensor) -> Tensor:
        """The weight, `out in`, in the dtype of the computation."""
        ...

    def product(self, inputs: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        """`inputs` (..., in) times the weight plus the bias: (..., out)."""
        ...


Packed = tuple[WeightFormat, Mapping[str, Tensor]]


def pack(weight: Tensor, quantisation: Quantisation) -> Packed:
    """A weight `out in` as a format and the tensors it unpacks, in the order in which it takes them.

    Scales have the weight's dtype and unpacked weights do, too.
    """
    packers = {"quanto": _pack_quanto, "torchao": _pack_torchao, "bnb": _pack_bitsandbytes}
    with torch.no_grad():
        return packers[quantisation.library](weight.detach(), quantisation.kind)


class _Unpacking:
    """The product with the unpacked weight."""

    def unpack(self, *packed: Tensor) -> Tensor:
        raise NotImplementedError

    def product(self, inputs: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        return functional.linear(inputs, self.unpack(*packed), bias)


class ScaledRows(_Unpacking):
    """One byte a weight, int8 or float8, and one scale a row: w = scale · level."""

    def unpack(self, *packed: Tensor) -> Tensor:
        levels, scale = packed
        # Integers are promoted in the product itself; float8 is not.
        return (levels.to(scale.dtype) if levels.is_floating_point() else levels) * scale


@dataclass(frozen=True)
class ScaledGroups(_Unpacking):
    """2 or 4 bits a weight, scale and shift for each group of a row: w = scale · level - shift.

    The groups are packed in slices: byte i holds group i in its lowest bits, then the groups a slice further on.
    """

    bits: int
    groups: int
    shape: tuple[int, int]

    def unpack(self, *packed: Tensor) -> Tensor:
        data, scale, shift = packed
        slices = [(data >> offset) & (2**self.bits - 1) for offset in range(0, 8, self.bits)]
        levels = torch.cat(slices)[: self.groups]
        return (scale * levels - shift).reshape(self.shape)


@dataclass(frozen=True)
class NormalFloat(_Unpacking):
    """4 bits a weight that stand for quantiles of a normal distribution, and a largest value per block (QLoRA,
    arXiv:2305.14314)."""

    dtype: torch.dtype
    shape: tuple[int, int]

    def unpack(self, *packed: Tensor) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        data, absmax, code = packed
        blocks = torch.Size((self.shape[0] * self.shape[1] // NF4_BLOCK, NF4_BLOCK))
        state = QuantState(absmax, blocks, code, NF4_BLOCK, "nf4", self.dtype)
        return dequantize_4bit(data, state).reshape(self.shape)


@dataclass(frozen=True)
class TorchaoWeight:
    """A tensor class of torchao, put together for each use; it may also quantise the inputs (int8dq)."""

    kind: Any
    names: tuple[str, ...]
    absent: tuple[str, ...]
    settings: Any
    shape: torch.Size

    def unpack(self, *packed: Tensor) -> Tensor:
        weight: Tensor = self._assemble(packed).dequantize()
        return weight

    def product(self, inputs: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        return functional.linear(inputs, self._assemble(packed), bias)

    def _assemble(self, packed: tuple[Tensor, ...]) -> Any:
        inner = {**dict(zip(self.names, packed, strict=True)), **dict.fromkeys(self.absent)}
        return self.kind.__tensor_unflatten__(inner, self.settings, self.shape, (self.shape[1], 1))


def _pack_quanto(weight: Tensor, kind: str) -> Packed:
    from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qtypes, quantize_weight

    qtype, exact = qtypes[kind], weight.float()  # levels from bf16 quotients would be off by up to a quarter
    if qtype.bits == 8:
        scale = _usable(AbsmaxOptimizer()(exact, qtype=qtype, axis=0), weight.dtype)
        packed = quantize_weight(exact, qtype=qtype, axis=0, scale=scale.float(), optimized=False)
        return ScaledRows(), {"data": packed._data, "scale": scale}
    group = next((size for size in GROUP_SIZES if weight.shape[1] % size == 0), weight.shape[1])
    scale, shift = MaxOptimizer()(exact, qtype=qtype, axis=0, group_size=group)
    scale, shift = _usable(scale, weight.dtype), shift.to(weight.dtype)
    settings = {"qtype": qtype, "axis": 0, "group_size": group, "optimized": False}
    packed = quantize_weight(exact, scale=scale.float(), shift=shift.float(), **settings)
    shape = (weight.shape[0], weight.shape[1])
    format_ = ScaledGroups(qtype.bits, weight.numel() // group, shape)
    return format_, {"data": packed._data._data, "scale": scale, "shift": shift}


def _usable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale in the dtype it is kept in; 1 for rows of nothing but zeros, which would be divided by zero."""
    kept = scale.to(dtype)
    return torch.where(kept == 0, torch.ones_like(kept), kept)


def _pack_bitsandbytes(weight: Tensor, kind: str) -> Packed:
    from bitsandbytes.functional import quantize_4bit

    # In rows of one block each: on a CPU, blocks that reach over the end of a row come out wrong.
    data, state = quantize_4bit(weight.reshape(-1, NF4_BLOCK), blocksize=NF4_BLOCK, quant_type=kind)
    format_ = NormalFloat(weight.dtype, (weight.shape[0], weight.shape[1]))
    return format_, {"data": data, "absmax": state.absmax, "code": state.code}


def _pack_torchao(weight: Tensor, kind: str) -> Packed:
    from torchao import quantization

    carrier = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    carrier.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantization.quantize_(carrier, getattr(quantization, kind)())
    packed: Any = carrier.weight
    listed, settings = packed.__tensor_flatten__()
    tensors = {name: tensor for name in listed if (tensor := getattr(packed, name)) is not None}
    absent = tuple(name for name in listed if name not in tensors)
    kind_of_tensor = type(packed)
    return TorchaoWeight(kind_of_tensor, tuple(tensors), absent, settings, weight.shape), tensors
