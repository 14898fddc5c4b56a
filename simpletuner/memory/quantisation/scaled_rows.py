"""Weights in int8 or float8 with a scale per row, and matmuls in these types (W8A8).

With the weight W[n, k] = s[n] · L[n, k], levels L in int8 or float8 (e4m3) and a scale per output
channel:

    forward:         x[m, k] ≈ a[m] · X[m, k]
                     y[m, n] = a[m] · s[n] · Σ_k X[m, k] · L[n, k]

    input gradient:  g[m, n] · s[n] ≈ b[m] · G[m, n]
                     dx[m, k] = b[m] · Σ_n G[m, n] · L[n, k]

a and b are the largest absolute value of a row (a token), divided by the largest level. In the
backward pass, the weight's scale varies along the summed dimension and cannot be factored out, so
it is folded into the gradient before quantisation. Apart from the rounding of x and g · s, both
matmuls are exactly those of the unpacked weight. int8 sums are exact in int32 for rows of up to
133,000 numbers.

This does not use torchao: its float8 and int8 training keep the weight in bf16 and requantise it
for each matmul and axis, `Int8QuantizedTrainingLinearWeight` unpacks it for the input gradient, and
its inference tensors have no quantised backward pass. As in torchao's row-wise recipe, gradients
are e4m3 too: with scales per row, e5m2's wider range would be unused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from simpletuner.memory.quantisation.formats import WeightFormat

# `torch._int_mm` needs more rows than this on a GPU; on every device, up to this many rows use the
# unpacked weight.
FEW = 16
# `_int_mm` and `_scaled_mm` need sizes that are multiples of 8 or 16.
MULTIPLE = 16
TINY = torch.finfo(torch.float32).tiny


def round_rows(rows: Tensor, fold: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise rows M K, one scale per row.

    Args:
        fold: multiplies the columns before rounding, float32 1 K; None for plain rows.
        dtype: of the levels.

    Returns:
        levels M K, and scales, float32 M 1.
    """
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    folded = rows if fold is None else rows * fold
    norm = torch.linalg.vector_norm(folded, math.inf, -1, keepdim=True, dtype=torch.float32)
    scale = norm.div_(largest).clamp_min_(TINY)
    # float32 also for bf16 rows. `folded` is a copy if there is a fold, so it is divided in place.
    exact = rows / scale if fold is None else folded.div_(scale)
    if dtype is torch.int8:
        exact = exact.round_()  # conversion to float8 rounds, to int8 truncates
    return exact.to(dtype).contiguous(), scale


def multiply(
    rows: Tensor, levels: Tensor, *, fold: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
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
        # The last product rounds into it, without a float32 copy.
        out = torch.empty_like(sums, dtype=rows.dtype)
        if columns is None:
            return torch.mul(sums, scale, out=out)
        return torch.mul(sums * scale, columns, out=out)
    if columns is None:
        columns = scale.new_ones((1, levels.shape[1]))
    # Row-wise scaled kernels write only bf16, and torch 2.11 has none for CPUs.
    if rows.device.type == "cpu":
        out = (rounded.float() @ levels.float()).mul_(scale).mul_(columns).bfloat16()
    else:
        out = torch._scaled_mm(
            rounded,
            levels,
            scale,
            columns,
            out_dtype=torch.bfloat16,
            # Sums have fewer bits on Ada and Hopper, which is too few for gradients; only these
            # have a fold.
            use_fast_accum=fold is None,
        )
    return out.to(rows.dtype)


def can_multiply(rows: Tensor, levels: Tensor) -> bool:
    """Whether the GPU operations support rows (..., K) and levels of these sizes."""
    if math.prod(rows.shape[:-1]) <= FEW:
        return False
    return all(side % MULTIPLE == 0 for side in levels.shape)


@dataclass(frozen=True)
class ScaledRows(WeightFormat):
    """One byte per weight, int8 or float8, and one scale per row: w = scale · level.

    It also replaces torchao's int8dq matmul, which formats a tensor in every call and so
    synchronises with the GPU, and fails for few rows when compiled. torchao rounds inputs in steps
    of 1/127.5 of a row's largest value and clips that value; here the steps are 1/127.

    Attributes:
        dtype: dtype of the unpacked weight; by default that of the scales.
        rounds_inputs, rounds_gradients: quantise inputs or gradients to the type of the weight and
            multiply in it; otherwise unpack the weight.
    """

    dtype: torch.dtype | None = None
    rounds_inputs: bool = False
    rounds_gradients: bool = False

    def unpack(self, *packed: Tensor) -> Tensor:
        levels, scale = packed
        if levels.is_floating_point():  # multiplication promotes integers but not float8
            levels = levels.to(scale.dtype)
        weight = levels * scale
        return weight if self.dtype is None else weight.to(self.dtype)

    def product(self, inputs: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        levels, scale = packed
        if not self.rounds_inputs or not can_multiply(inputs, levels):
            return super().product(inputs, bias, *packed)
        rows = inputs.flatten(0, -2)
        columns = scale.float().t()
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
