"""Sana Video: text to clip, and picture to clip with the same checkpoint."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_sana_video import SanaVideoTransformer3DModel
from torch import Tensor, nn

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.diffusion.flow import hold_first_frame
from simpletuner.models.adapter import BlockLayout, CheckpointSetup, EncoderQuantiser
from simpletuner.models.loading import bare_pipeline, load_denoiser, load_scheduler, load_vae, with_solver
from simpletuner.models.sanavideo.denoiser import (
    CompiledOnGrid,
    DistinctTimesteps,
    Ltx2LatentEncoder,
    WanLatentEncoder,
    collate_text,
    token_timesteps,
)
from simpletuner.models.sanavideo.options import SanaOptions
from simpletuner.models.sanavideo.previews import I2V_SHIFT, StockSanaPipelines, usage_snippet
from simpletuner.models.sanavideo.spec import LTX2, SANA_VIDEO, vae_class
from simpletuner.models.sanavideo.text import SanaTextEncoder
from simpletuner.models.usage import Usage


class SanaVideoAdapter:
    """One Sana Video checkpoint.

    A batch with a condition is trained as i2v, any other as t2v; likewise previews with a source picture.
    """

    spec = SANA_VIDEO

    def __init__(self, setup: CheckpointSetup) -> None:
        self.source, self.text, self.caching, self.solver = setup.source, setup.text, setup.caching, setup.solver
        self.options = setup.options.of(SanaOptions)
        self.spec, self.vae_class = SANA_VIDEO.for_flavour(setup.flavour.name), vae_class(setup.flavour)
        self.dtype = torch.float32

    def load_text_encoder(
        self, device: torch.device, dtype: torch.dtype, quantise: EncoderQuantiser | None = None
    ) -> SanaTextEncoder:
        return SanaTextEncoder(self.source, self.options, self.spec.words.length(self.text), device, dtype, quantise)

    def load_latent_encoder(self, device: torch.device, dtype: torch.dtype) -> WanLatentEncoder:
        vae = load_vae(getattr(diffusers, self.vae_class), self.source["vae"], self.caching, device, dtype)
        return (Ltx2LatentEncoder if self.vae_class == LTX2 else WanLatentEncoder)(vae, device, dtype)

    def load_transformer(self, dtype: torch.dtype, *, hollow: bool = False) -> nn.Module:
        part = self.source["transformer"]
        transformer: nn.Module = load_denoiser(SanaVideoTransformer3DModel, part, dtype, hollow=hollow)
        DistinctTimesteps().install(transformer)
        self.dtype = dtype
        return transformer

    def prepare(self, noisy: NoisyBatch) -> NoisyBatch:
        return hold_first_frame(noisy)

    def predict(self, transformer: nn.Module, noisy: NoisyBatch) -> Tensor:
        text, mask = collate_text(noisy.batch.embeds, self.dtype)
        velocity: Tensor = transformer(
            hidden_states=noisy.noisy_latents.to(self.dtype),
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            timestep=self._timesteps(noisy),
            return_dict=False,
        )[0]
        return velocity.float()

    def block_layout(self, transformer: nn.Module) -> BlockLayout:
        """The transformer blocks, without routing: the feed-forward convolves the whole token grid."""
        model: Any = transformer
        name, settings = "transformer_blocks", model.config
        width = settings["num_attention_heads"] * settings["attention_head_dim"]
        return BlockLayout({name: model.get_submodule(name)}, visual=name, width=width, compiled=CompiledOnGrid)

    def use_fast_blocks(self, transformer: nn.Module) -> None:
        """None: these blocks spend their time in convolutions and linear attention."""

    def store_modulation_in_bf16(self, transformer: nn.Module) -> int:
        return 0  # the modulation tables of these blocks are small

    def load_sampler(self, shift: float | None, *, from_picture: bool) -> Any:
        if from_picture:
            return with_solver(FlowMatchEulerDiscreteScheduler(shift=I2V_SHIFT), self.solver)
        return with_solver(load_scheduler(self.source["scheduler"]), self.solver)

    def load_preview_pipeline(
        self, transformer: nn.Module, device: torch.device, shift: float | None
    ) -> StockSanaPipelines:
        """Both pipelines have fixed schedules; `shift` has no effect."""
        encoder = self.load_latent_encoder(device, torch.float32)
        text, picture = (self.load_sampler(shift, from_picture=given) for given in (False, True))
        return StockSanaPipelines(self.source, transformer, encoder, (text, picture), device)

    @staticmethod
    def usage_snippet(usage: Usage) -> str:
        return usage_snippet(usage)

    def load_bare_pipeline(self) -> Any:
        return bare_pipeline(diffusers.SanaVideoPipeline, SanaVideoTransformer3DModel, self.source)

    def _timesteps(self, noisy: NoisyBatch) -> Tensor:
        """Timesteps as in the pipelines: whole numbers for t2v, one per token with a given frame 0."""
        latents = noisy.noisy_latents
        if noisy.batch.condition is None or latents.shape[2] == 1:
            return noisy.timesteps.floor()
        return token_timesteps(noisy.timesteps, latents, self.spec.patch_size)
