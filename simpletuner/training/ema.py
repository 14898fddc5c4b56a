"""An exponential moving average of the trained weights.

An update is three float32 operations (difference, product, sum), each rounded once, so that the
result is bit-identical on every device and with or without `torch._foreach_*`. `lerp_` does not
guarantee this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from simpletuner.config.schema import EmaConfig
from simpletuner.training.sharding import as_sharded, local, shard_like

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

# Numbers per copy to another device (64 MiB in float32), which batches thousands of small LoRA
# tensors.
BUNDLE = 1 << 24


class Ema:
    """The moving average of parameters, of a LoRA or a whole model, in bf16 or float32.

    Args:
        parameters: parameters to average, by name; the average starts as a copy.
        config: decay, interval, warm-up and device.
        device: the accelerator, used for `ema_device` accelerator unless `ema_cpu_only` is set.

    Attributes:
        average: the average by name, float32, sharded like the parameters.
        decay_value: decay of the last update; 0 before the first.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: EmaConfig, device: torch.device
    ) -> None:
        self.config = config
        self.device = torch.device("cpu") if config.is_on_host else device
        self.decay_value = 0.0
        self.average: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            copied = local(parameter.detach()).to(self.device, torch.float32, copy=True)
            self.average[name] = shard_like(copied, parameter)
        self._parameters = dict(parameters)
        self._updates = 0

    @torch.no_grad()
    def update(self, global_step: int) -> None:
        """Update the average after an optimizer step, at the configured interval.

        Args:
            global_step: number of optimizer steps, including this one.
        """
        if global_step % self.config.ema_update_interval:
            return
        self.decay_value = self._decay(global_step)
        self._updates += 1
        parameters = in_bundles(self._parameters.values())
        averages = in_bundles(self.average.values())
        for trained, averaged in zip(parameters, averages, strict=True):
            # Widened after the copy, which is half as large in bf16.
            row = flattened(trained).to(self.device).float()
            self._move([local(average) for average in averaged], row)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context with the average in the parameters, rounded to their dtype.

        Restores the trained weights exactly on exit. The trained weights are kept on the average's
        device meanwhile, so that a large model needs no second copy on the accelerator.
        """
        # Copied even on the same device, where `to` would return the parameters to be overwritten.
        waiting = {
            name: local(parameter.detach()).to(self.device, copy=True)
            for name, parameter in self._parameters.items()
        }
        try:
            self._fill(self.average)
            yield
        finally:
            self._fill(waiting)

    def state_dict(self) -> dict[str, Any]:
        """The state for the next update, in types that `torch.load` accepts with `weights_only`.

        Not a copy: like an optimizer's state, it must be saved before the next update.
        """
        return {"average": self.average, "updates": self._updates, "decay_value": self.decay_value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved average of the same parameters."""
        for name, average in self.average.items():
            # In place, which keeps the device and sharding of this run.
            local(average).copy_(local(as_sharded(state["average"][name], average)))
        self._updates = state["updates"]
        self.decay_value = state["decay_value"]

    def restart(self) -> None:
        """Start from the parameters as they are now."""
        for name, average in self.average.items():
            local(average).copy_(local(self._parameters[name].detach()))

    def _decay(self, global_step: int) -> float:
        """The decay of an update: min((1 + n) / (10 + n), ema_decay) with n = global_step - 1.

        0, a copy, in the first update and before `ema_warmup_steps`.
        """
        if self._updates == 0 or global_step < self.config.ema_warmup_steps:
            return 0.0
        # The warm-up of TensorFlow's ExponentialMovingAverage, which quickly forgets the initial
        # weights.
        n = global_step - 1
        return min((1 + n) / (10 + n), self.config.ema_decay)

    def _move(self, averages: list[Tensor], row: Tensor) -> None:
        """Move averages towards the weights in a row from `flattened`, which is overwritten."""
        weights = views_of(row, averages)
        decay = self.decay_value
        # With rounding, a + (w - a) is not always w, but the first update must be an exact copy.
        if decay == 0:
            torch._foreach_copy_(averages, weights)
        elif self.config.ema_foreach_disable:
            for average, weight in zip(averages, weights, strict=True):
                average.add_(weight.sub_(average).mul_(1 - decay))
        else:
            torch._foreach_sub_(weights, averages)
            torch._foreach_mul_(weights, 1 - decay)
            torch._foreach_add_(averages, weights)

    @torch.no_grad()
    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local(parameter).copy_(local(weights[name]))


def flattened(bundle: Iterable[nn.Parameter]) -> Tensor:
    """The weights of a bundle in one row, as a copy."""
    return torch.cat([local(parameter.detach()).flatten() for parameter in bundle])


def views_of(row: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Views of a row from `flattened`, in the shapes of the tensors."""
    shapes = [tensor.shape for tensor in tensors]
    parts = row.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def in_bundles(tensors: Iterable[AnyTensor]) -> list[list[AnyTensor]]:
    """Tensors in groups of at most `BUNDLE` numbers, in order; a larger tensor is alone."""
    bundles: list[list[AnyTensor]] = []
    remaining = 0  # numbers that still fit into the last bundle
    for tensor in tensors:
        remaining -= tensor.numel()
        if remaining < 0 or not bundles:
            bundles.append([])
            remaining = BUNDLE - tensor.numel()
        bundles[-1].append(tensor)
    return bundles
