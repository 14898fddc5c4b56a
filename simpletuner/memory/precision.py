"""Dtypes by config name, quantised frozen linear layers, and W8A8 matmuls with their quantised weights.

A library computes levels and scales once, when weights are loaded. `QuantisedLinear` stores them as plain buffers, so
they can be moved, streamed, compiled and saved like any tensor.

With the weight W[n, k] = s[n] · L[n, k], levels L in int8 or float8 (e4m3) and a scale per output channel:

    forward          x[m, k] ≈ a[m] · X[m, k]            y[m, n] = a[m] · s[n] · Σ_k X[m, k] · L[n, k]
    input gradient   g[m, n] · s[n] ≈ b[m] · G[m, n]     dx[m, k] = b[m] · Σ_n G[m, n] · L[n, k]

a and b are the largest absolute value of a row (a token), divided by the largest level. In the backward pass, the
weight's scale varies along the summed dimension and cannot be factored out, so it is folded into the gradient before
quantisation. Apart from the rounding of x and g · s, both matmuls are exactly those of the unpacked weight. int8 sums
are exact in int32 for rows of up to 133,000 numbers.

This does not use torchao: its float8 and int8 training keep the weight in bf16 and requantise it for each matmul and
axis, `Int8QuantizedTrainingLinearWeight` unpacks it for the input gradient, and its inference tensors have no quantised
backward pass. As in torchao's row-wise recipe, gradients are e4m3 too: with scales per row, e5m2's wider range would be
unused.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from simpletuner.config.precision import UNPACKED, Quantisation, check_capability, instead, multiplied
from simpletuner.config.schema import PrecisionConfig
from simpletuner.errors import ConfigError, Problem, shorten
from simpletuner.memory.heap import trim_heap
from simpletuner.models.blocks import DEVICE_FAILURES

# `torch._int_mm` needs more rows than this on a GPU; on every device, up to this many rows use the unpacked weight.
FEW = 16
# `_int_mm` and `_scaled_mm` need sizes that are multiples of 8 or 16.
MULTIPLE = 16
TINY = torch.finfo(torch.float32).tiny


def round_rows(rows: Tensor, fold: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise rows M K, multiplied by `fold` per column if set: levels of a dtype, and scales, float32 M 1."""
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    folded = rows if fold is None else rows * fold
    norm = torch.linalg.vector_norm(folded, math.inf, -1, keepdim=True, dtype=torch.float32)
    scale = norm.div_(largest).clamp_min_(TINY)
    exact = rows / scale if fold is None else folded.div_(scale)  # float32 even for bf16 rows, without copying them
    return (exact.round_() if dtype is torch.int8 else exact).to(dtype).contiguous(), scale


