"""Kandinsky's blocks in training: attention that masks padded text, and faster forward passes.

The stock transformer has no text mask, because its pipelines never pad. Training batches need
padding, so the attention processors of the text blocks and of the cross-attention mask padding
keys. The rest is the stock computation.

The faster forward passes are bit for bit equal to the diffusers classes. The stock blocks rotate
queries and keys by products with 2 x 2 matrices, four numbers per pair, in every block and twice
with checkpointing. Here a pair is rotated by its cosine and sine, extracted once a step from the
same tensor. Modules and weights are unchanged, and every product and sum is rounded where the stock
code rounds it: a fused multiply-add would change bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_kandinsky import (
    Kandinsky5Attention,
    Kandinsky5Modulation,
)
from diffusers.models.transformers.transformer_kandinsky import (
    Kandinsky5TransformerDecoderBlock as VisualBlock,
)
from diffusers.models.transformers.transformer_kandinsky import (
    Kandinsky5TransformerEncoderBlock as TextBlock,
)
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.weak import WeakTensorKeyDictionary

from simpletuner.models.blocks import FastBlocks, torch_attention


class RotaryTables(NamedTuple):
    """Cosines and sines of the positions, each `B S 1 D/2`, where B may be 1."""

    cos: Tensor
    sin: Tensor


# The rotation matrices `B S 1 D/2 2 2` that the stock transformer passes to its blocks, or tables
# of their entries.
Rope = Tensor | RotaryTables
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]  # of `B S H D` tensors


class TextPadding:
    """The text mask of the current micro-batch, shared by all processors of a transformer."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None  # B L, True where a token is real
        self._predicting = False

    @contextmanager
    def hidden(self, mask: Tensor | None) -> Iterator[None]:
        """Mask padding during a forward pass, and during the recomputation of its backward pass."""
        self._mask = mask
        self._predicting = True
        try:
            yield
        finally:
            # The mask stays for the recomputation, which runs after this context.
            self._predicting = False

    @property
    def mask(self) -> Tensor | None:
        """The mask, if it applies: sampling pipelines run without gradients and without padding."""
        is_training = self._predicting or torch.is_grad_enabled()
        return self._mask if is_training else None

    def kernel(self, sparse_params: None) -> Kernel | None:
        """Attention with padding keys masked out, if there are any."""
        mask = self.mask
        if mask is None:
            return None
        return partial(dispatch_attention_fn, attn_mask=mask[:, None, None, :])


class ReplacedAttention:
    """diffusers' `Kandinsky5AttnProcessor`, with another kernel where there is one.

    Args:
        kernel: (parameters of block-sparse attention) -> the kernel of a call; None for diffusers'
            kernel.
    """

    # diffusers sets these on processors when a backend or parallelism is chosen.
    _attention_backend = None
    _parallel_config = None

    def __init__(
        self, kernel: Callable[[Any], Kernel | None], fallback: Callable[..., Tensor]
    ) -> None:
        self.kernel = kernel
        self.fallback = fallback

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
            return self.fallback(
                attn, hidden_states, encoder_hidden_states, rotary_emb, sparse_params
            )
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = project(attn, hidden_states, context, rotary_emb)
        return attn.out_layer(kernel(query, key, value).flatten(-2, -1))


def replace_attention(
    transformer: nn.Module, kernel: Callable[[Any], Kernel | None], is_chosen: Callable[[str], bool]
) -> None:
    """Replace the kernel of the attentions whose names are chosen."""
    for name, module in transformer.named_modules():
        if isinstance(module, Kandinsky5Attention) and is_chosen(name):
            module.set_processor(ReplacedAttention(kernel, module.processor))


