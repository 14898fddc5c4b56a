"""Optimizer in backward: updates each weight as soon as its gradient is complete.

So all gradients are never held at once. The optimizer is the usual one, applied to one parameter at
a time, so the weights are bit-identical to an update at the end of the step. The plan refuses
settings that need all gradients first.

`HostState` keeps the optimizer state in host memory; the state of a weight is on the device only
for its update.
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
from simpletuner.memory.offload.image import Span, is_wrapper, plain_tensors, rebuild
from simpletuner.memory.offload.side_stream import SideStream
from simpletuner.training.guard import norm_order, norms, not_finite, total_size

State = Mapping[str, Any]  # optimizer state of one weight


class GradientRelease:
    """Hooks on the trained parameters, called when the backward pass has accumulated a gradient.

    Args:
        parameters: trained parameters by name, without the modules of techniques.
        optimizer: optimizer of these and possibly other parameters.
        host: keeps their state in host memory; None if it stays on the device.

    Attributes:
        is_halfway: whether only some weights have been updated in the current step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        config: OptimizerConfig,
        host: HostState | None = None,
    ) -> None:
        self.is_halfway = False
        self.host = host
        self._parameters = parameters
        self._optimizer = optimizer
        self._config = config
        self._group_of: dict[nn.Parameter, int] = {}  # without the weights of techniques
        released = {*parameters.values()}
        for number, group in enumerate(optimizer.param_groups):
            for weight in group["params"]:
                if weight in released:
                    self._group_of[weight] = number
        # Norms of gradients, in the order of the backward pass.
        self._norms: dict[str, Tensor] = {}
        # What the updates of this step have changed in parameter groups, such as a count of steps.
        self._group_changes: dict[int, dict[str, Any]] = {}
        self._updates = False
        # Weak, since the garbage collector cannot see references from hooks and would never free
        # the model.
        release = WeakMethod(self._release)
        for name, parameter in parameters.items():
            # Called once `.grad` is set; plain tensor hooks are called earlier.
            parameter.register_post_accumulate_grad_hook(partial(_call, release, name))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context in which a backward pass updates weights; outside, it only drops gradients."""
        self._norms.clear()
        self._group_changes.clear()
        self._updates = True
        try:
            yield
        finally:
            self._updates = False

    def finish(self) -> None:
        """End a step: update the remaining parameters, and advance the state of each group once."""
        groups = self._optimizer.param_groups
        for number, changes in self._group_changes.items():
            groups[number].update(changes)
        self._group_changes.clear()
        released_groups = {*self._group_of.values()}
        self._step([group for number, group in enumerate(groups) if number not in released_groups])
        if self.host is not None:
            self.host.finish()
        self.is_halfway = False

    def gradient_size(self) -> dict[str, Tensor]:
        """The size of the last backward pass's gradient before clipping, as in `guard`."""
        # In the order of the parameters, not of the backward pass, since sums round differently.
        ordered = [self._norms[name] for name in self._parameters if name in self._norms]
        if not ordered:
            return {}
        return total_size(torch.cat(ordered), self._config)

    def not_finite(self) -> list[str]:
        """The weights with a NaN or infinite gradient, in the order of the backward pass."""
        return not_finite(self._norms)

    def _release(self, name: str, parameter: nn.Parameter) -> None:
        """Measure a complete gradient, update its weight, and free it."""
        assert parameter.grad is not None
        # Kept on the device, so that the host synchronises once for all.
        self._norms[name] = norms([parameter.grad], norm_order(self._config))
        if self._updates:
            limit = self._config.max_grad_norm
            # Clipping by norm would need all gradients; the plan refuses it.
            if limit > 0 and self._config.grad_clip_method == "value":
                parameter.grad.clamp_(-limit, limit)
            self.is_halfway = True
            self._update(parameter)
        parameter.grad = None

    def _update(self, parameter: nn.Parameter) -> None:
        """Update one parameter alone, with its group as it was before this step.

        Some optimizers count steps in the group, which must advance once per step, not per weight.
        So each update gets a copy of the group; what it changes is applied in `finish`.
        """
        number = self._group_of[parameter]
        before = self._optimizer.param_groups[number]
        group: dict[str, Any] = {}
        for key, value in before.items():
            # Cloned, since an optimizer may count in a tensor, in place.
            group[key] = value.clone() if isinstance(value, Tensor) else value
        group["params"] = [parameter]
        if self.host is not None:
            self.host.bring_to_device(parameter)
        self._step([group])
        if self.host is not None:
            self.host.send_to_host(parameter)
        changes = self._group_changes.setdefault(number, {})
        for key, value in group.items():
            if key != "params" and value is not before.get(key):
                changes[key] = value

    def _step(self, groups: list[dict[str, Any]]) -> None:
        """Update the parameters of these groups only."""
        all_groups = self._optimizer.param_groups
        self._optimizer.param_groups = groups
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = all_groups


