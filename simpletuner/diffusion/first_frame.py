"""Clips that continue a given picture (i2v): their first frame is a condition and no noise is ever put on it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .batch import NoisyBatch


def hold_first_frame(noisy: NoisyBatch) -> NoisyBatch:
    """Put the condition in place of frame 0, leave that frame out of the loss and protect it.

    The loss stays a mean over what is left: the weight of the other frames is F / (F - 1), times the batch's own mask.
    A clip of one frame has nothing to continue with and is trained as it is; so is a batch without a condition.
    """
    condition, frames = noisy.batch.condition, noisy.noisy_latents.shape[2]
    if condition is None or frames == 1:
        return noisy
    noisy_latents = torch.cat([condition.to(noisy.noisy_latents), noisy.noisy_latents[:, :, 1:]], dim=2)
    mask = _later_frames(noisy_latents)
    if noisy.batch.loss_mask is not None:
        mask = mask * noisy.batch.loss_mask
    # The other frames continue this one: whoever leaves out tokens must leave it whole.
    protected = (torch.arange(frames) == 0).view(1, 1, -1, 1, 1)
    if noisy.protected is not None:
        protected = protected.to(noisy.protected.device) | noisy.protected
    batch = replace(noisy.batch, loss_mask=mask)
    return replace(noisy, noisy_latents=noisy_latents, batch=batch, protected=protected)


def _later_frames(latents: Tensor) -> Tensor:
    """0 on frame 0, F / (F - 1) on the others; `B 1 F H W`."""
    frames = latents.shape[2]
    mask = torch.full_like(latents[:, :1], frames / (frames - 1))
    mask[:, :, 0] = 0
    return mask
