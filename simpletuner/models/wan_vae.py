"""Latents of clips from the VAEs of Wan and LTX-2, for every family that uses one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simpletuner.errors import UserError
from simpletuner.models.adapter import LatentEncoder


class WanLatentEncoder(LatentEncoder):
    """The posterior's mode, normalised per channel with the VAE's own statistics."""

    def __init__(self, vae: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(vae, device, dtype)
        buffers = dict(vae.named_buffers(recurse=False))
        # LTX-2 keeps them among its weights, Wan in its config.json.
        statistics = buffers if "latents_mean" in buffers else vae.config
        self.mean = _per_channel(statistics["latents_mean"])
        self.std = _per_channel(statistics["latents_std"])

    @torch.no_grad()
    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of `B 3 F H W` pixels in [-1, 1]: float32, on the CPU.

        Wan's takes F = 4k + 1 and gives `B 16 k+1 H/8 W/8`, LTX-2's F = 8k + 1 and
        `B 128 k+1 H/32 W/32`. The mode is deterministic, so `seeds` has no effect.

        Raises:
            UserError: the VAE returned a value that is not finite.
        """
        mode = self.posterior(pixels).mode().float().cpu()
        if not bool(mode.isfinite().all()):
            raise UserError(
                f"The VAE produced NaN or infinity in {self.dtype}; set vae_dtype fp32."
            )
        # The reciprocal first, as in the pipelines: a division rounds differently.
        return (mode - self.mean) * (1.0 / self.std)

    def decode(self, z: Tensor) -> Tensor:
        return self.pixels(z * self.std.to(z.device) + self.mean.to(z.device))


def _per_channel(values: Any) -> Tensor:
    """`1 C 1 1 1` in float32, on the CPU."""
    return torch.as_tensor(values, dtype=torch.float32, device="cpu").view(1, -1, 1, 1, 1)
