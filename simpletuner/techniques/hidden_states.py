"""Hidden states of blocks in the forward pass of a micro-step, for techniques that use them in a loss.

Activation checkpointing runs a block and its hooks a second time in the backward pass. The tensors of that second run
are not part of the step's graph, so the hooks here record only while a forward pass is `open`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from simpletuner.models.adapter import BlockLayout


class HiddenStates:
    """The output tokens of watched visual blocks. Compilation and streaming replace a block's `forward`; hooks run
    outside it, independent of both.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self._watched: set[int] = set()
        self._found: dict[int, Tensor] = {}
        self._is_open = False

    def watch(self, block: int) -> None:
        """Record the output of a visual block in every micro-step from now on.

        Raises:
            ValueError: the model has no such block.
        """
        blocks = self._layout.visual_blocks
        if not 0 <= block < len(blocks):
            raise ValueError(f"block {block} is not one of the model's {len(blocks)} blocks, 0 to {len(blocks) - 1}")
        if block not in self._watched:
            self._watched.add(block)
            # First of all hooks, to record the output before TREAD merges skipped tokens.
            blocks[block].register_forward_hook(partial(self._keep, block), prepend=True)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record within this context, which must span the forward pass and all reads of its hidden states."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._found.clear()

    def __getitem__(self, block: int) -> Tensor:
        """The output `B S D` of a watched block, part of the graph; `S` counts the tokens that passed through it."""
        return self._found[block]

    def _keep(self, block: int, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self._is_open:
            self._found[block] = self._layout.tokens_of(block, output)
