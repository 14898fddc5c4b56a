"""Which blocks the backward pass reaches.

No weight is trained below the first one that is, so no gradient is needed there: neither gradients
nor inputs of these blocks are kept, and nothing of them is recomputed.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter


class BackwardPass:
    """Tells which calls of blocks the backward pass reaches."""

    def __init__(self) -> None:
        # By block, listed in the first step, when whatever is trained has been added to it.
        self._weights: dict[nn.Module, list[nn.Parameter]] = {}

    def reaches(self, block: nn.Module, *inputs: Any) -> bool:
        """Whether a call of a block needs a gradient.

        A block needs one for its trained weights, and for inputs that depend on trained weights: of
        earlier blocks, of the layers before all blocks, or of a technique's hooks.
        """
        if block not in self._weights:
            self._weights[block] = list(block.parameters())
        return any(map(_requires_gradient, chain(self._weights[block], tree_iter(inputs))))

    def prepare(self, block: nn.Module, hidden: Tensor, *others: Any) -> Tensor:
        """Hidden states that require a gradient if the call needs one.

        So all blocks from the first one on that needs a gradient share a compiled version.
        """
        if torch.is_grad_enabled() and self.reaches(block, hidden, *others):
            return with_gradient(hidden)
        return hidden


def _requires_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def with_gradient(hidden: Tensor) -> Tensor:
    """Hidden states that require a gradient, like the outputs of blocks that need one."""
    return hidden if hidden.requires_grad else hidden.detach().requires_grad_()


def gradients_as_needed(hidden: Tensor) -> torch.set_grad_enabled:
    """A context for a call with prepared hidden states: without gradients if it needs none.

    Then it runs the version that previews do.
    """
    return torch.set_grad_enabled(torch.is_grad_enabled() and hidden.requires_grad)
