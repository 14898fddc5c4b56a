"""TREAD: during training, a random share of the tokens skips a range of blocks.

Krause et al., "TREAD: Token Routing for Efficient Architecture-agnostic Diffusion Training", arXiv
2501.04765. At the first block of a route, the kept tokens are gathered, with their rows of every
per-token table (such as rotary embeddings); after its last block, they are scattered back among the
skipped tokens, which are unchanged. The loss covers all tokens.

Routing is done in forward hooks of single blocks. They do nothing without gradients, so previews
use the whole model. Activation checkpointing runs a block and its hooks again in the backward pass,
so the kept tokens are drawn before the forward pass, and a route keeps its tensors until the end of
the micro-step's backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.config.techniques.tread import Route, count_kept
from simpletuner.diffusion.batch import Batch, NoisyBatch, upload
from simpletuner.models.adapter import TokenRouting
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.techniques.base import Predict, Site, Technique


class Tread(Technique):
    """Routes tokens around blocks."""

    def __init__(self, spec: TreadSpec) -> None:
        self.routes = spec.routes

    def attach(self, site: Site) -> None:
        layout = site.layout
        spec = site.adapter.spec
        if layout.routing is None:
            raise ValueError(f"{spec.title} does not support token routing")
        self._layout = layout
        self._unit = layout.routing.unit
        self._spec = spec
        self._world = site.world
        blocks = layout.visual_blocks
        self._windows = [
            _Window(route.among(len(blocks)), blocks, layout.routing) for route in self.routes
        ]

    @contextmanager
    def acting(self, batch: Batch) -> Iterator[None]:
        """Stop routing after the backward pass."""
        try:
            yield
        finally:
            for window in self._windows:
                window.begin(None)

    def before_forward(self, noisy: NoisyBatch, predict: Predict) -> NoisyBatch:
        """Draw the tokens that each route keeps in this micro-step."""
        place = noisy.place_for("TREAD")
        protected = self._protected(noisy)
        # Tiles of block-sparse attention are kept or dropped as a whole.
        units = self._spec.tokens(*noisy.noisy_latents.shape[2:]) // self._unit
        # The number of kept units is constant across steps, so that compiled blocks see one shape,
        # unless a sample has more protected units.
        most_protected = 0 if protected is None else int(protected.sum(1).max())
        if noisy.batch.loss_mask is not None:
            # Masks differ between samples, so also between processes, which need equal shapes.
            most_protected = max(self._world.gather(most_protected))
        for number, window in enumerate(self._windows):
            count = max(count_kept(window.route.ratio, units), most_protected)
            kept = draw_kept(units, count, protected, place.generators(f"tread {number}"))
            if kept.shape[1] == units:
                window.begin(None)
            else:
                tokens = whole_units(kept, self._unit)
                window.begin(upload(tokens, noisy.sigmas.device))
        return noisy

    def kept_tokens(self, block: int) -> Tensor | None:
        """The tokens that pass through a block, in ascending order, on the device of the batch.

        `HiddenStates` records the output of the block itself, so even the last block of a window
        has only these tokens.
        """
        for window in self._windows:
            if window.route.holds(block):
                return window.kept
        return None

    def _protected(self, noisy: NoisyBatch) -> Tensor | None:
        """Units with a protected position, which are always kept; bool `B N` on the CPU."""
        if noisy.protected is None:
            return None
        samples, _, frames, height, width = noisy.noisy_latents.shape
        side = self._spec.patch_size
        # On the CPU, where masks have a copy: the number of kept tokens is a shape, which the host
        # needs.
        positions = noisy.protected.cpu().expand(samples, 1, frames, height, width)[:, 0]
        patches = positions.unflatten(-1, (-1, side)).unflatten(-3, (-1, side))  # B F h p w p
        # One protected position protects its token.
        tokens = patches.any(-1).any(-2)  # B F h w
        order = self._layout.order(*tokens.shape[1:])
        return tokens.flatten(1)[:, order].unflatten(-1, (-1, self._unit)).any(-1)


class _Window:
    """The hooks of one route and their state in the current micro-step."""

    def __init__(self, route: Route, blocks: Sequence[nn.Module], routing: TokenRouting) -> None:
        self.route = route
        self.routing = routing
        self.begin(None)
        for number in range(route.first, route.last + 1):
            # Tables are arguments of every block; tokens are gathered only at the first block.
            blocks[number].register_forward_pre_hook(
                partial(self._enter, opens=number == route.first)
            )
        blocks[route.last].register_forward_hook(self._leave)

    def begin(self, kept: Tensor | None) -> None:
        """Start a micro-step that keeps these tokens, `B K`; None keeps all."""
        self.kept = kept
        self._all_tokens: Tensor | None = None
        self._tables: dict[int, Any] = {}

    def _enter(
        self, block: nn.Module, inputs: tuple[Any, ...], *, opens: bool
    ) -> tuple[Any, ...] | None:
        if self.kept is None or not torch.is_grad_enabled():
            return None
        shortened = list(inputs)
        if opens:
            # The tokens that skip the window wait here for `_leave`.
            self._all_tokens = inputs[0]
            if not self._tables:  # recomputation reuses the forward pass's tensors
                for argument, take in self.routing.tables.items():
                    self._tables[argument] = take(inputs[argument], self.kept)
            shortened[0] = inputs[0].gather(1, _rows(self.kept, inputs[0]))
        for argument, table in self._tables.items():
            shortened[argument] = table
        return tuple(shortened)

    def _leave(self, block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if self.kept is None or self._all_tokens is None or not torch.is_grad_enabled():
            return None
        all_tokens = self._all_tokens.scatter(1, _rows(self.kept, output), output)
        # Recomputing this block needs only the shape; the graph would keep activations of earlier
        # blocks alive.
        self._all_tokens = self._all_tokens.detach()
        return all_tokens


def draw_kept(
    units: int, count: int, protected: Tensor | None, generators: Sequence[torch.Generator]
) -> Tensor:
    """Draw the units to keep for each sample: int64 `B count`, ascending, on the CPU.

    Args:
        protected: units that are always kept; bool, `B units`, on the CPU, or None.
        generators: one per sample, on the CPU.
    """
    chances = torch.stack([torch.rand(units, generator=generator) for generator in generators])
    if protected is not None:
        chances = chances + protected  # drawn from [0, 1), so protected units come first
    return chances.topk(count, dim=1).indices.sort(dim=1).values


def whole_units(units: Tensor, size: int) -> Tensor:
    """The tokens of units of `size` consecutive tokens: `B K` to `B K*size`."""
    return (units[..., None] * size + torch.arange(size)).flatten(1)


def _rows(kept: Tensor, tokens: Tensor) -> Tensor:
    """The index `B K D` for `gather` and `scatter` of whole tokens, a view without memory."""
    return kept[..., None].expand(-1, -1, tokens.shape[-1])
