"""Models with all their layers and none of their weights, to check files against."""

from __future__ import annotations

import torch
from torch import nn


def hollow_out(model: nn.Module) -> nn.Module:
    """Replace the parameters of a model on the meta device by CPU ones that share a single zero each.

    They have the right shapes and take no memory, so a LoRA can be loaded beside them; on the meta device loading
    would silently copy nothing.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            stand_in = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
            setattr(module, name, nn.Parameter(stand_in, requires_grad=False))
    return model
