"""Attention: the GPU's kernels have other arguments and results than the CPU's.

Every function takes the arguments of its operation by name; dropout is none of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The result, and what the backward pass needs of the sums."""
    out, sums = ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_bias, scale=scale
    )
    return out, sums


def _differentiate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool = False,
    attn_bias: Tensor | None = None,
    scale: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    gradient = others.get("grad_out", others.get("grad_out_"))
    gradients: tuple[Tensor, Tensor, Tensor] = (
        ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient,
            query,
            key,
            value,
            out,
            logsumexp,
            0.0,
            is_causal,
            attn_mask=attn_bias,
            scale=scale,
        )
    )
    return gradients


def _number() -> Tensor:
    """A part of the state of a generator."""
    return torch.zeros((), dtype=torch.int64)


def _flash(**given: Any) -> tuple[Any, ...]:
    lengths = given["query"].shape[2], given["key"].shape[2]
    state = torch.zeros(2, dtype=torch.uint64)
    return *_attend(**given), None, None, *lengths, state, _number(), torch.empty(0)


def _cudnn(**given: Any) -> tuple[Any, ...]:
    lengths = given["query"].shape[2], given["key"].shape[2]
    return *_attend(**given), None, None, *lengths, _number(), _number(), torch.empty(0)


def _efficient(**given: Any) -> tuple[Any, ...]:
    return *_attend(**given), _number(), _number()


def _efficient_backward(**given: Any) -> tuple[Any, ...]:
    return *_differentiate(**given), None


ATTENTION = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _differentiate,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _differentiate,
}
