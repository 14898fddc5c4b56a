"""Faster forward passes of Kandinsky's blocks, bit for bit equal to the diffusers classes.

The stock blocks rotate queries and keys by products with 2 x 2 matrices, four numbers per pair, in every block and
twice with checkpointing. Here a pair is rotated by its cosine and sine, extracted once a step from the same tensor.
Modules and weights are unchanged, and every product and sum is rounded where the stock code rounds it: a fused
multiply-add would change bits.
"""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from diffusers.models.transformers.transformer_kandinsky import (
    Kandinsky5Attention,
    Kandinsky5Modulation,
    Kandinsky5TransformerDecoderBlock,
    Kandinsky5TransformerEncoderBlock,
)
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.weak import WeakTensorKeyDictionary

from simpletuner.models.blocks import FastBlocks, torch_attention
from simpletuner.models.kandinsky5.attention import (
    KEY_VALUE,
    QUERY,
    QUERY_KEY_VALUE,
    RotaryTables,
    TextPadding,
    project,
)


class FastForward:
    """`forward` of the blocks of a transformer."""

    def __init__(self, fast: FastBlocks, padding: TextPadding) -> None:
        self.fast, self.padding = fast, padding
        self._tables: Any = WeakTensorKeyDictionary()  # by position tensor; an entry lives as long as its tensor

    def text(self, block: Kandinsky5TransformerEncoderBlock, x: Tensor, time_embed: Tensor, rope: Tensor) -> Tensor:
        tables = self.tables(rope, len(x))
        out: Tensor = self.fast.finish("text", block, x, time_embed, *tables, self.padding.mask)
        return out

    def visual(
        self, block: Kandinsky5TransformerDecoderBlock, visual: Tensor, text: Tensor, time_embed: Tensor, rope: Tensor,
        sparse_params: dict[str, Any] | None,
    ) -> Tensor:  # fmt: skip
        tables, attention = self.tables(rope, len(visual)), block.self_attention
        params, query, key, value = self.fast.pieces["before_attention"](block, visual, time_embed, *tables)
        # Without these parameters attention is dense; with them the processor has the kernel for its tiles.
        tiled = None if sparse_params is None else attention.processor.kernel(sparse_params)
        attended = self.fast.self_attention(query, key, value, tiled)
        out: Tensor = self.fast.finish("after_attention", block, visual, attended, params, text, self.padding.mask)
        return out

    def tables(self, rope: Tensor, samples: int) -> RotaryTables:
        """Cosines and sines of the matrices `B S 1 D/2 2 2` (B may be 1), each `samples S 1 D/2`."""
        tables: RotaryTables | None = self._tables.get(rope)
        if tables is None:
            # Copies, not views: torch.compile would recompile for every layout of a view's base. Rows for all samples
            # let TREAD, whose tokens differ by sample, share the graphs.
            cos, sin = (rope[..., column, 0].expand(samples, -1, -1, -1) for column in (0, 1))
            tables = RotaryTables(*(each.clone(memory_format=torch.contiguous_format) for each in (cos, sin)))
            self._tables[rope] = tables
        return tables


def install(transformer: nn.Module, padding: TextPadding) -> FastBlocks:
    """Replace the forward of every block; the transformer's modules and weights are unchanged."""
    fast = FastBlocks(
        {"text": text_block, "before_attention": before_attention, "after_attention": after_attention},
        last=("text", "after_attention"),
        shared_inputs=[
            (module, names)
            for path, module in transformer.named_modules() if isinstance(module, Kandinsky5Attention)
            for names in ([QUERY, KEY_VALUE] if path.endswith("cross_attention") else [QUERY_KEY_VALUE])
        ],
    )  # fmt: skip
    forward, model = FastForward(fast, padding), cast(Any, transformer)
    for block in model.text_transformer_blocks:
        block.forward = partial(forward.text, block)
    for block in model.visual_transformer_blocks:
        block.forward = partial(forward.visual, block)
    return fast