def multiply(rows: Tensor, levels: Tensor, *, fold: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
    """Quantised rows times levels: M N, in the dtype of `rows`.

    Args:
        rows: M K.
        levels: K N, column-major as the GPU kernels require.
        fold: float32 1 K, multiplies the rows before rounding.
        columns: float32 1 N, multiplies the result.
    """
    rounded, scale = round_rows(rows, fold, levels.dtype)
    if levels.dtype is torch.int8:
        sums = torch._int_mm(rounded, levels)
        out = torch.empty_like(sums, dtype=rows.dtype)  # the last product rounds into it, without a float32 copy
        return torch.mul(sums, scale, out=out) if columns is None else torch.mul(sums * scale, columns, out=out)
    if columns is None:
        columns = scale.new_ones((1, levels.shape[1]))
    # Row-wise scaled kernels write only bf16, and torch 2.11 has none for CPUs.
    if rows.device.type == "cpu":
        out = (rounded.float() @ levels.float()).mul_(scale).mul_(columns).bfloat16()
    else:
        # Fast accumulation has fewer bits on Ada and Hopper; gradients use full precision.
        quick, dtype = fold is None, torch.bfloat16
        out = torch._scaled_mm(rounded, levels, scale, columns, out_dtype=dtype, use_fast_accum=quick)
    return out.to(rows.dtype)


def can_multiply(rows: Tensor, levels: Tensor) -> bool:
    """Whether the GPU operations support rows (..., K) and levels of these sizes."""
    return math.prod(rows.shape[:-1]) > FEW and not any(side % MULTIPLE for side in levels.shape)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Weights per scale below 8 bits: the first size that divides the row.
GROUP_SIZES = (128, 96, 64, 32)
NF4_BLOCK = 64  # weights per scale, as in QLoRA


class WeightFormat(Protocol):
    """Computes with the tensors of a packed weight `out in`."""

    def unpack(self, *packed: Tensor) -> Tensor:
        """The weight `out in` in the compute dtype."""

    def product(self, inputs: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        """`inputs` (..., in) times the weight plus the bias: (..., out)."""
        return nn.functional.linear(inputs, self.unpack(*packed), bias)

    def input_gradient(self, gradient: Tensor, *packed: Tensor) -> Tensor:
        """The gradient of the inputs (..., in) for the gradient of the product (..., out)."""
        return gradient @ self.unpack(*packed)


Packed = tuple[WeightFormat, Mapping[str, Tensor]]


def pack(weight: Tensor, quantisation: Quantisation) -> Packed:
    """Pack a weight `out in`: its format, and its tensors by name, in the format's order.

    Scales and unpacked weights have the weight's dtype.
    """
    packers = {"quanto": _pack_quanto, "torchao": _pack_torchao, "bnb": _pack_bitsandbytes}
    with torch.no_grad():
        return packers[quantisation.library](weight.detach(), quantisation.kind)


@dataclass(frozen=True)
class ScaledRows(WeightFormat):
    """One byte per weight, int8 or float8, and one scale per row: w = scale · level.

    It also replaces torchao's int8dq matmul, which formats a tensor in every call and so synchronises with the GPU, and
    fails for few rows when compiled. torchao rounds inputs in steps of 1/127.5 of a row's largest value and clips that
    value; here the steps are 1/127.

    Attributes:
        dtype: dtype of the unpacked weight; by default that of the scales.
        rounds_inputs, rounds_gradients: quantise inputs or gradients to the type of the weight and multiply in it;
            otherwise unpack the weight.
    """

    dtype: torch.dtype | None = None
    rounds_inputs: bool = False
    rounds_gradients: bool = False

    def unpack(self, *packed: Tensor) -> Tensor:
        levels, scale = packed
        # Multiplication promotes integers but not float8.
        weight = (levels.to(scale.dtype) if levels.is_floating_point() else levels) * scale
        return weight if self.dtype is None else weight.to(self.dtype)

    def product(self, inputs: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        levels, scale = packed
        if not self.rounds_inputs or not can_multiply(inputs, levels):
            return super().product(inputs, bias, *packed)
        rows, columns = inputs.flatten(0, -2), scale.float().t()
        out = multiply(rows, levels.t(), columns=columns).unflatten(0, inputs.shape[:-1])
        return out if bias is None else out + bias

    def input_gradient(self, gradient: Tensor, *packed: Tensor) -> Tensor:
        levels, scale = packed
        if not self.rounds_gradients or not can_multiply(gradient, levels):
            return super().input_gradient(gradient, *packed)
        # The copy makes it column-major, at one byte per weight.
        columns = levels.t().contiguous().t()
        inputs = multiply(gradient.flatten(0, -2), columns, fold=scale.float().t())
        return inputs.unflatten(0, gradient.shape[:-1])


@dataclass(frozen=True)
class ScaledGroups(WeightFormat):
    """2 or 4 bits per weight, and a scale and shift per group: w = scale · level - shift.

    Groups are packed in slices: byte row i holds group i in its lowest bits, then group i of the next slice.
    """

    bits: int
    groups: int
    shape: tuple[int, int]

    def unpack(self, *packed: Tensor) -> Tensor:
        data, scale, shift = packed
        slices = [(data >> offset) & (2**self.bits - 1) for offset in range(0, 8, self.bits)]
        return (scale * torch.cat(slices)[: self.groups] - shift).reshape(self.shape)


@dataclass(frozen=True)
class NormalFloat(WeightFormat):
    """NF4 (QLoRA, arXiv:2305.14314): 4 bits per weight, an index into quantiles of a normal distribution, and the
    largest absolute value of each block."""

    dtype: torch.dtype
    shape: tuple[int, int]

    def unpack(self, *packed: Tensor) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        data, absmax, code = packed
        blocks = torch.Size((self.shape[0] * self.shape[1] // NF4_BLOCK, NF4_BLOCK))
        state = QuantState(absmax, blocks, code, NF4_BLOCK, "nf4", self.dtype)
        return dequantize_4bit(data, state).reshape(self.shape)


@dataclass(frozen=True)
class TorchaoWeight(WeightFormat):
    """A torchao tensor subclass, reassembled at every use."""

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


def _pack_quanto(weight: Tensor, kind: str) -> Packed:
    from optimum.quanto import AbsmaxOptimizer, MaxOptimizer, qtypes, quantize_weight

    qtype, exact = qtypes[kind], weight.float()  # in bf16, levels would be off by up to a quarter
    if qtype.bits == 8:
        scale = _usable(AbsmaxOptimizer()(exact, qtype=qtype, axis=0), weight.dtype)
        packed = quantize_weight(exact, qtype=qtype, axis=0, scale=scale.float(), optimized=False)
        return ScaledRows(), {"data": packed._data, "scale": scale}
    group = next((size for size in GROUP_SIZES if weight.shape[1] % size == 0), weight.shape[1])
    scale, shift = MaxOptimizer()(exact, qtype=qtype, axis=0, group_size=group)
    scale, shift = _usable(scale, weight.dtype), shift.to(weight.dtype)
    settings = {"qtype": qtype, "axis": 0, "group_size": group, "optimized": False}
    packed = quantize_weight(exact, scale=scale.float(), shift=shift.float(), **settings)
    format_ = ScaledGroups(qtype.bits, weight.numel() // group, (weight.shape[0], weight.shape[1]))
    return format_, {"data": packed._data._data, "scale": scale, "shift": shift}


def _usable(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale in the stored dtype; 1 for rows of zeros, to avoid division by zero."""
    kept = scale.to(dtype)
    return torch.where(kept == 0, torch.ones_like(kept), kept)


def _pack_bitsandbytes(weight: Tensor, kind: str) -> Packed:
    from bitsandbytes.functional import quantize_4bit

    # One block per row: on a CPU, blocks that span two rows give wrong results.
    data, state = quantize_4bit(weight.reshape(-1, NF4_BLOCK), blocksize=NF4_BLOCK, quant_type=kind)
    format_ = NormalFloat(weight.dtype, (weight.shape[0], weight.shape[1]))
    return format_, {"data": data, "absmax": state.absmax, "code": state.code}


def _pack_torchao(weight: Tensor, kind: str) -> Packed:
    from torchao import quantization

    # torchao quantises only modules; on `meta`, this module allocates nothing.
    carrier = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    carrier.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantization.quantize_(carrier, getattr(quantization, kind)())
    packed: Any = carrier.weight
    if kind == "Int8DynamicActivationInt8WeightConfig":
        return ScaledRows(weight.dtype, rounds_inputs=True), {"data": packed.qdata, "scale": packed.scale}
    listed, settings = packed.__tensor_flatten__()
    tensors = {name: tensor for name in listed if (tensor := getattr(packed, name)) is not None}
    absent = tuple(name for name in listed if name not in tensors)
    return TorchaoWeight(type(packed), tuple(tensors), absent, settings, weight.shape), tensors


Via = Literal["cpu", "accelerator", "pipeline"]


class FrozenProduct(torch.autograd.Function):
    """Matmul with a packed weight. The backward pass unpacks it again, so autograd saves no unpacked weight."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor | None, form: WeightFormat, *packed: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(*packed)
        return form.product(inputs, bias, *packed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        packed = ctx.saved_tensors
        inputs = ctx.form.input_gradient(gradient, *packed) if ctx.needs_input_grad[0] else None
        return (inputs, None, None, *(None for _ in packed))


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight is packed into buffers named `packed_...`; supports adapters as usual."""

    def __init__(self, layer: nn.Linear, packed: Packed) -> None:
        nn.Module.__init__(self)  # nn.Linear would allocate a full-size weight
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
        """The weight `out in`, unpacked at each access; read by DoRA, and by peft when it adds adapters."""
        return self.form.unpack(*self.packed)

    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.requires_grad:  # torch 2.11 cannot compile a function whose inputs have no gradient
            return self.form.product(inputs, self.bias, *self.packed)
        return FrozenProduct.apply(inputs, self.bias, self.form, *self.packed)


def quantise(
    model: nn.Module, layers: str, quantisation: Quantisation, *, via: Via = "cpu", accelerator: torch.device,
    within: Sequence[nn.Module] = (),
) -> None:  # fmt: skip
    """Replace linear layers of a model with quantised layers, in place and on the same device.

    Args:
        layers: regular expression that must match the full dotted path of a layer.
        within: quantise only layers in these modules; by default in the whole model.
        via: device of the packing, with equal results: the CPU, or the accelerator, one block (`accelerator`) or one
            layer (`pipeline`) at a time.

    Raises:
        RuntimeError: the expression matches no linear layer.
    """
    chosen = dict(linear_layers(model, layers))
    if not chosen:
        raise RuntimeError(f"no linear layer of {type(model).__name__} matches {layers!r}")
    device = torch.device("cpu") if via == "cpu" else accelerator
    # Layers from an earlier call are already packed.
    inside = {module for part in within or [model] for module in part.modules() if type(module) is not QuantisedLinear}
    for _, block in groupby((name for name, layer in chosen.items() if layer in inside), key=block_of):
        for _, group in groupby(block, key=block_of if via == "accelerator" else str):
            _quantise_together(model, list(group), quantisation, device)
        trim_heap()


def linear_layers(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers with a matching path, in the order of the model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and re.fullmatch(layers, name):
            yield name, module


def block_of(name: str) -> str:
    """The repeated block that contains a module: its path up to the first number."""
    return re.match(r"(.*?\.\d+)?", name).group()  # type: ignore[union-attr]


def _quantise_together(model: nn.Module, names: list[str], quantisation: Quantisation, device: torch.device) -> None:
    """Pack layers on a device, and move the results back to the device of each layer."""
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    weights = {name: layer.weight.detach().to(device, non_blocking=True) for name, layer in layers.items()}
    for name, layer in layers.items():
        home = layer.weight.device
        form, tensors = pack(weights.pop(name), quantisation)
        packed = {key: tensor.to(home).contiguous() for key, tensor in tensors.items()}
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_module(attribute, QuantisedLinear(layer, (form, packed)))


logger = logging.getLogger(__name__)


def check_device(config: PrecisionConfig, device: torch.device) -> None:
    """Check that the device supports the operations; a CPU does, slowly.

    Raises:
        ConfigError: the device does not support them.
    """
    if problems := [*_lacking(config, device)]:
        raise ConfigError(problems)


def _lacking(config: PrecisionConfig, device: torch.device) -> Iterator[Problem]:
    """Report the GPU vendor or its compute capability, and only if both are sufficient, operations that fail."""
    if device.type == "cpu":
        return
    quantisations = multiplied(config)
    is_rocm = device.type == "cuda" and torch.version.hip
    if is_rocm or device.type != "cuda":
        name = "ROCm" if is_rocm else device.type
        for key, stored in quantisations.items():
            remedy = UNPACKED if stored.always else "false"
            yield Problem(key, f"needs an NVIDIA GPU, not {name}; set it to {remedy}.")
        return
    problems = list(check_capability(config, torch.cuda.get_device_capability(device)))
    if problems:
        yield from problems
        return
    for key, stored in quantisations.items():
        reason = refusal(stored, device)
        if reason:
            yield Problem(key, f"{stored.name} {reason}")


def refusal(stored: Quantisation, device: torch.device) -> str:
    """Why a small matmul with these weights fails on a device; empty if it works.

    The compute capability is not sufficient: torch 2.10 refuses row-wise scaled fp8 on 12.0 (pytorch #192707).
    """
    dtype = torch.float8_e4m3fn if "float8" in stored.kind else torch.int8
    levels = torch.zeros(2 * MULTIPLE, 2 * MULTIPLE, dtype=dtype, device=device).t()
    try:
        multiply(torch.zeros(2 * MULTIPLE, 2 * MULTIPLE, dtype=torch.bfloat16, device=device), levels)
    except DEVICE_FAILURES:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        return f"cannot be multiplied by this torch on this GPU ({reason}). {instead(stored)}"
    return ""


def use_quantised_products(model: nn.Module) -> None:
    """Let quantised layers multiply without unpacking their weights, except for layers of unsupported sizes."""
    odd: list[str] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantisedLinear):
            continue
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            odd.append(name)
        else:
            layer.form = ScaledRows(rounds_inputs=True, rounds_gradients=True)
    if odd:
        message = "quantized_matmul: %s are multiplied unpacked, since their sizes are not multiples of %d."
        logger.info(message, shorten(odd), MULTIPLE)
