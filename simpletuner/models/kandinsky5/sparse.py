"""NABLA, Kandinsky's block-sparse attention, in training.

Each query tile of 64 tokens attends to the key tiles that hold most of its attention mass, and to the tiles of a
window around it. The stock processor hands the choice to flex attention, which does not obey it unless it is compiled.
Here the same choice is made, and `tile_attention` knows how it is obeyed on each device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Attention
from torch import Tensor, nn

from simpletuner.models.kandinsky5.attention import project
from simpletuner.models.kandinsky5.nabla import TILE, TILE_SIDE
from simpletuner.models.kandinsky5.tile_attention import Attend, choose_attend


def window_mask(
    frames: int, rows: int, columns: int, config: dict[str, Any], device: torch.device | None = None
) -> Tensor:
    """Which tiles see which by their distance in time, height and width: bool, `1 1 N N` with N tiles.

    Args:
        rows, columns: tiles of a frame, that is, latent height and width divided by 16.
        device: where it is made; to bring it there would make the host wait.
    """
    sides = ((frames, config["attention_wT"]), (rows, config["attention_wH"]), (columns, config["attention_wW"]))
    places = [torch.arange(count, device=device) for count, _ in sides]
    near = [
        (place[:, None] - place[None]).abs() <= window // 2 for place, (_, window) in zip(places, sides, strict=True)
    ]
    time = near[0][:, None, None, :, None, None]
    height = near[1][None, :, None, None, :, None]
    width = near[2][None, None, :, None, None, :]
    mask = time & height & width
    count = frames * rows * columns
    return mask.reshape(count, count)[None, None]


def sparse_params(latents_shape: tuple[int, ...], config: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What the stock pipelines pass as `sparse_params` for latents of shape `B F H W C`."""
    _, frames, height, width, _ = latents_shape
    rows, columns = height // 2, width // 2
    return {
        "sta_mask": window_mask(frames, rows // TILE_SIDE, columns // TILE_SIDE, config, device),
        "attention_type": config["attention_type"],
        "to_fractal": True,
        "P": config["attention_P"],
        "wT": config["attention_wT"],
        "wW": config["attention_wW"],
        "wH": config["attention_wH"],
        "add_sta": config["attention_add_sta"],
        "visual_shape": (frames, rows, columns),
        "method": config["attention_method"],
    }


def tile_mask(query: Tensor, key: Tensor, window: Tensor, mass: float) -> Tensor:
    """Which key tiles each query tile attends to: bool, `B H N N`, from `B S H D`.

    The tiles are ranked by the softmax over tile means; the least that together hold 1 - `mass` are left out, then
    the window is added.
    """
    means = [x.transpose(1, 2).unflatten(2, (-1, TILE)).mean(-2) for x in (query, key)]  # B H N D
    scores = torch.softmax(means[0] @ means[1].transpose(-2, -1) / math.sqrt(query.shape[-1]), dim=-1)
    values, order = scores.sort(-1)
    kept = values.cumsum(-1) >= 1 - mass
    return kept.gather(-1, order.argsort(-1)) | window


class TileAttention:
    """Sparse attention of one transformer: all of its processors share the way that was chosen for the device."""

    def __init__(self) -> None:
        self._attend: Attend | None = None

    def settle(self, device: torch.device, dtype: torch.dtype, head_dim: int, heads: int) -> None:
        """Choose and test a way now, outside of any block: compilation and checkpointing must not see the test."""
        self._attend = choose_attend(device, dtype, head_dim, heads)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, params: dict[str, Any]) -> Tensor:
        """Attention of `B S H D` queries to the tiles chosen for them; `B S H D`."""
        if self._attend is None:  # a pipeline comes without `settle`
            self.settle(query.device, query.dtype, query.shape[-1], query.shape[-2])
        with torch.no_grad():
            tiles = tile_mask(query, key, params["sta_mask"], params["P"])
        attend: Any = self._attend
        out: Tensor = attend(query, key, value, tiles)
        return out


class SparseProcessor:
    """The stock self-attention with NABLA's tiles; dense calls go to the stock processor."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, attention: TileAttention, fallback: Callable[..., Tensor]) -> None:
        self.attention, self.fallback = attention, fallback

    def __call__(
        self,
        attn: Kandinsky5Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        sparse_params: dict[str, Any] | None = None,
    ) -> Tensor:
        if sparse_params is None or rotary_emb is None:
            return self.fallback(attn, hidden_states, encoder_hidden_states, rotary_emb, sparse_params)
        query, key, value = project(attn, hidden_states, hidden_states, rotary_emb)
        out = self.attention(query, key, value, sparse_params)
        return attn.out_layer(out.flatten(-2, -1))


def install(transformer: nn.Module) -> TileAttention:
    """Give the visual self-attentions processors that obey the tiles; returns what they share."""
    attention = TileAttention()
    for name, module in transformer.named_modules():
        if isinstance(module, Kandinsky5Attention) and name.endswith("self_attention") and "visual" in name:
            module.set_processor(SparseProcessor(attention, module.processor))
    return attention
