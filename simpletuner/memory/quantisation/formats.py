"""The interface of packed weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn


class WeightFormat(Protocol):
    """Computes with the tensors of a packed weight `out in`."""

    def unpack(self, *packed: Tensor) -> Tensor:
        """The weight `out in` in the compute dtype."""

    def product(self, inputs: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
        """`inputs` (..., in) times the weight plus the bias: (..., out)."""
        return nn.functional.linear(inputs, self.unpack(*packed), bias)

    def input_gradient(self, gradient: Tensor, *packed: Tensor) -> Tensor:
        """The gradient of the inputs (..., in) for the gradient of the product (..., out)."""
        return gradient @ self.unpack(*packed)


Packed = tuple[WeightFormat, Mapping[str, Tensor]]
