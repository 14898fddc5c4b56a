"""The block of Sana Video as training compiles it, which keeps less for gradients than diffusers'.

The arithmetic is that of the diffusers class; modules and weights are unchanged, rounding is not.
Compiled, diffusers' own code keeps 39 times the hidden states, 47 times with a given first frame.
Here it is 18 and 19: the results of products and of the depthwise convolution. Two rules do that:

- what is cheap to compute is computed again in the backward pass (`recomputed`): modulation, norms,
  rotation, and linear attention, whose state is a small matrix per head
- a convolution with frozen weights does not keep its input (`FrozenConvolution`); a pointwise one
  is a product, whose input is kept only for trained weights

Compiled code must also hold for a grid of any size. So tokens have the shape `B T H W C` wherever
sizes matter, because the compiler cannot divide a symbol S into T, H and W.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, relu, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint


def run_block(
    block: Any,
    hidden: Tensor,
    text: Tensor,
    mask: Tensor,
    timestep: Tensor,
    tables: Sequence[Tensor],
) -> Tensor:
    """`forward` of a block with tokens `B T H W C`, whose shape gives the grid; returns `B S C`.

    With tokens as `B S C` and separate sizes, compiled code would specialise on the sizes, or
    contain symbolic quotients such as S / (T H), on which inductor fails.

    Args:
        text, mask: of the caption, as the class takes them.
        timestep: its embedding `B 1 1 1 6C`, or `B T H W 6C` for tokens with their own timesteps.
        tables: cosines and sines `1 T H W 1 D`.
    """
    for tensor in (text, mask, timestep):
        # Otherwise the compiler would have a different symbol for the batch size of each.
        torch._check(len(tensor) == len(hidden))
    grid = hidden.shape[1:4]
    tokens = hidden.flatten(1, 3)
    tables = [table.flatten(1, 3) for table in tables]
    modulation = recomputed(_modulation, block.scale_shift_table, timestep.flatten(1, 3))
    shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation

    modulated = (block.norm1(tokens) * (1 + scale) + shift).to(tokens.dtype)
    tokens = tokens + gate * _self_attention(block.attn1, modulated, tables)

    tokens = _cross_attention(block.attn2, tokens, text, mask) + tokens

    modulated = block.norm2(tokens) * (1 + ff_scale) + ff_shift
    return tokens + ff_gate * _feed_forward(block.ff, modulated.unflatten(1, grid))


def recomputed(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """The result of a function that the backward pass computes again from its inputs."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def _modulation(table: Tensor, timestep: Tensor) -> tuple[Tensor, ...]:
    """Shift, scale and gate of the attention, then of the feed-forward; each `B S C` or `B 1 C`."""
    return (table + timestep.unflatten(-1, table.shape)).unbind(2)


def _self_attention(attention: Any, hidden: Tensor, tables: Sequence[Tensor]) -> Tensor:
    """Linear attention among the tokens `B S C`. Kept are query, key, value and the result."""
    inputs = [layer(hidden) for layer in (attention.to_q, attention.to_k, attention.to_v)]
    attended = recomputed(partial(_attend, attention), *inputs, *tables)
    return _output(attention, attended)


def _cross_attention(attention: Any, hidden: Tensor, text: Tensor, mask: Tensor) -> Tensor:
    """Attention of tokens `B S C` to a text with the biases `B 1 L`."""
    heads = attention.heads
    # Kept, the transposed queries would be a view with symbolic strides, on which inductor fails.
    query = recomputed(partial(_by_head, attention.norm_q, heads), attention.to_q(hidden))
    key = _by_head(attention.norm_k, heads, attention.to_k(text))
    value = _by_head(None, heads, attention.to_v(text))
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask.unsqueeze(1))
    return _output(attention, attended.transpose(1, 2).flatten(2))


def _output(attention: Any, attended: Tensor) -> Tensor:
    """The output layer of an attention and its dropout, which are a list in the class."""
    return attention.to_out[1](attention.to_out[0](attended))


def _by_head(norm: Any, heads: int, x: Tensor) -> Tensor:
    """`B S C` as `B H S D`, past a norm over all heads if there is one."""
    normalised: Tensor = x if norm is None else norm(x)
    return normalised.unflatten(2, (heads, -1)).transpose(1, 2)


