"""Kandinsky 5 Image: text to image and image to image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.models.kandinsky5.adapter import Kandinsky5Adapter
from simpletuner.models.kandinsky5.denoiser import SampledLatents, channels_last
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE

# The stock pipelines sample pictures with unscaled positions at every size.
ROPE_SCALE = (1.0, 1.0, 1.0)


class FluxLatentEncoder(SampledLatents):
    """Latents of pictures from the Flux VAE.

    The VAE's `shift_factor` is not applied, because the Kandinsky pipelines decode without it.
    """

    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of `B 3 1 H W` pixels: `B 16 1 H/8 W/8`."""
        return super().encode(pixels[:, :, 0], seeds).unsqueeze(2)

    def decode(self, z: Tensor) -> Tensor:
        return super().decode(z[:, :, 0]).unsqueeze(2)


class Kandinsky5ImageAdapter(Kandinsky5Adapter):
    """One Kandinsky 5 Image checkpoint."""

    spec, vae_class, encoder_class = KANDINSKY5_IMAGE, AutoencoderKL, FluxLatentEncoder

    def prepare(self, noisy: NoisyBatch) -> NoisyBatch:
        return noisy

    def predict(self, transformer: nn.Module, noisy: NoisyBatch) -> Tensor:
        channels = self._source_channels(noisy) if self.takes_picture else ()
        return self.velocity(transformer, noisy, channels, ROPE_SCALE)

    def _source_channels(self, noisy: NoisyBatch) -> tuple[Tensor, Tensor]:
        """The source picture's latents, and a mask channel of ones."""
        if noisy.batch.condition is None:
            raise RuntimeError("an i2i batch needs the latents of its source pictures")
        source = channels_last(noisy.batch.condition)
        return source, torch.ones_like(source[..., :1])