def _call(
    release: Callable[[], Callable[[str, nn.Parameter], None] | None],
    name: str,
    weight: nn.Parameter,
) -> None:
    """Call the method of a weak reference, if its object still exists."""
    method = release()
    if method is not None:
        method(name, weight)


class HostState:
    """The state of one optimizer in pinned host memory.

    Copies run on a side stream during the backward pass: updated state is copied out, and the next
    state is prefetched in the order of the last step.

    Args:
        device: device of the weights. Without CUDA, copies are synchronous and save nothing.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._side = SideStream(device)
        self._host: dict[nn.Parameter, State] = {}
        # Copies on the device that have been started, and the events that complete them.
        self._prefetched: dict[nn.Parameter, tuple[State, torch.cuda.Event | None]] = {}
        # The weight after each weight, in the order of the last step; None is before the first.
        self._next: dict[nn.Parameter | None, nn.Parameter] = {}
        self._last: nn.Parameter | None = None

    def bring_to_device(self, parameter: nn.Parameter) -> None:
        """Put the state of a weight, if any, on the device before its update."""
        # Gradients complete in the same order in every step, so the last step's order is used for
        # prefetching.
        self._next[self._last] = parameter
        self._last = parameter
        if parameter not in self._host:
            return
        # Not prefetched: the first weight of a step, or one out of order.
        if parameter not in self._prefetched:
            self._prefetched[parameter] = self._fetch(parameter)
        state, arrived = self._prefetched.pop(parameter)
        self._optimizer.state[parameter] = dict(state)
        self._side.make_compute_wait(arrived)

    def send_to_host(self, parameter: nn.Parameter) -> None:
        """Copy the state of an updated weight to the host, and prefetch the next weight's state."""
        state = self._optimizer.state[parameter]
        self._keep(parameter, state)
        self._side.keep(state)
        following = self._next.get(parameter)
        if following is not None and following in self._host:
            self._prefetched[following] = self._fetch(following)

    def finish(self) -> None:
        """Wait for all copies at the end of a step."""
        self._side.finish()
        self._prefetched.clear()
        self._last = None

    def load(self, parameter: nn.Parameter, saved: State) -> None:
        """Take over the saved state of a weight, unchanged, on the CPU."""
        self._keep(parameter, saved)
        self.finish()

    def _fetch(self, parameter: nn.Parameter) -> tuple[State, torch.cuda.Event | None]:
        """A copy of a weight's state on the device, and the event that completes it."""
        allocate = partial(torch.empty_like, device=self._side.device)
        state = {key: self._copy(value, allocate) for key, value in self._host[parameter].items()}
        return state, self._side.end_of_copies()

    def _keep(self, parameter: nn.Parameter, state: State) -> None:
        """Copy a state to the host."""
        allocate: Callable[[Tensor], Tensor] = self._pinned_buffer
        if parameter in self._host:
            # Pinning is slow and states keep their shapes, so every step reuses the buffers of the
            # first, which come in the same order.
            buffers = _buffers_of(self._host[parameter])

            def allocate(part: Tensor) -> Tensor:
                return next(buffers)

        self._host[parameter] = {key: self._copy(value, allocate) for key, value in state.items()}
        # Checkpoints read the state here, as usual.
        self._optimizer.state[parameter] = self._host[parameter]

    def _copy(self, value: Any, allocate: Callable[[Tensor], Tensor]) -> Any:
        """A copy of a moment in the buffers from `allocate`; other values are unchanged."""
        if not _is_moment(value):
            return value
        parts = plain_tensors(value)
        # Allocated on the compute stream, which will free it.
        copies = [allocate(part) for part in parts]
        with self._side.after_compute():
            for copy, part in zip(copies, parts, strict=True):
                copy.copy_(part, non_blocking=True)
        return rebuild(value, iter(copies))

    def _pinned_buffer(self, part: Tensor) -> Tensor:
        return Span.of(part).view(self._side.host_memory(part.nbytes, self))


def _buffers_of(state: State) -> Iterator[Tensor]:
    """The plain tensors of all moments of a state."""
    for value in state.values():
        if _is_moment(value):
            yield from plain_tensors(value)


def _is_moment(value: Any) -> bool:
    """Whether a value is as large as a weight, unlike a step count."""
    return isinstance(value, Tensor) and (is_wrapper(value) or value.ndim > 0)
