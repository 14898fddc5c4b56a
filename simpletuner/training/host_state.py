"""Keeps the optimizer's state in host memory; a weight's state is on the device only while the weight is updated.

Copies run on a side stream. The state of the weight that came next in the last step is copied ahead, and what has been
updated leaves while the backward pass goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simpletuner.config.schema import SLOTS
from simpletuner.memory.offload.image import Span, leaves, page_lock, rebuild, whole_pages, wraps

State = dict[str, Any]


class HostState:
    """The state of one optimizer in page-locked host memory.

    Args:
        device: of the weights. Without CUDA, copies are synchronous and save nothing.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: dict[nn.Parameter, nn.Parameter] = {}  # in the order of the last step
        self._last: nn.Parameter | None = None
        self._host: dict[nn.Parameter, State] = {}
        self._coming: dict[nn.Parameter, State] = {}
        self._leaving: deque[tuple[State, torch.cuda.Event]] = deque()

    def bring(self, parameter: nn.Parameter) -> None:
        """Put a weight's state on the device, where it has any, and start to copy that of the next one."""
        for each in (parameter, self._next.get(parameter)):
            if each is not None and each in self._host and each not in self._coming:
                self._coming[each] = {key: self._fetched(value) for key, value in self._host[each].items()}
            if each is parameter and self._side is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._side)
        if parameter in self._coming:
            self._optimizer.state[parameter] = self._coming.pop(parameter)
        if self._last is not None:
            self._next[self._last] = parameter
        self._last = parameter

    def leave(self, parameter: nn.Parameter) -> None:
        """Copy a weight's state to the host after its update."""
        state = self._optimizer.state[parameter]
        host = self._host.get(parameter) or {key: self._room(value) for key, value in state.items()}
        self._host[parameter] = {key: self._stored(host[key], value) for key, value in state.items()}
        self._optimizer.state[parameter] = self._host[parameter]
        if self._side is not None:
            self._leaving.append((state, self._side.record_event()))
            if len(self._leaving) > SLOTS:  # its memory is free when the copy is complete
                torch.cuda.current_stream(self._device).wait_event(self._leaving.popleft()[1])

    def finish(self) -> None:
        """Wait for all copies at the end of a step."""
        self._last = None
        if self._side is not None:
            self._side.synchronize()
        self._leaving.clear()

    def load(self, state: Mapping[nn.Parameter, State]) -> None:
        """Take over a saved state, on the CPU, exactly as it was saved."""
        self._coming.clear()
        for parameter, values in state.items():
            host = {key: self._room(value) for key, value in values.items()}
            self._host[parameter] = {key: self._stored(host[key], value) for key, value in values.items()}
            self._optimizer.state[parameter] = self._host[parameter]
        self.finish()

    def _fetched(self, value: Any) -> Any:
        if not _moves(value):
            return value
        parts = leaves(value)
        there = [torch.empty_like(part, device=self._device) for part in parts]
        with self._beside():
            for one, part in zip(there, parts, strict=True):
                one.copy_(part, non_blocking=True)
        return rebuild(value, iter(there))

    def _stored(self, host: Any, value: Any) -> Any:
        if not _moves(value):
            return value
        with self._beside():
            for one, part in zip(leaves(host), leaves(value), strict=True):
                one.copy_(part, non_blocking=True)
        return host

    def _room(self, value: Any) -> Any:
        """Page-locked memory for a tensor."""
        if not _moves(value):
            return value
        return rebuild(value, iter([self._buffer(part) for part in leaves(value)]))

    def _buffer(self, part: Tensor) -> Tensor:
        flat = whole_pages(part.nbytes)
        if self._side is not None:
            page_lock(flat, self)
        return Span.of(part).view(flat)

    def _beside(self) -> AbstractContextManager[object]:
        """The side stream, after waiting for the compute up to this point."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._side)


def _moves(value: Any) -> bool:
    """Whether a value is as large as a weight: counts of steps stay where they are."""
    return isinstance(value, Tensor) and (wraps(value) or value.ndim > 0)
