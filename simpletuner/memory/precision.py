"""Dtypes by the names that the configuration uses, and frozen linear layers with weights in few bits.

A library chooses levels and scales once, when the weights are loaded. They then lie in plain buffers of
`QuantisedLinear`, which can be moved, streamed, compiled and saved like any other tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from simpletuner.config.precision import Quantisation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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


Via = Literal["cpu", "accelerator", "pipeline"]


class FrozenProduct(torch.autograd.Function):
    """Inputs times a packed weight. The backward pass unpacks it again: an unpacked one is never kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor | None, form: WeightFormat, *packed: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(*packed)
        return form.product(inputs, bias, *packed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        packed = ctx.saved_tensors
        inputs = gradient @ ctx.form.unpack(*packed) if ctx.needs_input_grad[0] else None
        return (inputs, None, None, *(None for _ in packed))


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight is packed into buffers named `packed_...`; adapters go beside it as usual."""

    def __init__(self, layer: nn.Linear, packed: Packed) -> None:
        nn.Module.__init__(self)  # nn.Linear would make a weight of full size
        self.in_features, self.out_features = layer.in_features, layer.out_features
        bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)
        self.form, tensors = packed
        self.names = tuple(f"packed_{name}" for name in tensors)
        for name, tensor in zip(self.names, tensors.values(), strict=True):
            self.register_buffer(name, tensor)

    @property
    def packed(self) -> tuple[Tensor, ...]:
        """The buffers, in the order of the format."""
        return tuple(self.get_buffer(name) for name in self.names)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight `out in`, made anew for whoever asks: adapters, when they are added, and DoRA."""
        return self.form.unpack(*self.packed)

    def forward(self, inputs: Tensor) -> Tensor:
        product: Tensor = FrozenProduct.apply(inputs, self.bias, self.form, *self.packed)
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={type(self.form).__name__}"


def quantise(
    model: nn.Module, layers: str, quantisation: Quantisation, *, via: Via = "cpu", accelerator: torch.device
) -> None:
    """Replace linear layers of a model by quantised ones, in place and where they are.

    Args:
        layers: regular expression that the whole dotted path of a layer must match.
        via: where weights are packed; the result is the same. `accelerator` brings one block at a time there,
            `pipeline` a single layer, `cpu` none.

    Raises:
        RuntimeError: the expression matches no linear layer.
    """
    chosen = [name for name, _ in linear_layers(model, layers)]
    if not chosen:
        raise RuntimeError(f"no linear layer of {type(model).__name__} matches {layers!r}")
    device = torch.device("cpu") if via == "cpu" else accelerator
    for _, group in groupby(chosen, key=block_of if via == "accelerator" else str):
        _quantise_together(model, list(group), quantisation, device)


def linear_layers(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers whose path matches, in the order of the model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and re.fullmatch(layers, name):
            yield name, module


def block_of(name: str) -> str:
    """The repeated block that a module is in: its path up to the first number."""
    return re.match(r"(.*?\.\d+)?", name).group()  # type: ignore[union-attr]


def _quantise_together(model: nn.Module, names: list[str], quantisation: Quantisation, device: torch.device) -> None:
    """Pack some layers on a device and put the results where the layers were."""
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    weights = {name: layer.weight.detach().to(device, non_blocking=True) for name, layer in layers.items()}
    for name, layer in layers.items():
        home = layer.weight.device
        form, tensors = pack(weights.pop(name), quantisation)
        packed = {key: tensor.to(home).contiguous() for key, tensor in tensors.items()}
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_module(attribute, QuantisedLinear(layer, (form, packed)))
