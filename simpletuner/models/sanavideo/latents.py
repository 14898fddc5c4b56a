"""Clips to latents with the Wan VAE, in the scale that Sana Video's transformer sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor

from simpletuner.errors import UserError


class WanLatentEncoder:
    """The mode of the posterior, normalised per channel with the statistics of the VAE's own config."""

    def __init__(self, vae: AutoencoderKLWan, device: torch.device, dtype: torch.dtype) -> None:
        self.vae, self.device, self.dtype = vae, device, dtype
        self.mean, self.std = (
            torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )

    @torch.no_grad()
    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of `B 3 F H W` pixels in [-1, 1] with F = 4k + 1: float32, `B 16 k+1 H/8 W/8`, on the CPU.

        Nothing is drawn, so `seeds` has no effect.

        Raises:
            UserError: the VAE gave a value that is not finite.
        """
        mode = self.vae.encode(pixels.to(self.device, self.dtype)).latent_dist.mode().float().cpu()
        if not bool(mode.isfinite().all()):
            raise UserError(f"The VAE gave values that are not finite ({self.dtype}); vae_dtype fp32 is the right one.")
        latents: Tensor = (mode - self.mean) * (1.0 / self.std)
        return latents

    def use_less_memory(self) -> bool:
        """Nothing is left: the Wan VAE reads four frames at a time anyway."""
        return False