def project(
    attn: Kandinsky5Attention, hidden_states: Tensor, context: Tensor, rotary_emb: Rope | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of `hidden_states`, keys and values of `context`: normalised, rotated, `B S H D`."""
    query = attn.to_query(hidden_states)
    key = attn.to_key(context)
    value = attn.to_value(context)
    query, key, value = (x.unflatten(-1, (attn.num_heads, -1)) for x in (query, key, value))
    # In float32 and back, as in the stock processor.
    query = attn.query_norm(query.float()).type_as(query)
    key = attn.key_norm(key.float()).type_as(key)
    if rotary_emb is not None:
        query = rotate(query, rotary_emb)
        key = rotate(key, rotary_emb)
    return query, key, value


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding as the stock processor computes it, including its rounding to bfloat16."""
    if isinstance(rope, RotaryTables):
        return Rotation.apply(x, *rope)
    pairs = x.reshape(*x.shape[:-1], -1, 1, 2).float()
    return (rope * pairs).sum(dim=-1).reshape(x.shape).to(torch.bfloat16).type_as(x)


class Rotation(torch.autograd.Function):
    """Rotates pairs of neighbouring numbers by tables of cosines and sines.

    The gradient is rotated back. Both directions round to bfloat16 where the stock processor does,
    and round every product as it does: with `sub_` and `add_` apart from the products, since one
    fused operation would round once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        rotated = [(first * cos).sub_(second * sin), (first * sin).add_(second * cos)]
        rounded = [half.to(torch.bfloat16) for half in rotated]
        return torch.stack(rounded, dim=-1).flatten(-2).type_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # Autograd casts the gradient of the stock rounding to bfloat16 likewise.
        first, second = grad.to(torch.bfloat16).float().unflatten(-1, (-1, 2)).unbind(-1)
        rotated = [(first * cos).add_(second * sin), (second * cos).sub_(first * sin)]
        gradient = torch.stack([half.to(grad.dtype) for half in rotated], dim=-1).flatten(-2)
        return gradient, None, None


def mask_padding(transformer: nn.Module) -> TextPadding:
    """Mask padding in every attention that reads text; returns the mask that they share."""
    padding = TextPadding()

    def reads_text(name: str) -> bool:
        return "text_" in name or name.endswith("cross_attention")

    replace_attention(transformer, padding.kernel, reads_text)
    return padding


class FastForward:
    """`forward` of the text and visual blocks of a transformer."""

    def __init__(self, fast: FastBlocks, padding: TextPadding) -> None:
        self.fast = fast
        self.padding = padding
        # By position tensor; an entry lives as long as its tensor, which is a step.
        self._tables: Any = WeakTensorKeyDictionary()

    def text(self, block: TextBlock, x: Tensor, time_embed: Tensor, rope: Tensor) -> Tensor:
        cos, sin = self.tables(rope, len(x))
        return self.fast.finish("text", block, x, time_embed, cos, sin, self.padding.mask)

    def visual(
        self,
        block: VisualBlock,
        visual: Tensor,
        text: Tensor,
        time_embed: Tensor,
        rope: Tensor,
        sparse_params: dict[str, Any] | None,
    ) -> Tensor:
        cos, sin = self.tables(rope, len(visual))
        before = self.fast.pieces["before_attention"]
        params, query, key, value = before(block, visual, time_embed, cos, sin)
        kernel = None  # the dense one
        if sparse_params is not None:
            # The processor has the kernel for the tiles.
            kernel = block.self_attention.processor.kernel(sparse_params)
        attended = self.fast.self_attention(query, key, value, kernel)
        return self.fast.finish(
            "after_attention", block, visual, attended, params, text, self.padding.mask
        )

    def tables(self, rope: Tensor, samples: int) -> RotaryTables:
        """Cosines and sines of the matrices `B S 1 D/2 2 2`, where B may be 1.

        Returns:
            two tensors `samples S 1 D/2`.
        """
        tables: RotaryTables | None = self._tables.get(rope)
        if tables is None:
            # A matrix is ((cos, -sin), (sin, cos)), so its first column has both.
            # Copies, not views: torch.compile would recompile for every layout of a view's base.
            # Rows for all samples let TREAD, whose tokens differ by sample, share the graphs.
            columns = [rope[..., row, 0].expand(samples, -1, -1, -1) for row in (0, 1)]
            copies = [column.clone(memory_format=torch.contiguous_format) for column in columns]
            tables = RotaryTables(*copies)
            self._tables[rope] = tables
        return tables


def use_fast_blocks(transformer: nn.Module, padding: TextPadding) -> FastBlocks:
    """Replace the forward of every block; the transformer's modules and weights are unchanged."""
    fast = FastBlocks(
        {
            "text": text_block,
            "before_attention": before_attention,
            "after_attention": after_attention,
        },
        last=("text", "after_attention"),
    )
    forward = FastForward(fast, padding)
    model = cast(Any, transformer)
    for block in model.text_transformer_blocks:
        block.forward = partial(forward.text, block)
    for block in model.visual_transformer_blocks:
        block.forward = partial(forward.visual, block)
    return fast


def text_block(
    block: TextBlock, x: Tensor, time_embed: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
) -> Tensor:
    """Self-attention and feed-forward of text `B L C`; `mask` `B L` is true on real tokens."""
    params = block.text_modulation(time_embed).unsqueeze(1)  # B 1 6C
    shift, scale, gate, ff_shift, ff_scale, ff_gate = params.chunk(6, dim=-1)
    modulated = modulate(block.self_attention_norm, x, shift, scale)
    attended = attend(block.self_attention, modulated, modulated, RotaryTables(cos, sin), mask)
    x = add_gated(x, gate, attended)
    modulated = modulate(block.feed_forward_norm, x, ff_shift, ff_scale)
    return add_gated(x, ff_gate, block.feed_forward(modulated))


def before_attention(
    block: VisualBlock, visual: Tensor, time_embed: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The block's nine modulations `B 9C`, and queries, keys and values, each `B S H D`."""
    params = block.visual_modulation(time_embed)
    shift, scale = params.unsqueeze(1).chunk(9, dim=-1)[:2]
    modulated = modulate(block.self_attention_norm, visual, shift, scale)
    tables = RotaryTables(cos, sin)
    query, key, value = project(block.self_attention, modulated, modulated, tables)
    return params, query, key, value


def after_attention(
    block: VisualBlock,
    visual: Tensor,
    attended: Tensor,
    params: Tensor,
    text: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """The rest of the block, after attention `B S H D`."""
    out = block.self_attention.out_layer(attended.flatten(-2, -1))
    # Shift, scale and gate of self-attention, cross-attention and feed-forward; the first two were
    # used in `before_attention`.
    modulations = params.unsqueeze(1).chunk(9, dim=-1)
    _, _, gate, shift, scale, cross_gate, ff_shift, ff_scale, ff_gate = modulations
    visual = add_gated(visual, gate, out)
    modulated = modulate(block.cross_attention_norm, visual, shift, scale)
    attended_text = attend(block.cross_attention, modulated, text, None, mask)
    visual = add_gated(visual, cross_gate, attended_text)
    modulated = modulate(block.feed_forward_norm, visual, ff_shift, ff_scale)
    return add_gated(visual, ff_gate, block.feed_forward(modulated))


def attend(
    attention: Kandinsky5Attention,
    x: Tensor,
    context: Tensor,
    tables: RotaryTables | None,
    mask: Tensor | None,
) -> Tensor:
    """Attention of `x` to `context`, through the output layer: `B S C`."""
    query, key, value = project(attention, x, context, tables)
    key_mask = None if mask is None else mask[:, None, None, :]
    attended = torch_attention(query, key, value, key_mask)
    return attention.out_layer(attended.flatten(-2, -1))


def modulate(norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """norm(x) (scale + 1) + shift in float32, rounded once to the dtype of `x`."""
    out: Tensor = norm(x.float())
    if scale.requires_grad:  # its gradient needs the normalised values
        out = out * (scale + 1.0) + shift
    else:
        out = out.mul_(scale + 1.0).add_(shift)
    return out.type_as(x)


def add_gated(x: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """x + gate out in float32, the dtype of `gate`, rounded once to the dtype of `x`."""
    return (gate * out).add_(x).type_as(x)


def store_in_bf16(transformer: nn.Module) -> None:
    """Store frozen modulation weights that bf16 represents exactly in bf16."""
    for module in transformer.modules():
        if not isinstance(module, Kandinsky5Modulation):
            continue
        layer = module.out_layer
        if isinstance(layer, nn.Linear) and is_exact(layer.weight):
            layer.weight.data = layer.weight.data.to(torch.bfloat16)
            layer.forward = MethodType(upcast_linear, layer)  # type: ignore[method-assign]


def is_exact(weight: Tensor) -> bool:
    """Whether a weight is frozen, float32, and unchanged by conversion to bf16 and back."""
    if weight.dtype != torch.float32 or weight.requires_grad:
        return False
    return torch.equal(weight.to(torch.bfloat16).float(), weight)


def upcast_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The linear layer, with its weight cast to the dtype of its input."""
    return linear(x, layer.weight.to(x.dtype), layer.bias)
