"""Muon for matrices, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# A key that only Muon's parameter groups have.
MUON_MARK = "ns_steps"


class MuonWithAdamW(torch.optim.Optimizer):
    """Matrices move by orthogonalised momentum (Muon), vectors and convolutions by AdamW.

    Muon's steps are scaled to the size of AdamW's (Liu et al., arXiv 2502.16982, section 2.2), so that one learning
    rate and one weight decay fit both. Parameter groups and state have the usual form, in one list and one mapping.

    Args:
        params: trained parameters.
        lr: of both.
        betas, eps: of AdamW.
        weight_decay: decoupled, of both.
        momentum, nesterov, ns_steps: of Muon; `ns_steps` are the steps of its Newton-Schulz iteration.
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
        matrices = [weight for weight in weights if weight.ndim == 2]
        others = [weight for weight in weights if weight.ndim != 2]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr, weight_decay, momentum, nesterov, ns_steps=ns_steps, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append(muon)
        if others:
            self._parts.append(torch.optim.AdamW(others, lr, betas, eps, weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            # Loading a state replaces groups and mapping, so the parts are pointed at the current ones every time.
            is_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [group for group in self.param_groups if (MUON_MARK in group) == is_muon]
            part.state = self.state
            part.step()
        return loss
