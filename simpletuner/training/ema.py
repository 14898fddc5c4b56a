"""An exponential moving average of the trained weights.

An update is three float32 operations (a difference, a product, a sum), each rounded once, so that the result is equal
bit for bit on every device and with or without `torch._foreach_*`. `lerp_` gives no such guarantee.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.config.schema import EmaConfig
from simpletuner.distributed.sharding import as_sharded, like, local
from simpletuner.errors import UserError

# Numbers (64 MiB in float32) that go to another device in one copy: each copy to the host waits for the device.
BUNDLE = 1 << 24


class Ema:
    """The average of some parameters, a LoRA's or a whole model's, bf16 or float32.

    Args:
        parameters: what to average, by name; the average starts as a copy.
        config: decay, interval, warm-up and device.
        device: the accelerator, used for `ema_device` accelerator unless `ema_cpu_only` is set.

    Attributes:
        average: float32, by name, sharded like the parameters.
        decay_value: decay of the last update; 0 before the first.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EmaConfig, device: torch.device) -> None:
        self.config = config
        on_cpu = config.ema_cpu_only or config.ema_device == "cpu"
        self.device = torch.device("cpu") if on_cpu else device
        self.decay_value = 0.0
        self._parameters = dict(parameters)
        self._bundles = in_bundles(parameters.values())
        self._updates = 0
        weights = zip(parameters, chain.from_iterable(self._weights()), strict=True)
        self.average: dict[str, Tensor] = {name: like(weight.clone(), parameters[name]) for name, weight in weights}

    @torch.no_grad()
    def update(self, global_step: int) -> None:
        """Update the average after an optimizer step; steps between the intervals change nothing.

        Args:
            global_step: optimizer steps done, this one included.
        """
        if global_step % self.config.ema_update_interval:
            return
        self.decay_value = self._decay(global_step)
        self._updates += 1
        averages = map(local, self.average.values())
        for weights in self._weights():
            self._move([*islice(averages, len(weights))], weights)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the parameters, rounded to their dtype, and restore them exactly afterwards.

        Meanwhile the trained weights are kept on the average's device, so that a large model needs no second copy on
        the accelerator.
        """
        # Copied even on the same device, where `to` would return the parameters that are about to be overwritten.
        waiting = {name: local(each.detach()).to(self.device, copy=True) for name, each in self._parameters.items()}
        try:
            self._fill(self.average)
            yield
        finally:
            self._fill(waiting)

    def state_dict(self) -> dict[str, Any]:
        """What the next update depends on, in types that `torch.load` accepts with `weights_only`.

        Like an optimizer's, it is to be saved before the next update: a copy would need as much memory again.
        """
        return {"average": self.average, "updates": self._updates, "decay_value": self.decay_value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved average.

        Raises:
            UserError: it belongs to other parameters.
        """
        saved: Mapping[str, Tensor] = state["average"]
        shapes = {name: tensor.shape for name, tensor in self.average.items()}
        if shapes != {name: tensor.shape for name, tensor in saved.items()}:
            raise UserError("The saved EMA belongs to other trained layers; start without it or with the same LoRA.")
        for name, average in self.average.items():
            # In place: device and sharding are those of this run, whatever the checkpoint's were.
            local(average).copy_(local(as_sharded(saved[name], average)))
        self._updates, self.decay_value = state["updates"], state["decay_value"]

    def _decay(self, global_step: int) -> float:
        """min((1 + n) / (10 + n), ema_decay) with n = global_step - 1; 0, a copy, in the first update and before
        ema_warmup_steps."""
        if self._updates == 0 or global_step < self.config.ema_warmup_steps:
            return 0.0
        # The warm-up of TensorFlow's ExponentialMovingAverage: at first the average follows, and forgets its start.
        n = global_step - 1
        return min((1 + n) / (10 + n), self.config.ema_decay)

    def _move(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        """Move averages towards weights, which are overwritten."""
        # Rounded, a + (w - a) is not always w; the first update must be an exact copy.
        if self.decay_value == 0:
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(weight)
        elif self.config.ema_foreach_disable:
            for average, weight in zip(averages, weights, strict=True):
                average.add_(weight.sub_(average).mul_(1 - self.decay_value))
        else:
            torch._foreach_sub_(weights, averages)
            torch._foreach_mul_(weights, 1 - self.decay_value)
            torch._foreach_add_(averages, weights)

    @torch.no_grad()
    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local(parameter).copy_(local(weights[name]))

    def _weights(self) -> Iterator[list[Tensor]]:
        """float32 copies on the average's device, one bundle at a time: all of them may not fit."""
        for bundle in self._bundles:
            # Joined before the copy: thousands of small LoRA tensors would be as many transfers.
            weights = [local(each.detach()) for each in bundle]
            flat = torch.cat([each.flatten().float() for each in weights]).to(self.device)
            parts = flat.split([each.numel() for each in weights])
            yield [part.view_as(each) for part, each in zip(parts, weights, strict=True)]


def in_bundles(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in groups of at most `BUNDLE` numbers, in order; a larger one is a group of its own."""
    bundles: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        room -= parameter.numel()
        if room < 0 or not bundles:
            bundles.append([])
            room = BUNDLE - parameter.numel()
        bundles[-1].append(parameter)
    return bundles
