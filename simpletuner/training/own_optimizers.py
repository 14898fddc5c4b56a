"""Optimizers of our own: Muon beside AdamW, and optimi's Adam family made to decay in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import optimi
import torch
from optimi.optimizer import OptimiOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from simpletuner.config.optimizers import is_lost_in_bf16
from simpletuner.training.ema import in_bundles

# A key that only Muon's parameter groups have.
MUON_MARK = "ns_steps"


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (orthogonalised momentum) for matrices, AdamW for vectors and convolutions.

    Muon's updates are scaled to the size of AdamW's (Liu et al., arXiv 2502.16982, section 2.2), so
    that one learning rate and one weight decay suit both. Both parts share one list of parameter
    groups and one state.

    Args:
        params: trained parameters.
        lr: learning rate of both.
        betas, eps: parameters of AdamW.
        weight_decay: decoupled weight decay of both.
        momentum, nesterov: parameters of Muon.
        ns_steps: iterations of Muon's Newton-Schulz method.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        weights = list(params)
        muon = partial(torch.optim.Muon, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
        self._adamw = partial(
            torch.optim.AdamW, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay
        )
        self._parts: list[torch.optim.Optimizer] = []
        matrices = [weight for weight in weights if weight.ndim == 2]
        if matrices:
            # Scales updates by .2 sqrt(max(out, in)), the usual size of AdamW's updates.
            self._parts.append(muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"))
        others = [weight for weight in weights if weight.ndim != 2]
        if others:
            self._parts.append(self._adamw(others))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that AdamW updates, whatever their shape."""
        if "lr" not in param_group:  # groups from the base class's `__init__` have lr
            part = self._adamw(param_group["params"])
            param_group = {**part.param_groups[0], **param_group}
            if not any(isinstance(part, torch.optim.AdamW) for part in self._parts):
                self._parts.append(part)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self._parts:
            # `load_state_dict` replaces groups and state, so pass the current ones to the parts
            # every time.
            is_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [
                group for group in self.param_groups if (MUON_MARK in group) == is_muon
            ]
            part.state = self.state
            part.step()
        return loss


class DecayingSquares(OptimiOptimizer):
    """An optimizer of optimi's Adam family, with a float32 second moment where bf16 cannot decay.

    The second moment v is a moving average of squared gradients, of which a step keeps beta2 * v.
    optimi stores v in the weight's dtype. bf16 has 8 significant bits: a relative change below half
    the spacing of its numbers, 2**-9 to 2**-8, is rounded away. With 1 - beta2 below 2**-8 (such as
    beta2 .999), beta2 * v may round back to v, so v only grows, and updates become too small. In
    this case, v is float32.
    """

    def step(self, closure: Callable[[], Any] | None = None, param: Tensor | None = None) -> Any:
        """Update all weights."""
        with ExitStack() as self._updating:
            return super().step(closure, param)

    def _init_group(self, group: dict[str, Any], *lists: Any, **named: Any) -> None:
        self._updating.close()  # it would slow down the loop over the next group's weights
        super()._init_group(group, *lists, **named)
        if group["foreach"]:
            self._updating.enter_context(WideSquares())

    def is_wide(self, group: Mapping[str, Any], weight: Tensor) -> bool:
        """Whether a weight's second moment is wider than the weight.

        optimi's Triton kernels would round it.
        """
        beta = group.get("beta3", group["beta2"])  # Adan's second moment decays by its third beta
        return weight.dtype == torch.bfloat16 and is_lost_in_bf16(beta)

    def _init_state(self, group: dict[str, Any], state: dict[str, Any], param: Tensor) -> None:
        super()._init_state(group, state, param)
        if self.is_wide(group, param):
            state["exp_avg_sq"] = state["exp_avg_sq"].float()


class WideSquares(TorchFunctionMode):
    """Adds the squares of narrow gradients to wide averages in a few launches.

    torch's foreach operations launch once per weight if dtypes are mixed, so gradients are first
    widened, one bundle at a time.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is not torch._foreach_addcmul_ or args[0][0].dtype == args[1][0].dtype:
            return func(*args, **named)
        gradients = iter(args[1])  # both factors
        for means in in_bundles(args[0]):
            factors = [*islice(gradients, len(means))]
            if len(means) > 1:  # a single large weight would need its memory twice
                narrow = factors
                factors = [torch.empty_like(mean) for mean in means]
                torch._foreach_copy_(factors, narrow)
            func(means, factors, factors, **named)
        return None


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
