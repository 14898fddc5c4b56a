"""Kandinsky 5 Video: text to video and image to video, Lite and Pro."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.diffusion.flow import hold_first_frame
from simpletuner.models.adapter import BlockLayout
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.kandinsky5 import nabla
from simpletuner.models.kandinsky5.cost import attention_heads, head_width
from simpletuner.models.kandinsky5.image import Kandinsky5Adapter, SampledLatents, channels_last
from simpletuner.models.kandinsky5.options import (
    KandinskyOptions,
    RopeScale,
    is_sparse,
    rope_scale_of_size,
)
from simpletuner.models.kandinsky5.spec import KANDINSKY5_VIDEO
from simpletuner.models.loading import attend_by_frame, slice_convolutions


class HunyuanLatentEncoder(SampledLatents):
    """Latents of clips from the HunyuanVideo VAE.

    `B 3 F H W` pixels with F = 4k + 1 become `B 16 k+1 H/8 W/8`.
    """

    is_sliced = False

    def use_less_memory(self) -> bool:
        """Run convolutions in slices of time, unless they do already."""
        if self.is_sliced:
            return False
        self.is_sliced = slice_convolutions(self.vae) > 0
        return self.is_sliced


class Kandinsky5VideoAdapter(Kandinsky5Adapter):
    """One Kandinsky 5 Video checkpoint.

    The size that the result will be sampled at decides the RoPE scale.
    """

    spec = KANDINSKY5_VIDEO
    encoder_class = HunyuanLatentEncoder

    _settings: dict[str, Any]  # of the loaded transformer
    _tiles: nabla.TileAttention | None = None
    _fast: FastBlocks | None = None

    @property
    def rope_scale(self) -> RopeScale:
        explicit = self.options.of(KandinskyOptions).rope_scale
        return explicit or rope_scale_of_size(self.use_size, self.flavour.name)

    def load_latent_encoder(self, device: torch.device, dtype: torch.dtype) -> HunyuanLatentEncoder:
        encoder = HunyuanLatentEncoder(self.load_vae(device, dtype), device, dtype)
        # The same values without the stock mask, which has tokens² entries.
        attend_by_frame(encoder.vae)
        if self.caching.vae_enable_patch_conv:
            encoder.use_less_memory()
        return encoder

    def load_transformer(self, dtype: torch.dtype, *, empty: bool = False) -> nn.Module:
        transformer: Any = super().load_transformer(dtype, empty=empty)
        self._settings = dict(transformer.config)
        self._tiles = nabla.install(transformer) if is_sparse(self._settings) else None
        return transformer

    def use_fast_blocks(self, transformer: nn.Module) -> FastBlocks:
        self._fast = super().use_fast_blocks(transformer)
        return self._fast

    def prepare(self, noisy: NoisyBatch) -> NoisyBatch:
        """For i2v, frame 0 is the clean picture and is excluded from the loss."""
        return hold_first_frame(noisy) if self.takes_picture else noisy

    def sparsity(self, noisy: NoisyBatch) -> dict[str, Any] | None:
        if self._tiles is None:
            return None
        latents = channels_last(noisy.noisy_latents)
        settings = self._settings
        heads = attention_heads(settings)
        if self._fast is not None:
            heads //= self._fast.self_attention.head_shards
        self._tiles.prepare(latents.device, self.dtype, head_width(settings), heads)
        return nabla.sparse_params(tuple(latents.shape), settings, latents.device)

    def block_layout(self, transformer: nn.Module) -> BlockLayout:
        layout = super().block_layout(transformer)
        if self._tiles is None:
            return layout
        return replace(layout, take_tiles=self._tiles.take_counts)

    def condition_channels(self, noisy: NoisyBatch) -> tuple[Tensor, ...]:
        """Sixteen channels of zeros, and a mask that is 1 on a given first frame."""
        if not self._settings.get("visual_cond"):
            return ()
        latents = channels_last(noisy.noisy_latents)
        mask = torch.zeros_like(latents[..., :1])
        if self.takes_picture and noisy.given_frames:
            mask[:, 0] = 1
        return torch.zeros_like(latents), mask
