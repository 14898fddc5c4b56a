"""Kandinsky 5 Video: text to video and image to video, Lite and Pro."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from PIL.Image import Image
from torch import Tensor, nn

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.diffusion.flow import hold_first_frame
from simpletuner.models.adapter import BlockLayout, CheckpointSetup, EncoderQuantiser, PreviewRequest
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.kandinsky5 import attention, denoiser, fast, loading, nabla
from simpletuner.models.kandinsky5.denoiser import channels_first, channels_last, predict_velocity, sample_posterior
from simpletuner.models.kandinsky5.geometry import is_sparse, rope_scale_of_size
from simpletuner.models.kandinsky5.options import KandinskyOptions
from simpletuner.models.kandinsky5.text import Kandinsky5TextEncoder, select_template
from simpletuner.models.kandinsky5.usage import usage_snippet
from simpletuner.models.kandinsky5.video_spec import KANDINSKY5_VIDEO
from simpletuner.models.loading import attend_by_frame, load_vae, slice_convolutions
from simpletuner.models.usage import Usage


class HunyuanLatentEncoder:
    """Clips to latents with the HunyuanVideo VAE: a posterior sample times the scaling factor."""

    def __init__(self, vae: AutoencoderKLHunyuanVideo, device: torch.device, dtype: torch.dtype) -> None:
        self.vae, self.device, self.dtype = vae, device, dtype
        self.is_sliced = False

    def use_less_memory(self) -> bool:
        """Convolutions in slices of time, once."""
        if self.is_sliced:
            return False
        self.is_sliced = slice_convolutions(self.vae) > 0
        return self.is_sliced

    @torch.no_grad()
    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of `B 3 F H W` pixels in [-1, 1] with F = 4k + 1: float32, `B 16 k+1 H/8 W/8`, on the CPU."""
        posterior = self.vae.encode(pixels.to(self.device, self.dtype)).latent_dist
        return sample_posterior(posterior, seeds) * self.vae.config.scaling_factor


class StockVideoPipeline:
    """diffusers' own pipeline of the flavour, fed with cached embeddings."""

    def __init__(self, pipeline: Any, vae: AutoencoderKLHunyuanVideo, device: torch.device, animates: bool) -> None:
        self.pipeline, self.vae, self.device, self.animates = pipeline, vae, device, animates

    def render(self, request: PreviewRequest) -> list[Image]:
        """Sample one clip of exactly the requested size and length."""
        source = {"image": request.source} if self.animates else {}
        inputs = loading.pipeline_inputs(request, self.device)
        output = self.pipeline(**inputs, **source, num_frames=request.num_frames, output_type="pil")
        return list(output.frames[0])


class Kandinsky5VideoAdapter:
    """One Kandinsky 5 Video checkpoint; the size that the result will be used at decides the scale of positions."""

    spec = KANDINSKY5_VIDEO

    def __init__(self, setup: CheckpointSetup) -> None:
        self.source, self.text, self.caching = setup.source, setup.text, setup.caching
        self.animates = setup.flavour.task == "i2v"
        self.options = setup.options.of(KandinskyOptions)
        self.rope_scale = self.options.rope_scale or rope_scale_of_size(setup.use_size, setup.flavour.name)
        self.dtype = torch.float32
        self._padding: attention.TextPadding | None = None
        self._tiles: nabla.TileAttention | None = None
        self._settings: dict[str, Any] = {}

    def load_text_encoder(
        self, device: torch.device, dtype: torch.dtype, quantise: EncoderQuantiser | None = None
    ) -> Kandinsky5TextEncoder:
        template = select_template(self.options.text_template, "video")
        return Kandinsky5TextEncoder(self.source, template, self.spec.text_length(self.text), device, dtype, quantise)

    def load_latent_encoder(self, device: torch.device, dtype: torch.dtype) -> HunyuanLatentEncoder:
        vae = load_vae(AutoencoderKLHunyuanVideo, self.source["vae"], self.caching, device, dtype)
        attend_by_frame(vae)
        encoder = HunyuanLatentEncoder(vae, device, dtype)
        if self.caching.vae_enable_patch_conv:
            encoder.use_less_memory()
        return encoder

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        transformer: Any = loading.load_transformer(self.source["transformer"], dtype)
        self.dtype, self._settings = dtype, dict(transformer.config)
        self._padding = attention.install(transformer)
        if is_sparse(self._settings):
            self._tiles = nabla.install(transformer)
        return transformer

    def prepare(self, noisy: NoisyBatch) -> NoisyBatch:
        """i2v: frame 0 is the clean picture and is left out of the loss. Pictures and t2v clips stay as they are."""
        return hold_first_frame(noisy) if self.animates else noisy

    def predict(self, transformer: nn.Module, noisy: NoisyBatch) -> Tensor:
        if self._padding is None:
            raise RuntimeError("predict() needs a transformer from load_transformer()")
        hidden_states = channels_last(noisy.noisy_latents)
        sparsity = None
        if self._settings["visual_cond"]:
            hidden_states = torch.cat([hidden_states, *self._condition_channels(noisy)], dim=-1)
        if self._tiles is not None and is_sparse(self._settings):
            head_dim = sum(self._settings["axes_dims"])
            heads = self._settings["model_dim"] // head_dim
            self._tiles.settle(hidden_states.device, self.dtype, head_dim, heads)
            sparsity = nabla.sparse_params(tuple(hidden_states.shape), self._settings, hidden_states.device)
        velocity = predict_velocity(
            transformer,
            self._padding,
            hidden_states,
            noisy.timesteps,
            noisy.batch.embeds,
            rope_scale=self.rope_scale,
            dtype=self.dtype,
            sparse_params=sparsity,
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
    ) -> StockVideoPipeline:
        vae = load_vae(AutoencoderKLHunyuanVideo, self.source["vae"], self.caching, device, self.dtype)
        pipeline = loading.stock_pipeline(self._pipeline_class(), self.source, transformer, vae, shift)
        return StockVideoPipeline(pipeline, vae, device, self.animates)

    @staticmethod
    def usage_snippet(usage: Usage) -> str:
        return usage_snippet(usage)

    def load_bare_pipeline(self) -> Any:
        return loading.bare_pipeline(self._pipeline_class(), self.source["transformer"])

    def _pipeline_class(self) -> Any:
        from diffusers import Kandinsky5I2VPipeline, Kandinsky5T2VPipeline

        return Kandinsky5I2VPipeline if self.animates else Kandinsky5T2VPipeline

    def _condition_channels(self, noisy: NoisyBatch) -> tuple[Tensor, Tensor]:
        """Sixteen channels of zeros, and a mask that is 1 on a first frame that is given."""
        latents = channels_last(noisy.noisy_latents)
        mask = torch.zeros_like(latents[..., :1])
        if self.animates and noisy.batch.condition is not None and latents.shape[1] > 1:
            mask[:, 0] = 1
        return torch.zeros_like(latents), mask
