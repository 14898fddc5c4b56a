"""Weights as torchao quantises them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.memory.quantisation.formats import Packed, WeightFormat
from simpletuner.memory.quantisation.scaled_rows import ScaledRows


@dataclass(frozen=True)
class TorchaoWeight(WeightFormat):
    """A torchao tensor subclass, reassembled at every use.

    Attributes:
        kind: the subclass.
        names: its inner tensors, in the order of the packed ones.
        absent: inner tensors that are None.
        settings: the rest of what `__tensor_flatten__` returns.
        shape: of the weight.
    """

    kind: Any
    names: tuple[str, ...]
    absent: tuple[str, ...]
    settings: Any
    shape: torch.Size

    def unpack(self, *packed: Tensor) -> Tensor:
        return self._assemble(packed).dequantize()

    def product(self, inputs: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self._assemble(packed), bias)

    def _assemble(self, packed: tuple[Tensor, ...]) -> Any:
        inner = {**dict(zip(self.names, packed, strict=True)), **dict.fromkeys(self.absent)}
        return self.kind.__tensor_unflatten__(inner, self.settings, self.shape, (self.shape[1], 1))


def pack_torchao(weight: Tensor, kind: str) -> Packed:
    """Quantise a weight by the torchao config of this name."""
    from torchao import quantization

    # torchao quantises only modules; on `meta`, this module allocates nothing.
    carrier = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    carrier.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantization.quantize_(carrier, getattr(quantization, kind)())
    packed: Any = carrier.weight
    if kind == "Int8DynamicActivationInt8WeightConfig":
        scaled_rows = ScaledRows(weight.dtype, rounds_inputs=True)
        return scaled_rows, {"data": packed.qdata, "scale": packed.scale}
    listed, settings = packed.__tensor_flatten__()
    inner = {name: getattr(packed, name) for name in listed}
    tensors = {name: tensor for name, tensor in inner.items() if tensor is not None}
    absent = tuple(name for name, tensor in inner.items() if tensor is None)
    format_ = TorchaoWeight(type(packed), tuple(tensors), absent, settings, weight.shape)
    return format_, tensors
