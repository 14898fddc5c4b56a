"""Keeps the optimizer's state in host memory; a weight's state is on the device only while the weight is updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simpletuner.config.schema import SLOTS
from simpletuner.memory.offload.image import Span, leaves, page_lock, rebuild, whole_pages, wraps

State = Mapping[str, Any]


class HostState:
    """The state of one optimizer in page-locked host memory.

    Copies run on a side stream: updated state is copied out during the backward pass, while the next one is prefetched
    in the order of the last step.

    Args:
        device: of the weights. Without CUDA, copies are synchronous and save nothing.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host: dict[nn.Parameter, State] = {}
        self._leaving: deque[tuple[State, torch.cuda.Event]] = deque()
        self._arriving: dict[nn.Parameter, tuple[State, torch.cuda.Event | None]] = {}
        self._next: dict[nn.Parameter | None, nn.Parameter] = {}  # after each weight, in the order of the last step
        self._last: nn.Parameter | None = None

    def bring(self, parameter: nn.Parameter) -> None:
        """Put a weight's state on the device before its update, if it has any yet."""
        self._next[self._last], self._last = parameter, parameter
        if parameter in self._host:
            if parameter not in self._arriving:
                self._arriving[parameter] = self._fetch(parameter)
            state, arrived = self._arriving.pop(parameter)
            self._optimizer.state[parameter] = dict(state)
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)

    def leave(self, parameter: nn.Parameter) -> None:
        """Copy a weight's state to the host after its update, and the next one's to the device."""
        state = self._optimizer.state[parameter]
        self._keep(parameter, state)
        if self._side is not None:
            self._leaving.append((state, self._side.record_event()))
            if len(self._leaving) > SLOTS:  # the memory is only given back after the wait for its copy
                torch.cuda.current_stream(self._device).wait_event(self._leaving[0][1])
                self._leaving.popleft()
        following = self._next.get(parameter)
        if following is not None and following in self._host:
            self._arriving[following] = self._fetch(following)

    def finish(self) -> None:
        """Wait for all copies at the end of a step."""
        if self._side is not None:
            self._side.synchronize()
        self._leaving.clear()
        self._arriving.clear()
        self._last = None

    def load(self, states: Iterable[tuple[nn.Parameter, State]]) -> None:
        """Take over saved states of weights, on the CPU, exactly as they are."""
        for parameter, saved in states:
            self._keep(parameter, saved)
        self.finish()

    def _fetch(self, parameter: nn.Parameter) -> tuple[State, torch.cuda.Event | None]:
        """A copy of a weight's state on the device, and when it will be complete."""
        room = partial(torch.empty_like, device=self._device)
        state = {key: self._copy(value, room) for key, value in self._host[parameter].items()}
        return state, None if self._side is None else self._side.record_event()

    def _keep(self, parameter: nn.Parameter, state: State) -> None:
        rooms = (part for value in self._host.get(parameter, {}).values() if _moves(value) for part in leaves(value))
        room = (lambda part: next(rooms)) if parameter in self._host else self._buffer
        self._host[parameter] = {key: self._copy(value, room) for key, value in state.items()}
        self._optimizer.state[parameter] = self._host[parameter]

    def _copy(self, value: Any, room: Callable[[Tensor], Tensor]) -> Any:
        """A copy of a moment, whose parts go into `room` for each; anything else stays where it is."""
        if not _moves(value):
            return value
        parts = leaves(value)
        copies = [room(part) for part in parts]
        with self._beside():
            for copy, part in zip(copies, parts, strict=True):
                copy.copy_(part, non_blocking=True)
        return rebuild(value, iter(copies))

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
    """Whether a value is as large as a weight, unlike a count of steps."""
    return isinstance(value, Tensor) and (wraps(value) or value.ndim > 0)
