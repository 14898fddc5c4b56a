"""optimi's optimizers of the Adam family, with a second moment that decays.

The second moment v is a running mean of squared gradients, of which a step keeps beta2 * v. optimi stores it in the
weight's dtype. A bf16 number has 8 significant bits: rounding undoes whatever changes it by less than half its distance
to the next one, which is 2**-9 to 2**-8 of the number. With 1 - beta2 below 2**-8 (beta2 .999, for example), beta2 * v
may be rounded back to v, so v only grows, and updates get too small. There v is kept in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optimi
import torch
from optimi.optimizer import OptimiOptimizer
from torch import Tensor

from simpletuner.config.optimizers import is_lost_in_bf16

# Key of the second moment in a weight's state.
SQUARES = "exp_avg_sq"


class DecayingSquares(OptimiOptimizer):
    """An optimizer whose second moment is float32 where bf16 could not hold its decay."""

    def is_wide(self, group: Mapping[str, Any], weight: Tensor) -> bool:
        """Whether a weight's second moment has another dtype than the weight. optimi's Triton kernels round it then."""
        return weight.dtype == torch.bfloat16 and is_lost_in_bf16(group.get("beta3", group["beta2"]))

    def widened(self, group: Mapping[str, Any], weight: Tensor, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A weight's state with the second moment in the dtype in which it is kept."""
        return {**state, SQUARES: state[SQUARES].float()} if self.is_wide(group, weight) else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the second moment as it was saved; torch would round it to the weight's dtype."""
        saved = {number: each for number, each in state_dict["state"].items() if SQUARES in each}
        others = {number: {**each, SQUARES: None} for number, each in saved.items()}
        super().load_state_dict({**state_dict, "state": {**state_dict["state"], **others}})
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        weights = ((group, weight) for group in self.param_groups for weight in group["params"])
        for number, (group, weight) in zip(numbers, weights, strict=True):
            if number in saved:
                dtype = torch.float32 if self.is_wide(group, weight) else weight.dtype
                self.state[weight][SQUARES] = saved[number][SQUARES].to(weight.device, dtype)

    def _init_state(self, group: dict[str, Any], state: dict[str, Any], param: Tensor) -> None:
        super()._init_state(group, state, param)
        state.update(self.widened(group, param, state))


class AdamW(DecayingSquares, optimi.AdamW):
    """optimi's AdamW with a second moment that decays."""


class Adam(DecayingSquares, optimi.Adam):
    """optimi's Adam with a second moment that decays."""


class Ranger(DecayingSquares, optimi.Ranger):
    """optimi's Ranger with a second moment that decays."""


class RAdam(DecayingSquares, optimi.RAdam):
    """optimi's RAdam with a second moment that decays."""


class StableAdamW(DecayingSquares, optimi.StableAdamW):
    """optimi's StableAdamW with a second moment that decays."""


class Adan(DecayingSquares, optimi.Adan):
    """optimi's Adan with a second moment that decays."""
