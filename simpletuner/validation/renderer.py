"""Renders prompts with the family's stock pipeline, and writes the pictures or clips."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import nn

from simpletuner.atomic import open_atomically
from simpletuner.config.schema import OffloadConfig, ValidationConfig
from simpletuner.config.types import Size
from simpletuner.memory.offload.attach import Offload
from simpletuner.models.adapter import FamilyAdapter, PreviewPipeline, PreviewRequest
from simpletuner.models.decoding import decode_in
from simpletuner.validation.encoded_prompt import EncodedPrompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RenderSettings:
    """How previews are rendered and written.

    Attributes:
        shift: shift of the sampling schedule; None for the base model's.
        keep_vae_loaded: keep the VAE on a GPU between previews; None does not.
        frame_rate: frames per second of clips; None for picture families.
    """

    validation: ValidationConfig
    offload: OffloadConfig
    shift: float | None = None
    keep_vae_loaded: bool | None = None
    frame_rate: float | None = None

    @property
    def suffix(self) -> str:
        """File suffix of previews."""
        if self.frame_rate is not None:
            return ".mp4"
        kind = self.validation.validation_image_format
        return ".jpg" if kind == "jpeg" else f".{kind}"


@dataclass
class Renderer:
    """Keeps the stock pipeline between previews, and writes previews."""

    settings: RenderSettings
    _pipeline: PreviewPipeline | None = field(default=None, init=False)

    def open(
        self, adapter: FamilyAdapter, transformer: nn.Module, device: torch.device
    ) -> PreviewPipeline:
        """The pipeline around a transformer, with its VAE placed and configured."""
        if self._pipeline is None:
            self._pipeline = adapter.load_preview_pipeline(transformer, device, self.settings.shift)
            decoding = self.settings.validation.validation_decoding
            decode_in(decoding, self._pipeline.vae, adapter.spec.vae_stride)
            place_vae(self._pipeline.vae, transformer, self.settings.offload, device)
        return self._pipeline

    def release(self) -> None:
        """Free the VAE on a GPU, where memory is scarce; a CPU keeps it for the next previews.

        Requires that no other reference to the pipeline exists; otherwise its memory would not be
        freed.
        """
        if torch.cuda.is_available() and not self.settings.keep_vae_loaded:
            self._pipeline = None
            gc.collect()
            torch.cuda.empty_cache()

    def request(self, prompt: EncodedPrompt, size: Size, seed: int) -> PreviewRequest:
        """The preview request of a prompt at a size."""
        validation: Any = self.settings.validation  # with the family's defaults
        # CPU and GPU generators draw different noise for the same seed.
        on_gpu = validation.validation_seed_source == "gpu" and torch.cuda.is_available()
        is_clip = self.settings.frame_rate is not None
        guidance = prompt.prompt.guidance
        if guidance is None:
            guidance = float(validation.validation_guidance)
        return PreviewRequest(
            embeds=prompt.embeds(size),
            negative=prompt.negative(size),
            width=size[0],
            height=size[1],
            num_inference_steps=validation.validation_num_inference_steps,
            guidance_scale=guidance,
            seed=seed,
            seed_device=torch.device("cuda" if on_gpu else "cpu"),
            source=prompt.source(size),
            num_frames=validation.validation_num_video_frames if is_clip else 1,
            batched=bool(validation.validation_batched_guidance),
        )

    def write(self, frames: list[Image], path: Path) -> None:
        """Write a picture or a clip, atomically; its folder is created if missing."""
        warn_of_one_colour(frames, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.settings.frame_rate is not None:
            # Imported here because it loads FFmpeg, which pictures do not need.
            from simpletuner.data.clip_writer import write_mp4

            write_mp4(path, frames, self.settings.frame_rate)
            return
        with open_atomically(path) as file:
            frames[0].convert("RGB").save(file, self.settings.validation.validation_image_format)


def warn_of_one_colour(frames: Sequence[Image], path: Path) -> None:
    """Log a warning if every frame of a preview has a single colour; NaN is rendered black."""
    if all(has_one_colour(frame) for frame in frames):
        logger.warning(
            "%s shows one colour only: the weights have diverged, or the VAE is broken or "
            "needs vae_dtype fp32.",
            path,
        )


def has_one_colour(frame: Image) -> bool:
    """Whether all pixels are equal in every channel; a difference of one level is rounding."""
    channels: Any = frame.convert("RGB").getextrema()
    return all(highest - lowest <= 1 for lowest, highest in channels)


def place_vae(
    vae: nn.Module, transformer: nn.Module, config: OffloadConfig, device: torch.device
) -> None:
    """Apply the configured offloading to a loaded VAE; by default it stays on the device."""
    if config.group_offload_vae:
        Offload(config, device).attach_to_stacks(vae)
    elif config.enable_model_cpu_offload:
        take_turns(transformer, vae, device)


def take_turns(transformer: nn.Module, vae: nn.Module, device: torch.device) -> None:
    """Move the VAE to the device only while it works, and the transformer to the CPU meanwhile.

    Parameters remain the same objects, so the optimizer's references stay valid.
    """
    vae.to("cpu")
    # The VAE encodes in previews with a source picture.
    for name in ("encode", "decode"):
        inner = getattr(vae, name)

        @wraps(inner)
        def alone(*inputs: Any, inner: Any = inner, **settings: Any) -> Any:
            transformer.to("cpu")
            vae.to(device)
            try:
                return inner(*inputs, **settings)
            finally:
                vae.to("cpu")
                transformer.to(device)

        setattr(vae, name, alone)
