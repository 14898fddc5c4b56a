"""Triton int8 matmul with scaling in the epilogue.

`torch._int_mm` writes int32 sums, which a second kernel reads, scales and rounds: ten bytes of traffic per number, of
which two are the result. Here the sums stay in registers. They are exact, and are scaled and rounded in the same order,
so both paths are bit-identical.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Three stages of 128 x 64 bytes per factor fill two thirds of a consumer GPU's shared memory (100 KB). A group of eight
# rows of tiles runs at a time, so that their factors stay in the L2 cache.
TILE = {"rows_of_tile": 128, "columns_of_tile": 128, "depth": 64, "group": 8}
SETTINGS = {**TILE, "num_warps": 8, "num_stages": 3}


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    rows, levels, row_scales, column_scales, out, m, n, k, step_k, step_n,  # noqa: ANN001
    has_columns: tl.constexpr, rows_of_tile: tl.constexpr, columns_of_tile: tl.constexpr, depth: tl.constexpr,
    group: tl.constexpr,
):
    tile, high, wide = tl.program_id(0), tl.cdiv(m, rows_of_tile), tl.cdiv(n, columns_of_tile)
    first = tile // (group * wide) * group
    taken = tl.minimum(high - first, group)
    inside = tile % (group * wide)
    # int64: a long clip has more than 2^31 numbers
    row = ((first + inside % taken) * rows_of_tile + tl.arange(0, rows_of_tile)).to(tl.int64)
    column = ((inside // taken) * columns_of_tile + tl.arange(0, columns_of_tile)).to(tl.int64)
    sums = tl.zeros((rows_of_tile, columns_of_tile), dtype=tl.int32)
    for start in range(0, k, depth):
        inner = start + tl.arange(0, depth)
        one = tl.load(rows + row[:, None] * k + inner[None, :], (row[:, None] < m) & (inner[None, :] < k), 0)
        other = tl.load(levels + inner[:, None] * step_k + column[None, :] * step_n,
                        (inner[:, None] < k) & (column[None, :] < n), 0)
        sums = tl.dot(one, other, sums, out_dtype=tl.int32)
    values = sums.to(tl.float32) * tl.load(row_scales + row, row < m, 0.0)[:, None]
    if has_columns:
        values = values * tl.load(column_scales + column, column < n, 0.0)[None, :]
    tl.store(out + row[:, None] * n + column[None, :], values.to(out.dtype.element_ty),
             (row[:, None] < m) & (column[None, :] < n))
# fmt: on


def scaled_product(rows: Tensor, levels: Tensor, scale: Tensor, columns: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(rows · levels) · scale · columns, M N.

    Args:
        rows: int8 M K, contiguous.
        levels: int8 K N, in any layout.
        scale: float32 M 1.
        columns: float32 1 N, contiguous.
        dtype: dtype of the result.
    """
    (m, k), n = rows.shape, levels.shape[1]
    out = rows.new_empty((m, n), dtype=dtype)
    tiles = triton.cdiv(m, TILE["rows_of_tile"]) * triton.cdiv(n, TILE["columns_of_tile"])
    _kernel[(tiles,)](
        rows, levels, scale, scale if columns is None else columns, out, m, n, k, *levels.stride(),
        has_columns=columns is not None, **SETTINGS,
    )  # fmt: skip
    return out
