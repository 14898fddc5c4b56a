"""NABLA, Kandinsky's block-sparse attention, for training.

Tokens are grouped in tiles of 64, 8 x 8 tokens of one frame, which are consecutive in the sequence
(the "fractal" order). Attention between all pairs of tokens would be quadratic in a clip's length,
so it is decided tile by tile what a query sees:

1. The mean query and the mean key of every tile give a coarse map of scores, with 1 / 64² as many
   entries as there are pairs of tokens.
2. In each row of the map, the tiles with the highest scores are kept until they hold most of the
   softmax's mass.
3. A window of neighbouring tiles in time, height and width is always kept (STA, "sliding tile
   attention").

`tile_mask` makes these three steps as the stock processor does; `tile_attention` computes attention
over the result, with lists of blocks (`flex`) or with masks. Source: Mikhailov et al., "NABLA:
Neighborhood Adaptive Block-Level Attention", arXiv 2507.13546.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.models.adapter import TileCounts
from simpletuner.models.kandinsky5.blocks import Kernel, replace_attention
from simpletuner.models.kandinsky5.flex import Attend, exempt, in_parts
from simpletuner.models.kandinsky5.options import TILE, TILE_SIDE
from simpletuner.models.kandinsky5.tile_attention import choose_attend

# Settings of the checkpoint that the stock processor reads, without their prefix `attention_`: P is
# the kept mass, wT, wW and wH are the sides of the window in tiles.
COPIED = ("P", "wT", "wW", "wH", "add_sta", "method")


def window_mask(
    frames: int, rows: int, columns: int, config: dict[str, Any], device: torch.device | None = None
) -> Tensor:
    """The window of visible tiles, by distance in time, height and width: bool, `1 1 N N`.

    N is the number of tiles, frames x rows x columns.

    Args:
        rows, columns: tiles per frame: latent height and width divided by 16.
        device: where the mask is created; copying it there would synchronise with the device.
    """
    axes = {"attention_wT": frames, "attention_wH": rows, "attention_wW": columns}
    mask = torch.ones((1, 1), dtype=torch.bool, device=device)
    for key, count in axes.items():
        position = torch.arange(count, device=device)
        is_near = (position[:, None] - position).abs() <= config[key] // 2
        # A pair of tiles is in the window if it is near along every axis. The Kronecker product of
        # the axes' masks is this `and` for all pairs: its rows and columns are in raster order,
        # where the last axis varies fastest, as are the tiles.
        mask = torch.kron(mask, is_near)
    return mask[None, None]


def sparse_params(
    latents_shape: tuple[int, ...], config: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """The `sparse_params` of the stock pipelines for latents of shape `B F H W C`."""
    _, frames, height, width, _ = latents_shape
    rows = height // 2  # of tokens, which are patches of 2 x 2 latent positions
    columns = width // 2
    copied = {name: config[f"attention_{name}"] for name in COPIED}
    return {
        **copied,
        "attention_type": config["attention_type"],
        "sta_mask": window_mask(frames, rows // TILE_SIDE, columns // TILE_SIDE, config, device),
        "to_fractal": True,
        "visual_shape": (frames, rows, columns),
    }


@exempt()
def tile_mask(query: Tensor, key: Tensor, window: Tensor, mass: float) -> Tensor:
    """Which key tiles each query tile attends to: bool, `B H N N`, from `B S H D`.

    Args:
        window: tiles that are always visible; see `window_mask`.
        mass: share of the softmax over tile means that the kept tiles hold at least.
    """
    query_means = _tile_means(query)
    key_means = _tile_means(key)
    products = query_means @ key_means.transpose(-2, -1)  # B H N N
    kept = torch.empty(products.shape, dtype=torch.bool, device=products.device)
    for part, chosen in in_parts(products, kept):
        scores = torch.softmax(part / math.sqrt(query.shape[-1]), dim=-1)
        _keep_mass(scores, mass, chosen)
    return kept.logical_or_(window)


def _keep_mass(scores: Tensor, mass: float, kept: Tensor) -> None:
    """Write to `kept` which scores, the highest of each row, hold most of its mass."""
    # Dropped are the lowest scores, as long as their sum stays below 1 - mass. `values` ascend,
    # so the first True of `is_kept` is the lowest score that is kept.
    values, order = scores.sort(-1)
    is_kept = values.cumsum(-1) >= 1 - mass
    # Entry i of a row of `is_kept` is about the tile `order[i]`: back to the order of the tiles.
    kept.scatter_(-1, order, is_kept)


def _tile_means(x: Tensor) -> Tensor:
    """Means over the tokens of each tile: `B H N D` from `B S H D`."""
    return x.transpose(1, 2).unflatten(2, (-1, TILE)).mean(-2)


class TileAttention:
    """Sparse attention of a transformer, shared by its processors."""

    def __init__(self) -> None:
        # By number of heads: with sequence parallelism, training has fewer heads than previews.
        self._attend: dict[int, Attend] = {}
        self._visible: TileCounts = {}

    def prepare(self, device: torch.device, dtype: torch.dtype, head_dim: int, heads: int) -> None:
        """Choose an implementation before the first step.

        Inside a block, compilation and checkpointing would trace the self-test.
        """
        self._attend[heads] = choose_attend(device, dtype, head_dim, heads)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, params: dict[str, Any]) -> Tensor:
        """Attention of `B S H D` queries to the tiles chosen for them; `B S H D`."""
        _, tokens, heads, head_dim = query.shape
        if heads not in self._attend:  # pipelines do not call `prepare`
            self.prepare(query.device, query.dtype, head_dim, heads)
        with torch.no_grad():  # the choice of tiles has no gradient
            tiles = tile_mask(query, key, params["sta_mask"], params["P"])
        if torch.is_grad_enabled():
            # On the device, since reading the number would synchronise.
            visible, pairs = self._visible.get(tokens, (0, 0))
            self._visible[tokens] = visible + tiles.sum(), pairs + tiles.numel()
        attend: Any = self._attend[heads]
        return attend(query, key, value, tiles)

    def take_counts(self) -> TileCounts:
        """The tiles of the forward passes with gradients since the last call."""
        counts = self._visible
        self._visible = {}
        return counts

    def kernel(self, params: dict[str, Any] | None) -> Kernel | None:
        """The attention of a step with these `sparse_params`; None without, where it is dense."""
        if params is None:
            return None
        return partial(self, params=params)


def install(transformer: nn.Module) -> TileAttention:
    """Let the visual self-attentions attend to NABLA's tiles; returns what they share."""
    attention = TileAttention()
    replace_attention(transformer, attention.kernel, is_visual)
    return attention


def is_visual(name: str) -> bool:
    """Whether a module is the self-attention of a visual block."""
    return name.endswith("self_attention") and "visual" in name
