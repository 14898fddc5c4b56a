"""NABLA, Kandinsky's block-sparse attention, for training.

Queries and keys are grouped in tiles of 64 tokens. Each tile of queries attends to the tiles of
keys selected by a coarse map of averaged scores, and to a window around itself.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.models.adapter import TileCounts
from simpletuner.models.kandinsky5.blocks import Kernel, replace_attention
from simpletuner.models.kandinsky5.flex import Attend, exempt
from simpletuner.models.kandinsky5.options import TILE, TILE_SIDE
from simpletuner.models.kandinsky5.tile_attention import choose_attend

# Settings of the checkpoint that the stock processor reads, without their prefix `attention_`.
COPIED = ("P", "wT", "wW", "wH", "add_sta", "method")


def window_mask(
    frames: int, rows: int, columns: int, config: dict[str, Any], device: torch.device | None = None
) -> Tensor:
    """The window of visible tiles, by distance in time, height and width: bool, `1 1 N N`, N tiles.

    Args:
        rows, columns: tiles per frame: latent height and width divided by 16.
        device: where the mask is created; copying it there would synchronise with the device.
    """
    axes = {"attention_wT": frames, "attention_wH": rows, "attention_wW": columns}
    mask = torch.ones((1, 1), dtype=torch.bool, device=device)
    for key, count in axes.items():
        place = torch.arange(count, device=device)
        is_near = (place[:, None] - place).abs() <= config[key] // 2
        # A pair of tiles is in the window if it is near along every axis. Tiles are in raster
        # order, where the last axis varies fastest, as in a Kronecker product.
        mask = torch.kron(mask, is_near)
    return mask[None, None]


def sparse_params(
    latents_shape: tuple[int, ...], config: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """The `sparse_params` of the stock pipelines for latents of shape `B F H W C`."""
    _, frames, height, width, _ = latents_shape
    rows = height // 2
    columns = width // 2
    return {
        **{name: config[f"attention_{name}"] for name in COPIED},
        "attention_type": config["attention_type"],
        "sta_mask": window_mask(frames, rows // TILE_SIDE, columns // TILE_SIDE, config, device),
        "to_fractal": True,
        "visual_shape": (frames, rows, columns),
    }


@exempt()
def tile_mask(query: Tensor, key: Tensor, window: Tensor, mass: float) -> Tensor:
    """Which key tiles each query tile attends to: bool, `B H N N`, from `B S H D`.

    Tiles are ranked by the softmax over tile means. The lowest that together hold 1 - `mass` are
    dropped, then the window is added.
    """
    means = [x.transpose(1, 2).unflatten(2, (-1, TILE)).mean(-2) for x in (query, key)]  # B H N D
    products = means[0] @ means[1].transpose(-2, -1)
    scores = torch.softmax(products / math.sqrt(query.shape[-1]), dim=-1)
    values, order = scores.sort(-1)  # ascending
    kept = values.cumsum(-1) >= 1 - mass
    # From the order of the scores to that of the tiles.
    return torch.empty_like(kept).scatter_(-1, order, kept) | window


class TileAttention:
    """Sparse attention of a transformer, shared by its processors."""

    def __init__(self) -> None:
        self._attend: dict[int, Attend] = {}  # by number of heads, which processes may share
        self._visible: TileCounts = {}

    def settle(self, device: torch.device, dtype: torch.dtype, head_dim: int, heads: int) -> None:
        """Choose an implementation before the first step.

        Inside a block, compilation and checkpointing would trace the self-test.
        """
        self._attend[heads] = choose_attend(device, dtype, head_dim, heads)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, params: dict[str, Any]) -> Tensor:
        """Attention of `B S H D` queries to the tiles chosen for them; `B S H D`."""
        if query.shape[-2] not in self._attend:  # pipelines do not call `settle`
            self.settle(query.device, query.dtype, query.shape[-1], query.shape[-2])
        with torch.no_grad():
            tiles = tile_mask(query, key, params["sta_mask"], params["P"])
        if torch.is_grad_enabled():
            # On the device, since reading the number would synchronise.
            visible, pairs = self._visible.get(query.shape[1], (0, 0))
            self._visible[query.shape[1]] = visible + tiles.sum(), pairs + tiles.numel()
        attend: Any = self._attend[query.shape[-2]]
        return attend(query, key, value, tiles)

    def take_counts(self) -> TileCounts:
        """The tiles of the forward passes with gradients since the last call."""
        counts = self._visible
        self._visible = {}
        return counts

    def kernel(self, params: dict[str, Any] | None) -> Kernel | None:
        """The attention of a step with these `sparse_params`; None without, where it is dense."""
        return None if params is None else partial(self, params=params)


def install(transformer: nn.Module) -> TileAttention:
    """Let the visual self-attentions attend to NABLA's tiles.

    Returns:
        the attention that they share.
    """
    attention = TileAttention()

    def is_visual(name: str) -> bool:
        return name.endswith("self_attention") and "visual" in name

    replace_attention(transformer, attention.kernel, is_visual)
    return attention
