"""Kandinsky 5 Image: text to image and image to image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL.Image import Image
from torch import Tensor, nn

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.models.adapter import PreviewRequest
from simpletuner.models.kandinsky5.adapter import Kandinsky5Adapter
from simpletuner.models.kandinsky5.denoiser import channels_last, sample_posterior
from simpletuner.models.kandinsky5.loading import StockPipeline
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE

# The stock pipelines sample pictures with unscaled positions at every size.
ROPE_SCALE = (1.0, 1.0, 1.0)


class FluxLatentEncoder:
    """Latents of pictures from the Flux VAE: a posterior sample times the scaling factor.

    The VAE's `shift_factor` is not applied, because the Kandinsky pipelines decode without it.
    """

    def __init__(self, vae: AutoencoderKL, device: torch.device, dtype: torch.dtype) -> None:
        self.vae, self.device, self.dtype = vae, device, dtype

    @torch.no_grad()
    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of `B 3 1 H W` pixels in [-1, 1]: float32, `B 16 1 H/8 W/8`, on the CPU."""
        posterior = self.vae.encode(pixels[:, :, 0].to(self.device, self.dtype)).latent_dist
        return (sample_posterior(posterior, seeds) * self.vae.config.scaling_factor).unsqueeze(2)

    def decode(self, z: Tensor) -> Tensor:
        latents = z[:, :, 0].to(self.device, self.dtype) / self.vae.config.scaling_factor
        pixels: Tensor = self.vae.decode(latents).sample.float().clamp(-1, 1)
        return pixels.unsqueeze(2)

    def use_less_memory(self) -> bool:
        """False: slicing in time does not apply to pictures."""
        return False


class StockImagePipeline(StockPipeline):
    """The stock pipeline for pictures."""

    def render(self, request: PreviewRequest) -> list[Image]:
        """Sample one picture of exactly the requested size."""
        # The pipeline rounds every request to its list of sizes, so the list is set to the requested size.
        self.pipeline.resolutions = [(request.width, request.height)]
        return list(self.pipeline(**self.inputs(request)).image[:1])


class Kandinsky5ImageAdapter(Kandinsky5Adapter):
    """One Kandinsky 5 Image checkpoint."""

    spec, vae_class, preview_class = KANDINSKY5_IMAGE, AutoencoderKL, StockImagePipeline
    encoder_class = FluxLatentEncoder

    def load_latent_encoder(self, device: torch.device, dtype: torch.dtype) -> FluxLatentEncoder:
        return FluxLatentEncoder(self.load_vae(device, dtype), device, dtype)

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
