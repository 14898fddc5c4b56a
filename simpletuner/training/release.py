"""Updates each weight as soon as its gradient is complete (optimizer in backward), so gradients are never held at once.

The optimizer is the usual one, restricted to one parameter at a time, so the weights are those of an update at the end
of the step, bit for bit. What needs all gradients first is refused by the plan: the key excludes it.

`HostState` keeps the optimizer's state in host memory, and a weight's state on the device only for its update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simpletuner.config.schema import OptimizerConfig
from simpletuner.memory.offload.beside import SideStream
from simpletuner.memory.offload.image import Span, leaves, rebuild, wraps
from simpletuner.training.guard import norm_order, norms, not_finite, total_size

State = Mapping[str, Any]  # of one weight, as an optimizer keeps it


class GradientRelease:
    """Hooks on the trained parameters, called when the backward pass has added up a gradient.

    Args:
        parameters: trained, by name; not the modules of techniques.
        optimizer: over these parameters, and perhaps others.
        host: keeps their state in host memory; None if it stays on the device.

    Attributes:
        is_halfway: some weights of the step in progress are updated, and others are not.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        config: OptimizerConfig,
        host: HostState | None = None,
    ) -> None:
        self.is_halfway, self.host = False, host
        self._parameters, self._optimizer, self._config = parameters, optimizer, config
        groups = optimizer.param_groups
        mine = {*parameters.values()}
        self._group = {weight: n for n, group in enumerate(groups) for weight in group["params"] if weight in mine}
        self._norms: dict[str, Tensor] = {}  # of gradients, in the order of the backward pass
        self._after: dict[int, dict[str, Any]] = {}  # what this step has changed in parameter groups
        self._updates = False
        # Weak: the garbage collector does not see what a weight's hooks refer to, and would never free the model.
        release = WeakMethod(self._release)
        for name, parameter in parameters.items():
            # Called once `.grad` is set; a plain tensor hook comes before.
            parameter.register_post_accumulate_grad_hook(partial(_call, release, name))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context in which a backward pass updates the weights; elsewhere it only drops their gradients."""
        self._norms.clear()
        self._after.clear()
        self._updates = True
        try:
            yield
        finally:
            self._updates = False

    def finish(self) -> None:
        """End a step: update the remaining parameters, and advance the state of the groups once."""
        groups = self._optimizer.param_groups
        for number, group in self._after.items():
            groups[number].update(group)
        self._after.clear()
        self._step([group for number, group in enumerate(groups) if number not in self._group.values()])
        if self.host is not None:
            self.host.finish()
        self.is_halfway = False

    def gradient_size(self) -> dict[str, Tensor]:
        """The size before clipping of the gradient of the last backward pass, as by `guard.gradient_size`."""
        # In the order of the parameters, not of the backward pass: sums round differently.
        ordered = [self._norms[name] for name in self._parameters if name in self._norms]
        return total_size(torch.cat(ordered), self._config) if ordered else {}

    def not_finite(self) -> list[str]:
        """The weights whose gradient was NaN or infinite, in the order of the backward pass."""
        return not_finite(self._norms)

    def _release(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        # Kept on the device: the host waits for all of them at once.
        self._norms[name] = norms([parameter.grad], norm_order(self._config))
        if self._updates:
            limit = self._config.max_grad_norm
            # By norm would need all gradients; the plan refuses it.
            if limit > 0 and self._config.grad_clip_method == "value":
                parameter.grad.clamp_(-limit, limit)
            self.is_halfway = True
            self._update(parameter)
        parameter.grad = None

    def _update(self, parameter: nn.Parameter) -> None:
        """Update one parameter, with its group in the state before this step: some optimizers count steps there."""
        number = self._group[parameter]
        before = self._optimizer.param_groups[number]
        # Cloned: an optimizer may count steps in a tensor of its group, in place and once per weight.
        copied = {key: each.clone() if isinstance(each, Tensor) else each for key, each in before.items()}
        after = {**copied, "params": [parameter]}
        if self.host is not None:
            self.host.bring(parameter)
        self._step([after])
        if self.host is not None:
            self.host.leave(parameter)
        changes = {key: each for key, each in after.items() if key != "params" and each is not before.get(key)}
        self._after.setdefault(number, {}).update(changes)

    def _step(self, groups: list[dict[str, Any]]) -> None:
        whole = self._optimizer.param_groups
        self._optimizer.param_groups = groups
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = whole


def _call(release: Callable[[], Callable[[str, nn.Parameter], None] | None], name: str, weight: nn.Parameter) -> None:
    if (method := release()) is not None:
        method(name, weight)


class HostState:
    """The state of one optimizer in page-locked host memory.

    Copies run on a side stream: updated state is copied out during the backward pass, while the next one is prefetched
    in the order of the last step.

    Args:
        device: of the weights. Without CUDA, copies are synchronous and save nothing.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._side = optimizer, SideStream(device)
        self._host: dict[nn.Parameter, State] = {}
        self._arriving: dict[nn.Parameter, tuple[State, torch.cuda.Event | None]] = {}
        self._next: dict[nn.Parameter | None, nn.Parameter] = {}  # after each weight, in the order of the last step
        self._last: nn.Parameter | None = None

    def bring(self, parameter: nn.Parameter) -> None:
        """Put a weight's state on the device before its update, if it has any yet."""
        # Gradients are complete in the same order in every step, so the last one says what to prefetch.
        self._next[self._last], self._last = parameter, parameter
        if parameter in self._host:
            # The first weight of a step, or one out of the usual order.
            if parameter not in self._arriving:
                self._arriving[parameter] = self._fetch(parameter)
            state, arrived = self._arriving.pop(parameter)
            self._optimizer.state[parameter] = dict(state)
            self._side.hold_compute(arrived)

    def leave(self, parameter: nn.Parameter) -> None:
        """Copy a weight's state to the host after its update, and the next one's to the device."""
        state = self._optimizer.state[parameter]
        self._keep(parameter, state)
        self._side.keep(state)
        following = self._next.get(parameter)
        if following is not None and following in self._host:
            self._arriving[following] = self._fetch(following)

    def finish(self) -> None:
        """Wait for all copies at the end of a step."""
        self._side.finish()
        self._arriving.clear()
        self._last = None

    def load(self, parameter: nn.Parameter, saved: State) -> None:
        """Take over a weight's saved state, on the CPU, exactly as it is."""
        self._keep(parameter, saved)
        self.finish()

    def _fetch(self, parameter: nn.Parameter) -> tuple[State, torch.cuda.Event | None]:
        """A copy of a weight's state on the device, and when it will be complete."""
        room = partial(torch.empty_like, device=self._side.device)
        state = {key: self._copy(value, room) for key, value in self._host[parameter].items()}
        return state, self._side.complete()

    def _keep(self, parameter: nn.Parameter, state: State) -> None:
        # Page-locking is slow and states keep their shapes, so every step copies into the buffers of the first.
        rooms = (part for value in self._host.get(parameter, {}).values() if _moves(value) for part in leaves(value))
        room = (lambda part: next(rooms)) if parameter in self._host else self._buffer
        self._host[parameter] = {key: self._copy(value, room) for key, value in state.items()}
        # Checkpoints read the state where they always do.
        self._optimizer.state[parameter] = self._host[parameter]

    def _copy(self, value: Any, room: Callable[[Tensor], Tensor]) -> Any:
        """A copy of a moment, whose parts go into `room` for each; anything else stays where it is."""
        if not _moves(value):
            return value
        parts = leaves(value)
        # Allocated on the compute stream, which will free it.
        copies = [room(part) for part in parts]
        with self._side.after_compute():
            for copy, part in zip(copies, parts, strict=True):
                copy.copy_(part, non_blocking=True)
        return rebuild(value, iter(copies))

    def _buffer(self, part: Tensor) -> Tensor:
        return Span.of(part).view(self._side.host_memory(part.nbytes, self))


def _moves(value: Any) -> bool:
    """Whether a value is as large as a weight, unlike a count of steps."""
    return isinstance(value, Tensor) and (wraps(value) or value.ndim > 0)