def text_block(
    block: Kandinsky5TransformerEncoderBlock,
    x: Tensor,
    time_embed: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Self-attention and feed-forward of text `B L C`; `mask` `B L` is true on real tokens."""
    params = block.text_modulation(time_embed).unsqueeze(1)  # B 1 6C
    shift, scale, gate, ff_shift, ff_scale, ff_gate = params.chunk(6, dim=-1)
    modulated = modulate(block.self_attention_norm, x, shift, scale)
    x = add_gated(x, gate, attend(block.self_attention, modulated, modulated, RotaryTables(cos, sin), mask))
    return add_gated(x, ff_gate, block.feed_forward(modulate(block.feed_forward_norm, x, ff_shift, ff_scale)))


def before_attention(
    block: Kandinsky5TransformerDecoderBlock, visual: Tensor, time_embed: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The block's nine modulations `B 9C`, and queries, keys and values, each `B S H D`."""
    params = block.visual_modulation(time_embed)
    shift, scale = params.unsqueeze(1).chunk(9, dim=-1)[:2]
    modulated = modulate(block.self_attention_norm, visual, shift, scale)
    return (params, *project(block.self_attention, modulated, modulated, RotaryTables(cos, sin)))


def after_attention(
    block: Kandinsky5TransformerDecoderBlock,
    visual: Tensor,
    attended: Tensor,
    params: Tensor,
    text: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """The rest of the block, after attention `B S H D`."""
    out = block.self_attention.out_layer(attended.flatten(-2, -1))
    # Shift, scale and gate of self-attention, cross-attention and feed-forward; the first two are used already.
    _, _, gate, shift, scale, cross_gate, ff_shift, ff_scale, ff_gate = params.unsqueeze(1).chunk(9, dim=-1)
    visual = add_gated(visual, gate, out)
    modulated = modulate(block.cross_attention_norm, visual, shift, scale)
    visual = add_gated(visual, cross_gate, attend(block.cross_attention, modulated, text, None, mask))
    modulated = modulate(block.feed_forward_norm, visual, ff_shift, ff_scale)
    return add_gated(visual, ff_gate, block.feed_forward(modulated))


def attend(
    attention: Kandinsky5Attention, x: Tensor, context: Tensor, tables: RotaryTables | None, mask: Tensor | None
) -> Tensor:
    """Attention of `x` to `context`, through the output layer: `B S C`."""
    query, key, value = project(attention, x, context, tables)
    attended = torch_attention(query, key, value, None if mask is None else mask[:, None, None, :])
    out: Tensor = attention.out_layer(attended.flatten(-2, -1))
    return out


def modulate(norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """norm(x) (scale + 1) + shift in float32, rounded once to the dtype of `x`."""
    out: Tensor = norm(x.float())
    # In place unless the backward pass needs the normalised values, for the gradient of `scale`.
    out = out * (scale + 1.0) + shift if scale.requires_grad else out.mul_(scale + 1.0).add_(shift)
    return out.type_as(x)


def add_gated(x: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """x + gate out in float32, the dtype of `gate`, rounded once to the dtype of `x`."""
    return (gate * out).add_(x).type_as(x)


def store_in_bf16(transformer: nn.Module) -> int:
    """Store frozen modulation weights that bf16 represents exactly in bf16; returns the bytes saved."""
    saved = 0
    for module in transformer.modules():
        layer = module.out_layer if isinstance(module, Kandinsky5Modulation) else None
        if isinstance(layer, nn.Linear) and is_exact(layer.weight):
            layer.weight.data = layer.weight.data.to(torch.bfloat16)
            layer.forward = MethodType(upcast_linear, layer)  # type: ignore[method-assign]
            saved += 2 * layer.weight.numel()
    return saved


def is_exact(weight: Tensor) -> bool:
    """Whether a weight is frozen, float32, and unchanged by conversion to bf16 and back."""
    if weight.dtype != torch.float32 or weight.requires_grad:
        return False
    return torch.equal(weight.to(torch.bfloat16).float(), weight)


def upcast_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The linear layer, with its weight cast to the dtype of its input."""
    return linear(x, layer.weight.to(x.dtype), layer.bias)
