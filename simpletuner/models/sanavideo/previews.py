"""Previews of Sana Video with diffusers' own two pipelines, and the Python code that reproduces them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import SanaImageToVideoPipeline, SanaVideoPipeline
from PIL import Image
from torch import nn

from simpletuner.models.adapter import LatentEncoder, PreviewRequest
from simpletuner.models.loading import stock_pipeline
from simpletuner.models.sanavideo.denoiser import collate_text
from simpletuner.models.source import ModelSource
from simpletuner.models.usage import Usage, snippet, solver_code, text

# Clips that start from a picture are sampled with Euler steps and this shift; the checkpoint's scheduler is for t2v.
I2V_SHIFT = 8.0


class StockSanaPipelines:
    """The t2v pipeline, and the i2v pipeline for previews with a source picture.

    Both use the transformer in training, and the VAE in float32; each has its own scheduler.
    """

    def __init__(
        self, source: ModelSource, transformer: nn.Module, encoder: LatentEncoder, samplers: tuple[Any, Any],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.vae, self.device, self.encoder = encoder.vae, device, encoder
        self.from_text, self.from_picture = (
            stock_pipeline(pipeline, source, transformer=transformer, vae=self.vae, scheduler=sampler)
            for pipeline, sampler in zip((SanaVideoPipeline, SanaImageToVideoPipeline), samplers, strict=True)
        )

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
            "frames": request.num_frames,
            "use_resolution_binning": False,
            "output_type": "pil",
            **request.inputs(lambda latents: latents),
        }


def usage_snippet(usage: Usage) -> str:
    """Python code that reproduces the preview of the same prompt and seed."""
    is_i2v = usage.task == "i2v"
    pipeline = "SanaImageToVideoPipeline" if is_i2v else "SanaVideoPipeline"
    solver = usage.solver or ("euler" if is_i2v else None)
    shift = f"{I2V_SHIFT:g}" if is_i2v else "pipe.scheduler.config.flow_shift"
    return snippet(
        usage,
        pipeline,
        [f"pipe = {pipeline}.from_pretrained({text(usage.model)}, dtype=torch.{usage.dtype})"],
        scheduler=solver_code(solver, shift) if solver else None,
        more=(f"frames={usage.frames}", "use_resolution_binning=False"),
    )
