"""Measures the gradient error of products in the type of a quantised base."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from simpletuner.memory.precision import QuantisedLinear, ScaledRows
from simpletuner.models.blocks import FastBlocks, call_kernel
from simpletuner.speed.compile import gradient_error, with_gradient

logger = logging.getLogger(__name__)


class FirstGradients:
    """`forward` of a block that logs the error of its gradients in the first training call.

    It uses the run's batch, because the error depends on outliers, which random inputs lack. The reference multiplies
    the unpacked weights, so rounding of the weights does not count. Both run uncompiled, with equal dropout.

    Args:
        name: of the products, in the log.
        fast: the state of fast blocks.
    """

    def __init__(self, name: str, block: nn.Module, fast: FastBlocks | None) -> None:
        self.name, self.block, self.fast = name, block, fast
        self.eager = self.forward = block.forward
        self.pieces = dict(fast.pieces) if fast is not None else {}
        self.is_pending = True

    def install(self) -> None:
        """Replace `forward`; the block may have been compiled since the construction."""
        self.forward = self.block.forward
        self.block.forward = self

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self.is_pending and torch.is_grad_enabled():
            self.is_pending = False
            self._log(with_gradient(inputs[0]), *inputs[1:], **named)
        return self.forward(*inputs, **named)

    def _log(self, *inputs: Any, **named: Any) -> None:
        devices = [inputs[0].device] if inputs[0].is_cuda else []
        with torch.random.fork_rng(devices), self._uncompiled():
            error = gradient_error(self.block, self._plain, self._quantised, inputs, named)
        message = "%s products: on the first batch, gradients of block 0 differ by up to %.1e from unpacked products."
        logger.info(message, self.name, error)

    def _plain(self, *inputs: Any, **named: Any) -> Any:
        layers = [each for each in self.block.modules() if isinstance(each, QuantisedLinear)]
        forms = [each.form for each in layers]
        for layer in layers:
            layer.form = ScaledRows()
        try:
            return self._quantised(*inputs, **named)
        finally:
            for layer, form in zip(layers, forms, strict=True):
                layer.form = form

    def _quantised(self, *inputs: Any, **named: Any) -> Any:
        torch.manual_seed(0)
        return self.eager(*inputs, **named)

    @contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Uncompiled pieces, and attention that checkpointing does not record."""
        if self.fast is None:
            yield
            return
        compiled = dict(self.fast.pieces)
        self.fast.pieces.update(self.pieces)
        try:
            with self.fast.self_attention.through(call_kernel):
                yield
        finally:
            self.fast.pieces.update(compiled)
