"""Drawing latents from a VAE's posterior so that the draw belongs to the sample, not to its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sample_posterior(posterior: Any, seeds: Sequence[int]) -> Tensor:
    """mean + std · noise of a `DiagonalGaussianDistribution`, one seed per sample; float32, on the CPU."""
    mean, std = posterior.mean.float().cpu(), posterior.std.float().cpu()
    noise = [torch.randn(mean.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return mean + std * torch.stack(noise)
