"""torchao's AdamW with quantised state, made deterministic (optional package torchao).

Moments have 8 bits with a scale per 256 numbers (Dettmers et al., arXiv 2110.02861), or 4 bits with
a scale per 128 (Li et al., arXiv 2309.01507). bf16 weights are updated in float32 with stochastic
rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torchao.optim
from torch import Tensor
from torch.optim import Optimizer

from simpletuner.diffusion.seeds import seed_device
from simpletuner.training.update import SEED

# Only a cache for the next start of the program lacks this hash.
warnings.filterwarnings("ignore", ".*_stable_hash_for_caching")


class _Repeatable(Optimizer):
    """Seeds the stochastic rounding of each weight with the step's seed and the weight's index."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group({SEED: 0, **param_group})
        self._numbers: dict[Tensor, int] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self._numbers[parameter] = len(self._numbers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with a gradient, one at a time."""
        loss = None if closure is None else closure()
        groups = self.param_groups
        try:
            for group in groups:
                rate = torch.tensor(float(group["lr"]))  # torchao requires a tensor
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    seed_device(parameter.device, group[SEED] + self._numbers[parameter])
                    # One at a time: torchao rounds a group from one random stream, so the order
                    # would matter.
                    self.param_groups = [{**group, "params": [parameter], "lr": rate}]
                    super().step()
        finally:
            self.param_groups = groups
        return loss

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Allocate a moment.

        Tensors too small for blocks are not quantised. They are float32, since in bf16 they would
        stop changing.
        """
        moment: Tensor = super()._new_buffer(p, signed)  # type: ignore[misc]
        is_quantised = type(moment) is not Tensor
        return moment if is_quantised else moment.float()


class AdamW8bit(_Repeatable, torchao.optim.AdamW8bit):
    """With 8 bits per number."""


class AdamW4bit(_Repeatable, torchao.optim.AdamW4bit):
    """With 4 bits per number."""
