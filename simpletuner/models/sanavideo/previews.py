"""Previews of Sana Video with diffusers' own two pipelines."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from PIL import Image
from torch import nn

from simpletuner.models.adapter import LatentEncoder, PreviewRequest
from simpletuner.models.sanavideo.denoiser import collate_text

WITHOUT_TEXT = ("tokenizer", "text_encoder")
# Clips that start from a picture are sampled with Euler steps and this shift; the checkpoint's scheduler is for t2v.
I2V_SHIFT = 8.0


class StockSanaPipelines:
    """The t2v pipeline, and the i2v pipeline for previews with a source picture.

    Both use the transformer in training, and the VAE in float32; each has its own scheduler.
    """

    def __init__(
        self, transformer: nn.Module, encoder: LatentEncoder, samplers: tuple[Any, Any], device: torch.device
    ) -> None:
        self.vae, self.device, self.encoder = encoder.vae, device, encoder
        parts: dict[str, Any] = {"transformer": transformer, "vae": self.vae, **dict.fromkeys(WITHOUT_TEXT)}
        self.from_text: Any = diffusers.SanaVideoPipeline(**parts, scheduler=samplers[0])
        self.from_picture: Any = diffusers.SanaImageToVideoPipeline(**parts, scheduler=samplers[1])
        for pipeline in (self.from_text, self.from_picture):
            pipeline.set_progress_bar_config(disable=True)

    def render(self, request: PreviewRequest) -> list[Image.Image]:
        """Sample one clip of exactly the requested size and length."""
        inputs = self._inputs(request)
        if request.source is None:
            return list(self.from_text(**inputs).frames[0])
        return list(self.from_picture(**inputs, image=request.start).frames[0])

    def _inputs(self, request: PreviewRequest) -> dict[str, Any]:
        dtype = request.embeds["prompt_embeds"].dtype
        text, mask = collate_text([request.embeds, request.negative], dtype)
        return {
            "prompt_embeds": text[:1].to(self.device),
            "prompt_attention_mask": mask[:1].to(self.device),
            "negative_prompt_embeds": text[1:].to(self.device),
            "negative_prompt_attention_mask": mask[1:].to(self.device),
            "negative_prompt": None,
            "width": request.width,
            "height": request.height,
            "frames": request.num_frames,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": request.guidance_scale,
            "generator": torch.Generator(request.seed_device).manual_seed(request.seed),
            "use_resolution_binning": False,
            "output_type": "pil",
            "callback_on_step_end": request.on_step_end(lambda latents: latents),
        }
