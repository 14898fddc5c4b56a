"""Attention that masks padded text, for batches of captions of different lengths.

The stock transformer has no text mask, because its pipelines never pad. Training batches need padding, so the attention
processors of the text blocks and of the cross-attention mask padding keys. The rest is the stock computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Attention
from torch import Tensor, nn


class RotaryTables(NamedTuple):
    """Cosines and sines of the positions, each `B S 1 D/2`, where B may be 1."""

    cos: Tensor
    sin: Tensor


# The rotation matrices `B S 1 D/2 2 2` that the stock transformer passes to its blocks, or tables of their entries.
Rope = Tensor | RotaryTables
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]  # of `B S H D` tensors
# Layers that share their input, in self-attention and in cross-attention.
QUERY_KEY_VALUE = ("to_query", "to_key", "to_value")
QUERY, KEY_VALUE = QUERY_KEY_VALUE[:1], QUERY_KEY_VALUE[1:]


class TextPadding:
    """The text mask of the current micro-batch, shared by all processors of a transformer."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None  # B L, True where a token is real
        self._predicting = False

    @contextmanager
    def hidden(self, mask: Tensor | None) -> Iterator[None]:
        """Mask padding during a forward pass, and during the recomputation of its backward pass."""
        self._mask, self._predicting = mask, True
        try:
            yield
        finally:
            # The mask stays for the recomputation, which runs after this context.
            self._predicting = False

    @property
    def mask(self) -> Tensor | None:
        """The mask, if it applies: sampling pipelines run without gradients and without padding."""
        return self._mask if self._predicting or torch.is_grad_enabled() else None

    def kernel(self, sparse_params: None) -> Kernel | None:
        """Attention with padding keys masked out, if there are any."""
        mask = self.mask
        return None if mask is None else partial(dispatch_attention_fn, attn_mask=mask[:, None, None, :])


class ReplacedAttention:
    """diffusers' `Kandinsky5AttnProcessor`, with another kernel where there is one.

    Args:
        kernel: (parameters of block-sparse attention) -> the kernel of a call; None for that of diffusers.
    """

    # diffusers sets these on processors when a backend or parallelism is chosen.
    _attention_backend = None
    _parallel_config = None

    def __init__(self, kernel: Callable[[Any], Kernel | None], fallback: Callable[..., Tensor]) -> None:
        self.kernel, self.fallback = kernel, fallback

    def __call__(
        self,
        attn: Kandinsky5Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Rope | None = None,
        sparse_params: dict[str, Any] | None = None,
    ) -> Tensor:
        kernel = self.kernel(sparse_params)
        if kernel is None:
            return self.fallback(attn, hidden_states, encoder_hidden_states, rotary_emb, sparse_params)
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        attended = kernel(*project(attn, hidden_states, context, rotary_emb))
        return attn.out_layer(attended.flatten(-2, -1))


def replace_attention(
    transformer: nn.Module, kernel: Callable[[Any], Kernel | None], chosen: Callable[[str], bool]
) -> None:
    """Replace the kernel of a transformer's attentions with chosen names."""
    for name, module in transformer.named_modules():
        if isinstance(module, Kandinsky5Attention) and chosen(name):
            module.set_processor(ReplacedAttention(kernel, module.processor))


def project(
    attn: Kandinsky5Attention, hidden_states: Tensor, context: Tensor, rotary_emb: Rope | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of `hidden_states`, and keys and values of `context`, normalised and rotated; each `B S H D`."""
    if hidden_states is context:
        parts = products(attn, QUERY_KEY_VALUE, context)
    else:
        parts = [*products(attn, QUERY, hidden_states), *products(attn, KEY_VALUE, context)]
    query, key, value = (part.unflatten(-1, (attn.num_heads, -1)) for part in parts)
    # In float32 and back, as in the stock processor.
    query = attn.query_norm(query.float()).type_as(query)
    key = attn.key_norm(key.float()).type_as(key)
    if rotary_emb is not None:
        query, key = rotate(query, rotary_emb), rotate(key, rotary_emb)
    return query, key, value


def products(attn: Kandinsky5Attention, names: tuple[str, ...], x: Tensor) -> Sequence[Tensor]:
    """`x` through layers of an attention, which `speed_fused_lora` computes together."""
    if attn.fused_projections and names in attn.shared_inputs:
        together: Sequence[Tensor] = attn.shared_inputs[names](x)
        return together
    return [attn.get_submodule(name)(x) for name in names]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding as the stock processor computes it, including its rounding to bfloat16."""
    if isinstance(rope, RotaryTables):
        rotated: Tensor = Rotation.apply(x, *rope)
        return rotated
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2).float()
    return (rope * pairs).sum(dim=-1).reshape(x.shape).to(torch.bfloat16).type_as(x)


class Rotation(torch.autograd.Function):
    """Rotates pairs of neighbouring numbers by tables of cosines and sines; the gradient is rotated back.

    Both directions round to bfloat16 where the stock processor does, and round every product as it does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = (first * cos).sub_(second * sin), (first * sin).add_(second * cos)
        return torch.stack([each.to(torch.bfloat16) for each in turned], dim=-1).flatten(-2).type_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # Autograd casts the gradient of the stock rounding to bfloat16 likewise.
        first, second = grad.to(torch.bfloat16).float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = (first * cos).add_(second * sin), (second * cos).sub_(first * sin)
        return torch.stack([each.to(grad.dtype) for each in turned], dim=-1).flatten(-2), None, None


def install(transformer: nn.Module) -> TextPadding:
    """Mask padding in every attention that reads text; returns the mask that they share."""
    padding = TextPadding()
    replace_attention(transformer, padding.kernel, lambda name: "text_" in name or name.endswith("cross_attention"))
    return padding
