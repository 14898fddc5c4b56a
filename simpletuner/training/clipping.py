"""Keeping gradients within bounds."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from simpletuner.config.schema import OptimizerConfig


def clip_gradients(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> dict[str, float]:
    """Clip in place as `grad_clip_method` says; a `max_grad_norm` of 0 clips nothing.

    Returns:
        the size before clipping: `grad_absmax` (value) or `grad_norm` (norm).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return {}
    limit = config.max_grad_norm
    if config.grad_clip_method == "value":
        largest = torch.stack(torch._foreach_norm(gradients, float("inf"))).max().item()
        if limit > 0 and largest > limit:
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)
        return {"grad_absmax": largest}
    norm = torch.stack([part.float() for part in torch._foreach_norm(gradients, 2.0)]).norm(2).item()
    if limit > 0 and norm > limit:
        torch._foreach_mul_(gradients, limit / norm)
    return {"grad_norm": norm}
