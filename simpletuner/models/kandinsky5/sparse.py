"""NABLA, Kandinsky's block-sparse attention, in training.

Each query tile of 64 tokens attends to the key tiles that hold most of its attention mass, and to the tiles of a
window around it. The stock processor hands a `BlockMask` to flex attention, which obeys it only when it is compiled
and has no backward pass on a CPU. Here the same choice of tiles becomes a mask of booleans that every device obeys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from simpletuner.models.kandinsky5.attention import project

TILE_SIDE = 8  # tokens, within one latent frame
TILE = TILE_SIDE**2


def is_sparse(transformer_config: dict[str, Any]) -> bool:
    """Whether a checkpoint was trained with NABLA."""
    return transformer_config.get("attention_type") == "nabla"


def window_mask(frames: int, rows: int, columns: int, config: dict[str, Any]) -> Tensor:
    """Which tiles see which by their distance in time, height and width: bool, `1 1 N N` with N tiles.

    Args:
        rows, columns: tiles of a frame, that is, latent height and width divided by 16.
    """
    sides = ((frames, config["attention_wT"]), (rows, config["attention_wH"]), (columns, config["attention_wW"]))
    near = [(torch.arange(n)[:, None] - torch.arange(n)[None]).abs() <= window // 2 for n, window in sides]
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
        "sta_mask": window_mask(frames, rows // 8, columns // 8, config).to(device),
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


class SparseProcessor:
    """The stock self-attention with NABLA's tiles as a boolean mask; dense calls go to the stock processor."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, fallback: Callable[..., Tensor]) -> None:
        self.fallback = fallback

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
        with torch.no_grad():
            tiles = tile_mask(query, key, sparse_params["sta_mask"], sparse_params["P"])
            mask = tiles.repeat_interleave(TILE, -1).repeat_interleave(TILE, -2)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # B H S D
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        return attn.out_layer(out.flatten(-2, -1))


def install(transformer: nn.Module) -> None:
    """Give the visual self-attentions processors that obey the mask on every device."""
    for name, module in transformer.named_modules():
        if isinstance(module, Kandinsky5Attention) and name.endswith("self_attention") and "visual" in name:
            module.set_processor(SparseProcessor(module.processor))
