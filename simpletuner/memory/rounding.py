"""Matrix products in the bits of a quantised weight (W8A8): activations and gradients are quantised as well.

With the weight W[n, k] = s[n] · L[n, k], levels L in int8 or float8 (e4m3) and a scale per output channel:

    forward          x[m, k] ≈ a[m] · X[m, k]            y[m, n] = a[m] · s[n] · Σ_k X[m, k] · L[n, k]
    input gradient   g[m, n] · s[n] ≈ b[m] · G[m, n]     dx[m, k] = b[m] · Σ_n G[m, n] · L[n, k]

a and b are the largest absolute values of a row (a token), divided by the largest level. In the backward pass the
weight's scale lies along the sum and cannot be taken out of it, so it is folded into the gradient before that is
quantised: apart from the rounding of x and g · s, both products are exactly those of the unpacked weight. int8 sums
are exact in int32 for rows of up to 133,000 numbers.

Own code rather than torchao's: its float8 and int8 training keep the weight in bf16 and quantise it anew for each
product and axis, `Int8QuantizedTrainingLinearWeight` unpacks it for the input gradient, and the inference tensors have
no quantised backward pass. As in its row-wise recipe, gradients are e4m3, too: scales per row leave e5m2's wider range
unused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# `torch._int_mm` needs more rows than this on a GPU; on any device, fewer rows use the unpacked weight.
FEW = 16
# Both operations need sizes that are multiples of 8 or 16.
MULTIPLE = 16
TINY = torch.finfo(torch.float32).tiny


def round_rows(rows: Tensor, fold: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows M K, times a scale per column if there is one, as levels of a dtype and their scales, float32 M 1."""
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    folded = rows if fold is None else rows * fold
    norm = torch.linalg.vector_norm(folded, math.inf, -1, keepdim=True, dtype=torch.float32)
    scale = norm.div_(largest).clamp_min_(TINY)
    exact = rows / scale if fold is None else folded.div_(scale)  # float32 for bf16 rows too, without a copy of them
    return (exact.round_() if dtype is torch.int8 else exact).to(dtype).contiguous(), scale


def multiply(rows: Tensor, levels: Tensor, *, fold: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
    """Rounded rows times levels: M N, in the dtype of `rows`.

    Args:
        rows: M K.
        levels: K N, column-major as the kernels on a GPU want it.
        fold: float32 1 K, multiplied to the rows before rounding.
        columns: float32 1 N, multiplied to the result.
    """
    rounded, scale = round_rows(rows, fold, levels.dtype)
    if levels.dtype is torch.int8:
        sums = torch._int_mm(rounded, levels)
        out = torch.empty_like(sums, dtype=rows.dtype)  # the last product rounds to it, without a float32 copy
        return torch.mul(sums, scale, out=out) if columns is None else torch.mul(sums * scale, columns, out=out)
    if columns is None:
        columns = scale.new_ones((1, levels.shape[1]))
    # Kernels with scales per row write bf16 only; on a CPU torch 2.11 has none.
    if rows.device.type == "cpu":
        out = (rounded.float() @ levels.float()).mul_(scale).mul_(columns).bfloat16()
    else:
        # Fast accumulation in tensor-core registers has fewer bits on Ada and Hopper; gradients use all bits.
        quick, dtype = fold is None, torch.bfloat16
        out = torch._scaled_mm(rounded, levels, scale, columns, out_dtype=dtype, use_fast_accum=quick)
    return out.to(rows.dtype)


def can_multiply(rows: Tensor, levels: Tensor) -> bool:
    """Whether the operations on a GPU take rows (..., K) and levels of these sizes."""
    return math.prod(rows.shape[:-1]) > FEW and not any(side % MULTIPLE for side in levels.shape)
