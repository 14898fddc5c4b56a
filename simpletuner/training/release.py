"""Updates each weight as soon as its gradient is complete (optimizer in backward), so gradients are never held at once.

The optimizer is the usual one, restricted to one parameter at a time, so the weights are those of an update at the end
of the step, bit for bit. What needs all gradients first is refused by the plan (`check_release`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simpletuner.config.schema import OptimizerConfig
from simpletuner.training.gradients import gradient_error
from simpletuner.training.host_state import HostState


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
        self._names, self._optimizer, self._config = [*parameters], optimizer, config
        groups = optimizer.param_groups
        mine = {*parameters.values()}
        self._group = {each: n for n, group in enumerate(groups) for each in group["params"] if each in mine}
        self._sizes: dict[str, Tensor] = {}  # in the order of the backward pass
        self._after: dict[int, dict[str, Any]] = {}  # what this step has changed in parameter groups
        self._updates = False
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._release, name))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context in which a backward pass updates the weights; elsewhere it only drops their gradients."""
        self._sizes.clear()
        self._after.clear()
        self._updates = True
        try:
            yield
        finally:
            self._updates = False

    def finish(self) -> None:
        """End a step: update what else the optimizer has a gradient for, and let the groups' own state advance once."""
        groups = self._optimizer.param_groups
        for place, group in self._after.items():
            groups[place].update(group)
        self._after.clear()
        self._step([group for place, group in enumerate(groups) if place not in self._group.values()])
        if self.host is not None:
            self.host.finish()
        self.is_halfway = False

    def read_size(self, files: Sequence[Sequence[str]]) -> dict[str, float]:
        """The size before clipping of the gradient that was released since the last call, as by `clip_gradients`.

        Args:
            files: the samples of each micro-batch.

        Raises:
            NonFiniteError: it is NaN or infinite.
        """
        sizes, self._sizes = self._sizes, {}
        if not sizes:
            return {}
        norms = torch.stack([sizes[name] for name in self._names if name in sizes])
        by_value = self._config.grad_clip_method == "value"
        size = (norms.max() if by_value else norms.norm(2)).item()
        if not math.isfinite(size):
            self._stop(sizes, files)
        return {"grad_absmax" if by_value else "grad_norm": size}

    def _release(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        limit, by_value = self._config.max_grad_norm, self._config.grad_clip_method == "value"
        # Kept on the device: the host waits for all of them at once.
        (size,) = torch._foreach_norm([parameter.grad], math.inf if by_value else 2.0)
        self._sizes[name] = size.float()
        if self._updates:
            if limit > 0 and by_value:
                parameter.grad.clamp_(-limit, limit)
            self.is_halfway = True
            self._update(parameter)
        parameter.grad = None

    def _update(self, parameter: nn.Parameter) -> None:
        """Update one parameter, with its group in the state before this step: some optimizers count steps there."""
        place = self._group[parameter]
        before = self._optimizer.param_groups[place]
        copied = {key: each.clone() if isinstance(each, Tensor) else each for key, each in before.items()}
        after = {**copied, "params": [parameter]}
        if self.host is not None:
            self.host.bring(parameter)
        self._step([after])
        if self.host is not None:
            self.host.leave(parameter)
        changes = {key: each for key, each in after.items() if key != "params" and each is not before.get(key)}
        self._after.setdefault(place, {}).update(changes)

    def _step(self, groups: list[dict[str, Any]]) -> None:
        whole = self._optimizer.param_groups
        self._optimizer.param_groups = groups
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = whole

    def _stop(self, sizes: Mapping[str, Tensor], files: Sequence[Sequence[str]]) -> None:
        finite = torch.stack([*sizes.values()]).isfinite().tolist()
        guilty = [name for name, is_finite in zip(sizes, finite, strict=True) if not is_finite]
        raise gradient_error(guilty, files, is_halfway=self.is_halfway)
