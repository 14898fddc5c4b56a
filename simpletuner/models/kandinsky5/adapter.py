"""The common base of the adapters of pictures and clips: loads a checkpoint and calls its transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Transformer3DModel
from torch import Tensor, nn

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.models.adapter import BlockLayout, CheckpointSetup, EncoderQuantiser, LatentEncoder, PreviewPipeline
from simpletuner.models.blocks import FastBlocks
from simpletuner.models.kandinsky5 import attention, denoiser, fast
from simpletuner.models.kandinsky5.options import KandinskyOptions, RopeScale
from simpletuner.models.kandinsky5.previews import StockPipeline, pipeline_name, usage_snippet
from simpletuner.models.kandinsky5.spec import TEMPLATES
from simpletuner.models.loading import (
    bare_pipeline,
    load_denoiser,
    load_scheduler,
    load_vae,
    stock_pipeline,
    with_solver,
)
from simpletuner.models.spec import FamilySpec
from simpletuner.models.usage import Usage

if TYPE_CHECKING:
    from simpletuner.models.kandinsky5.text import Kandinsky5TextEncoder


class Kandinsky5Adapter:
    """One Kandinsky 5 checkpoint.

    Attributes:
        vae_class: diffusers class of its VAE.
        encoder_class: wraps that VAE.
        takes_picture: the task starts from a picture (i2i, i2v).
        dtype: dtype that the transformer was loaded in.
    """

    spec: FamilySpec
    vae_class: Any
    encoder_class: Callable[[Any, torch.device, torch.dtype], LatentEncoder]

    def __init__(self, setup: CheckpointSetup) -> None:
        self.source, self.text, self.caching, self.solver = setup.source, setup.text, setup.caching, setup.solver
        self.options = setup.options.of(KandinskyOptions)
        self.task = setup.flavour.task
        self.takes_picture = self.task in ("i2i", "i2v")
        self.dtype = torch.float32
        self._padding: attention.TextPadding | None = None

    def load_text_encoder(
        self, device: torch.device, dtype: torch.dtype, quantise: EncoderQuantiser | None = None
    ) -> Kandinsky5TextEncoder:
        # Imports transformers' models; a run with full caches never needs them.
        from simpletuner.models.kandinsky5.text import Kandinsky5TextEncoder, select_template

        template = select_template(self.options.text_template, TEMPLATES[self.task])
        length, sees = self.spec.words.length(self.text), self.task in self.spec.words.hold_picture
        return Kandinsky5TextEncoder(self.source, template, length, device, dtype, quantise, sees_pictures=sees)

    def load_transformer(self, dtype: torch.dtype, *, hollow: bool = False) -> nn.Module:
        part = self.source["transformer"]
        transformer: nn.Module = load_denoiser(Kandinsky5Transformer3DModel, part, dtype, hollow=hollow)
        move_with_the_model(transformer)
        self.dtype, self._padding = dtype, attention.install(transformer)
        return transformer

    def block_layout(self, transformer: nn.Module) -> BlockLayout:
        return denoiser.block_layout(transformer)

    def use_fast_blocks(self, transformer: nn.Module) -> FastBlocks:
        return fast.install(transformer, self.padding)

    def store_modulation_in_bf16(self, transformer: nn.Module) -> int:
        return fast.store_in_bf16(transformer)

    @staticmethod
    def usage_snippet(usage: Usage) -> str:
        return usage_snippet(usage)

    def load_bare_pipeline(self) -> Any:
        return bare_pipeline(self._pipeline_class(), Kandinsky5Transformer3DModel, self.source)

    @property
    def padding(self) -> attention.TextPadding:
        if self._padding is None:
            raise RuntimeError("this needs a transformer from load_transformer()")
        return self._padding

    def load_vae(self, device: torch.device, dtype: torch.dtype) -> Any:
        return load_vae(self.vae_class, self.source["vae"], self.caching, device, dtype)

    def load_latent_encoder(self, device: torch.device, dtype: torch.dtype) -> LatentEncoder:
        return self.encoder_class(self.load_vae(device, dtype), device, dtype)

    def load_sampler(self, shift: float | None, *, from_picture: bool) -> Any:
        overrides = {} if shift is None else {"shift": shift}
        return with_solver(load_scheduler(self.source["scheduler"], **overrides), self.solver)

    def load_preview_pipeline(
        self, transformer: nn.Module, device: torch.device, shift: float | None
    ) -> PreviewPipeline:
        vae = self.load_vae(device, self.dtype)
        sampler = self.load_sampler(shift, from_picture=self.takes_picture)
        pipeline = stock_pipeline(
            self._pipeline_class(), self.source, transformer=transformer, vae=vae, scheduler=sampler
        )
        return StockPipeline(pipeline, self.encoder_class(vae, device, self.dtype), device, self.task)

    def velocity(
        self,
        transformer: nn.Module,
        noisy: NoisyBatch,
        channels: tuple[Tensor, ...],
        rope_scale: RopeScale,
        sparse_params: dict[str, Any] | None = None,
    ) -> Tensor:
        """Predict from the noisy latents and further input channels `B F H W C`; see `denoiser.predict_velocity`."""
        return denoiser.predict_velocity(
            transformer,
            self.padding,
            torch.cat([denoiser.channels_last(noisy.noisy_latents), *channels], dim=-1),
            noisy.timesteps,
            noisy.batch.embeds,
            rope_scale=rope_scale,
            dtype=self.dtype,
            sparse_params=sparse_params,
        )

    def _pipeline_class(self) -> Any:
        return getattr(diffusers, pipeline_name(self.task))


def move_with_the_model(transformer: Any) -> None:
    """Turn the frequencies of the timestep embedding into a buffer.

    diffusers keeps them in a plain attribute, which `to` does not move: every forward pass would copy them from the
    host and synchronise with the GPU.
    """
    embeddings = transformer.time_embeddings
    frequencies = embeddings.freqs
    del embeddings.freqs
    embeddings.register_buffer("freqs", frequencies, persistent=False)
