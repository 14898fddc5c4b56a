"""What blocks compute in the forward pass of a micro-step, for techniques that compare it with something.

Activation checkpointing runs a block, and the hooks on it, a second time in the backward pass. The tensors of that
run are no part of the step's graph, so hooks here look only while a forward pass is `open`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from simpletuner.models.adapter import BlockLayout


class HiddenStates:
    """The tokens that visual blocks return; nothing is kept of blocks that nobody watches.

    Hooks are outside of what is compiled or streamed, both of which happens in a block's `forward`.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._watched: set[int] = set()
        self._found: dict[int, Tensor] = {}
        self._is_open = False

    def watch(self, block: int) -> None:
        """Keep the output of a visual block in every micro-step from now on.

        Raises:
            ValueError: the model has no such block.
        """
        blocks = self._layout.visual_blocks
        if not 0 <= block < len(blocks):
            raise ValueError(f"block {block} is not one of the model's {len(blocks)} blocks, 0 to {len(blocks) - 1}")
        if block not in self._watched:
            self._watched.add(block)
            # Before other hooks: what the block returned, without the tokens that a route puts back behind it.
            blocks[block].register_forward_hook(partial(self._keep, block), prepend=True)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around the forward pass of a micro-step and everything that reads its hidden states."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._found.clear()

    def __getitem__(self, block: int) -> Tensor:
        """The tokens `B S D` of a watched block, part of the graph; `S` are those that went through it."""
        return self._found[block]

    def _keep(self, block: int, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._is_open:
            self._found[block] = self._layout.tokens_of(block, output)
