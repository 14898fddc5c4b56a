"""The order in which tokens of pictures pass through the visual blocks, and what a block is told about each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.models.adapter import TokenStream
from simpletuner.models.kandinsky5.nabla import TILE, TILE_SIDE, is_sparse

# Positional arguments of a visual block, after the tokens, the text and the time embedding.
ROPE, SPARSE_PARAMS = 3, 4


def token_stream(transformer: nn.Module) -> TokenStream:
    """The visual blocks. With NABLA the tokens of a tile lie in a row and stay together."""
    model: Any = transformer
    tiled = is_sparse(model.config)
    return TokenStream(
        blocks=list(model.visual_transformer_blocks),
        unit=TILE if tiled else 1,
        order=tile_order if tiled else raster_order,
        tables={ROPE: cut_rope, SPARSE_PARAMS: cut_window},
    )


def raster_order(frames: int, rows: int, columns: int) -> Tensor:
    """Frame by frame, row by row."""
    return torch.arange(frames * rows * columns)


def tile_order(frames: int, rows: int, columns: int) -> Tensor:
    """Frame by frame, tile by tile, and row by row within a tile."""
    grid = raster_order(frames, rows, columns)
    return grid.view(frames, rows // TILE_SIDE, TILE_SIDE, columns // TILE_SIDE, TILE_SIDE).transpose(2, 3).flatten()


def cut_rope(rope: Tensor, kept: Tensor) -> Tensor:
    """The rotations of the kept tokens: `B K 1 D/2 2 2` from `B S 1 D/2 2 2`, or from `1 S ...`."""
    samples = torch.arange(len(kept), device=kept.device)[:, None]
    return rope.expand(len(kept), *rope.shape[1:])[samples, kept]


def cut_window(params: dict[str, Any] | None, kept: Tensor) -> dict[str, Any] | None:
    """Parameters of block-sparse attention whose window, `1 1 N N`, is cut to the kept tiles, `B 1 n n`."""
    if params is None:
        return None
    tiles = kept[:, ::TILE] // TILE
    window = params["sta_mask"][0, 0][tiles[:, :, None], tiles[:, None, :]]
    return {**params, "sta_mask": window[:, None]}
