"""Kandinsky 5 Image: text to image and image to image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL.Image import Image
from torch import Tensor, nn

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.models.adapter import BlockLayout, CheckpointSetup, EncoderQuantiser, PreviewRequest
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.kandinsky5 import attention, denoiser, fast, loading
from simpletuner.models.kandinsky5.denoiser import channels_first, channels_last, predict_velocity, sample_posterior
from simpletuner.models.kandinsky5.options import KandinskyOptions
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.kandinsky5.usage import usage_snippet
from simpletuner.models.loading import load_vae
from simpletuner.models.usage import Usage

if TYPE_CHECKING:
    from simpletuner.models.kandinsky5.text import Kandinsky5TextEncoder

# Pictures have one frame and are sampled with unscaled positions, whatever their size.
ROPE_SCALE = (1.0, 1.0, 1.0)


class FluxLatentEncoder:
    """Pictures to latents with the Flux VAE: a posterior sample times the scaling factor.

    The VAE's `shift_factor` is not applied: the Kandinsky pipelines decode without it.
    """

    def __init__(self, vae: AutoencoderKL, device: torch.device, dtype: torch.dtype) -> None:
        self.vae, self.device, self.dtype = vae, device, dtype

    @torch.no_grad()
    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of `B 3 1 H W` pixels in [-1, 1]: float32, `B 16 1 H/8 W/8`, on the CPU."""
        posterior = self.vae.encode(pixels[:, :, 0].to(self.device, self.dtype)).latent_dist
        return (sample_posterior(posterior, seeds) * self.vae.config.scaling_factor).unsqueeze(2)

    def use_less_memory(self) -> bool:
        """Nothing is left: a picture goes through as a whole."""
        return False


class StockImagePipeline:
    """diffusers' own pipeline of the flavour, fed with cached embeddings."""

    def __init__(self, pipeline: Any, vae: AutoencoderKL, device: torch.device, takes_source: bool) -> None:
        self.pipeline, self.vae, self.device, self.takes_source = pipeline, vae, device, takes_source

    def render(self, request: PreviewRequest) -> list[Image]:
        """Sample one picture of exactly the requested size."""
        # The pipeline snaps every request to its list of sizes; with the wanted one as the list it need not.
        self.pipeline.resolutions = [(request.width, request.height)]
        source = {"image": request.source} if self.takes_source else {}
        output = self.pipeline(**loading.pipeline_inputs(request, self.device), **source)
        return list(output.image[:1])


class Kandinsky5ImageAdapter:
    """One Kandinsky 5 Image checkpoint."""

    spec = KANDINSKY5_IMAGE

    def __init__(self, setup: CheckpointSetup) -> None:
        self.source, self.text, self.caching = setup.source, setup.text, setup.caching
        self.options = setup.options.of(KandinskyOptions)
        self.edits = setup.flavour.task == "i2i"
        self.dtype = torch.float32
        self._padding: attention.TextPadding | None = None

    def load_text_encoder(
        self, device: torch.device, dtype: torch.dtype, quantise: EncoderQuantiser | None = None
    ) -> Kandinsky5TextEncoder:
        # transformers' models come in here: with everything cached, a run never needs them.
        from simpletuner.models.kandinsky5.text import Kandinsky5TextEncoder, select_template

        template = select_template(self.options.text_template, "image_edit" if self.edits else "image")
        return Kandinsky5TextEncoder(self.source, template, self.spec.text_length(self.text), device, dtype, quantise)

    def load_latent_encoder(self, device: torch.device, dtype: torch.dtype) -> FluxLatentEncoder:
        vae = load_vae(AutoencoderKL, self.source["vae"], self.caching, device, dtype)
        return FluxLatentEncoder(vae, device, dtype)

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        transformer = loading.load_transformer(self.source["transformer"], dtype)
        self.dtype = dtype
        self._padding = attention.install(transformer)
        return transformer

    def prepare(self, noisy: NoisyBatch) -> NoisyBatch:
        return noisy

    def predict(self, transformer: nn.Module, noisy: NoisyBatch) -> Tensor:
        if self._padding is None:
            raise RuntimeError("predict() needs a transformer from load_transformer()")
        hidden_states = channels_last(noisy.noisy_latents)
        if self.edits:
            hidden_states = torch.cat([hidden_states, *self._source_channels(noisy)], dim=-1)
        velocity = predict_velocity(
            transformer,
            self._padding,
            hidden_states,
            noisy.timesteps,
            noisy.batch.embeds,
            rope_scale=ROPE_SCALE,
            dtype=self.dtype,
        )
        return channels_first(velocity)

    def block_layout(self, transformer: nn.Module) -> BlockLayout:
        return denoiser.block_layout(transformer)

    def use_fast_blocks(self, transformer: nn.Module) -> FastBlocks:
        if self._padding is None:
            raise RuntimeError("use_fast_blocks() needs a transformer from load_transformer()")
        return fast.install(transformer, self._padding)

    def store_modulation_in_bf16(self, transformer: nn.Module) -> int:
        return fast.store_in_bf16(transformer)

    def load_preview_pipeline(
        self, transformer: nn.Module, device: torch.device, shift: float | None
    ) -> StockImagePipeline:
        vae = load_vae(AutoencoderKL, self.source["vae"], self.caching, device, self.dtype)
        pipeline = loading.stock_pipeline(self._pipeline_class(), self.source, transformer, vae, shift)
        return StockImagePipeline(pipeline, vae, device, takes_source=self.edits)

    @staticmethod
    def usage_snippet(usage: Usage) -> str:
        return usage_snippet(usage)

    def load_bare_pipeline(self) -> Any:
        return loading.bare_pipeline(self._pipeline_class(), self.source["transformer"])

    def _pipeline_class(self) -> Any:
        from diffusers import Kandinsky5I2IPipeline, Kandinsky5T2IPipeline

        return Kandinsky5I2IPipeline if self.edits else Kandinsky5T2IPipeline

    def _source_channels(self, noisy: NoisyBatch) -> tuple[Tensor, Tensor]:
        """The source picture's latents and the channel of ones that says they are given."""
        if noisy.batch.condition is None:
            raise RuntimeError("an i2i batch needs the latents of its source pictures")
        source = channels_last(noisy.batch.condition)
        return source, torch.ones_like(source[..., :1])