def _attend(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Linear attention, R(q) (R(k)ᵀ v) / (q · Σ k), of `B S C` tensors.

    q and k are past a norm and a ReLU. Since keys and values are multiplied first, the cost is
    linear in the tokens: R(k)ᵀ v is a D x D matrix per head. R, the rotation by position, is not
    part of the divisor (SANA-Video, arXiv 2509.24695).
    """
    query = query if attention.norm_q is None else attention.norm_q(query)
    key = key if attention.norm_k is None else attention.norm_k(key)
    query, key, value = (x.unflatten(2, (attention.heads, -1)) for x in (query, key, value))
    query = relu(query)  # B S H D
    key = relu(key)
    rotated_query = _rotate(query, cos, sin)
    rotated_key = _rotate(key, cos, sin)
    rotated_query, rotated_key, value = (
        x.transpose(1, 2).float() for x in (rotated_query, rotated_key, value)
    )  # B H S D
    divisor = query.transpose(1, 2) @ key.sum(dim=1).unsqueeze(-1) + 1e-15
    state = rotated_key.transpose(-1, -2) @ value  # B H D D
    out = rotated_query @ state * (1 / divisor)
    return out.transpose(1, 2).flatten(2).type_as(query)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours, rotated and rounded to the dtype of `x`.

    The tables have every number twice, for both members of a pair.
    """
    left, right = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos = cos[..., 0::2]
    sin = sin[..., 1::2]
    rotated = torch.stack([left * cos - right * sin, left * sin + right * cos], dim=-1)
    return rotated.flatten(-2).type_as(x)


def _feed_forward(layers: Any, hidden: Tensor) -> Tensor:
    """The gated convolutions of tokens `B T H W C`, returned as `B S C`."""
    samples = len(hidden)
    # Within frames, `B·T H W C`: 1 x 1, depthwise 3 x 3, 1 x 1.
    hidden = silu(_pointwise(layers.conv_inverted, hidden.flatten(0, 1)))
    value, gate = _centred(layers.conv_depth, hidden).chunk(2, dim=-1)
    hidden = _pointwise(layers.conv_point, value * silu(gate))
    # Between frames, `B T H·W C`: the class has a 2D convolution with the sides time and position.
    hidden = hidden.unflatten(0, (samples, -1)).flatten(2, 3)
    return (hidden + _centred(layers.conv_temp, hidden)).flatten(1, 2)


def _pointwise(layer: nn.Module, x: Tensor) -> Tensor:
    """A convolution of `N H W C` position by position, as a product."""
    if _is_bare(layer):
        return linear(x, layer.weight.flatten(1), layer.bias)
    return _channels_last(layer, x)


def _centred(layer: nn.Module, x: Tensor) -> Tensor:
    """A convolution of `N H W C` that keeps the size."""
    if _is_bare(layer) and not layer.weight.requires_grad:
        frozen = (layer.weight, layer.bias, layer.padding, layer.groups)
        return _channels_last(lambda images: FrozenConvolution.apply(images, *frozen), x)
    return _channels_last(layer, x)


def _channels_last(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A layer of `N C H W`, applied to `N H W C`."""
    return layer(x.movedim(-1, 1)).movedim(1, -1)


def _is_bare(layer: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether a convolution has no adapter, neither in it nor, as LyCORIS', around its forward.

    An adapter must be called, so only a bare layer may be replaced by its arithmetic.
    """
    return type(layer) is nn.Conv2d and "forward" not in vars(layer)


class FrozenConvolution(torch.autograd.Function):
    """A convolution with frozen weights, whose output has the size of its input.

    torch's own would save the input for the gradient of the weights, frozen or not.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any, groups: int
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.padding = padding
        ctx.groups = groups
        return conv2d(x, weight, bias, padding=padding, groups=groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        (weight,) = ctx.saved_tensors
        # Of the input, this gradient depends only on the shape. The result has the same, so its
        # gradient takes the place of the input, which was not saved.
        input_gradient, _, _ = torch.ops.aten.convolution_backward(
            grad_output=gradient,
            input=gradient,
            weight=weight,
            bias_sizes=None,
            stride=(1, 1),
            padding=ctx.padding,
            dilation=(1, 1),
            transposed=False,
            output_padding=(0, 0),
            groups=ctx.groups,
            output_mask=(True, False, False),
        )
        return input_gradient, None, None, None, None
