"""LoRA with fewer matmuls (`speed_fused_lora`).

Layers with the same input x (T K), weights Wᵢ and adapters Aᵢ (r K), Bᵢ compute yᵢ = x Wᵢᵀ + s (x Aᵢᵀ) Bᵢᵀ, with three
matmuls per layer in peft. Here, all A are one matmul, h = s x [A₁; A₂; ...]ᵀ, and then, with a block-diagonal B,

    [y₁ | y₂ | ...] = [x | h] · [W | B]ᵀ             one matmul for all layers, which adds in its accumulators

on a GPU, if the weights are plain and stay on the device. For other weights (quantised, streamed, sharded), and on
CPUs, where the zeros of [W | B] cost more than the additions they save, h Bᵢᵀ is added to the output of each layer.

Elementwise traffic of q, k, v and the query of cross-attention, in units of one tensor T K: peft reads x, and writes
and reads h Bᵀ, for each layer: 12. Here, [x | h] is written beside x, and x read once, for each of two inputs: 4.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn.functional import linear

from simpletuner.models.blocks import FastBlocks
from simpletuner.training.lora import ADAPTER

PACKED_ON = ("cuda",)  # device types on which the wide matmul is faster
# cuBLAS loses the fast path of tensor cores if 16-bit rows do not start at multiples of 16 bytes.
MULTIPLE = 8

logger = logging.getLogger(__name__)


class SharedInput:
    """Layers that read the same input, each with a LoRA of one rank and scale.

    Attributes:
        layers: peft's layers.
        bases, downs, ups: their frozen layers, A and B. Stored here because compiled code guards every attribute on the
            path to a tensor.
        packed: [W | B] of all layers, with the layers' weights as views; None for separate matmuls.
        bias: bias of all layers, with `packed`; None if they have none.
        is_fused: false to let peft compute, for comparison.
    """

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        self.layers = tuple(layers)
        self.bases: tuple[Any, ...] = tuple(layer.base_layer for layer in layers)
        self.downs, self.ups = (
            tuple(each[ADAPTER].weight for each in matrices)
            for matrices in zip(*((layer.lora_A, layer.lora_B) for layer in layers), strict=True)
        )
        self.packed: Tensor | None = None
        self.bias: Tensor | None = None
        self.is_fused = True

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """The layers' outputs, each (..., out), of an input (..., K)."""
        first = self.layers[0]
        # peft handles disabled adapters (a teacher) and additional adapters (previews).
        if not self.is_fused or first.disable_adapters or first.merged or first.active_adapters != [ADAPTER]:
            return [layer(x) for layer in self.layers]
        down, scale = torch.cat(self.downs).to(x.dtype), first.scaling[ADAPTER]
        if self.packed is None:
            thin = (linear(x, down) * scale).chunk(len(self.ups), dim=-1)
            parts = zip(self.bases, thin, self.ups, strict=True)
            return [base(x) + linear(part, up.to(x.dtype)) for base, part, up in parts]
        out: Tensor = WideProduct.apply(x.flatten(0, -2), down, self.packed, self.bias, scale, *self.ups)
        return out.unflatten(0, x.shape[:-1]).split([len(up) for up in self.ups], dim=-1)

    def pack(self) -> bool:
        """Move plain GPU weights into one matrix with columns for B; returns False for other weights."""
        weights = [base.weight.detach() for base in self.bases if type(base) is nn.Linear]
        if len(weights) < len(self.bases) or weights[0].device.type not in PACKED_ON:
            return False
        rows, width = [len(weight) for weight in weights], weights[0].shape[1]
        columns = width + sum(map(len, self.downs))
        if columns % MULTIPLE:
            return False
        self.packed = weights[0].new_zeros(sum(rows), columns)
        for base, part in zip(self.bases, self.packed[:, :width].split(rows), strict=True):
            base.weight.data = part.copy_(base.weight.detach())
        if self.bases[0].bias is not None:
            self.bias = torch.cat([base.bias.detach() for base in self.bases])
        return True

    def places(self) -> Iterator[Tensor]:
        """The view of each B in [W | B]."""
        assert self.packed is not None
        row, column = 0, self.packed.shape[1] - sum(map(len, self.downs))
        for width, rank in (up.shape for up in self.ups):
            # `data`, since a second forward pass copies the same numbers and must not invalidate saved tensors.
            yield self.packed.data[row : row + width, column : column + rank]
            row, column = row + width, column + rank


class WideProduct(torch.autograd.Function):
    """[x | h] · [W | B]ᵀ + bias, with h = scale · x Aᵀ; W is frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, down: Tensor, packed: Tensor, bias: Tensor | None, scale: float, *ups: Tensor
    ) -> Tensor:
        wide = torch.cat([x, (x @ down.t()) * scale], dim=1)
        ctx.save_for_backward(wide, down, packed)
        ctx.scale, ctx.rows, ctx.dtypes = scale, [len(up) for up in ups], [up.dtype for up in ups]
        return linear(wide, packed, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        wide, down, packed = ctx.saved_tensors
        width = down.shape[1]
        # dx of the frozen part, and the gradient of h
        both = gradient @ packed
        thin = both[:, width:] * ctx.scale
        inputs = both[:, :width] + thin @ down if ctx.needs_input_grad[0] else None
        # Only the diagonal blocks are gradients; on tensor cores, separate matmuls take as long.
        blocks = gradient.t() @ wide[:, width:]
        rank = len(down) // len(ctx.rows)
        parts = zip(blocks.split(ctx.rows), ctx.dtypes, strict=True)
        ups = [part[:, i * rank : (i + 1) * rank].to(dtype) for i, (part, dtype) in enumerate(parts)]
        return (inputs, thin.t() @ wide[:, :width], None, None, None, *ups)


class FusedLora:
    """The groups of a transformer's layers that share an input and all have a LoRA.

    Args:
        pack: pack plain weights on a GPU; they and B must not change between a forward pass and its backward pass.
    """

    def __init__(self, transformer: nn.Module, fast: FastBlocks, *, pack: bool) -> None:
        self.groups: list[SharedInput] = []
        self._packed: list[SharedInput] | None = None
        for module, names in fast.shared_inputs:
            attention: Any = module
            layers = [attention.get_submodule(name) for name in names]
            if all(isinstance(layer, LoraLinear) for layer in layers):
                self.groups.append(SharedInput(layers))
                others = attention.shared_inputs if attention.fused_projections else {}
                attention.shared_inputs, attention.fused_projections = {**others, names: self.groups[-1]}, True
        if not self.groups:
            logger.warning("speed_fused_lora has no effect: no layers that share an input all have a LoRA.")
        elif pack:
            transformer.register_forward_pre_hook(self._refresh)

    def _refresh(self, *call: Any) -> None:
        """Copy every B beside its weight before each forward pass.

        Optimizers, checkpoints and averages write to B, some without incrementing autograd's version counter.
        """
        if self._packed is None:  # the weights are on their final device by now, or on the CPU for streamed blocks
            self._packed = [group for group in self.groups if group.pack()]
        if self._packed:
            places = [place for group in self._packed for place in group.places()]
            torch._foreach_copy_(places, [up.detach() for group in self._packed for up in group.ups])

    def is_updated(self) -> bool:
        """Whether a B is not 0, so that A has a gradient."""
        return any(bool(group.ups[0].any()) for group in self.groups[:1])

    @contextmanager
    def separate(self) -> Iterator[None]:
        """A context in which peft computes every layer separately."""
        for group in self.groups:
            group.is_fused = False
        try:
            yield
        finally:
            for group in self.groups:
                group.is_fused = True
