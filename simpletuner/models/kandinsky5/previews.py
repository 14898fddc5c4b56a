"""Previews of Kandinsky 5 with diffusers' own pipelines, and the Python code that reproduces them."""

from __future__ import annotations

from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from simpletuner.models.adapter import LatentEncoder, PreviewRequest
from simpletuner.models.kandinsky5.options import KandinskyOptions
from simpletuner.models.kandinsky5.spec import IMAGE_SIZES, TEMPLATES
from simpletuner.models.spec import Task
from simpletuner.models.usage import EULER, Usage, snippet, solver_code, text


class StockPipeline:
    """diffusers' own pipeline of the flavour, called with cached embeddings."""

    def __init__(self, pipeline: Any, encoder: LatentEncoder, device: torch.device, task: Task) -> None:
        self.pipeline, self.vae, self.encoder, self.device, self.task = pipeline, pipeline.vae, encoder, device, task

    def render(self, request: PreviewRequest) -> list[Image]:
        """Sample one picture or clip of exactly the requested size and length."""
        inputs = request.inputs(self.z_of)
        for prefix, embeds in (("", request.embeds), ("negative_", request.negative)):
            lengths = [0, len(embeds["prompt_embeds"])]
            inputs[f"{prefix}prompt_embeds_qwen"] = embeds["prompt_embeds"][None].to(self.device)
            inputs[f"{prefix}prompt_embeds_clip"] = embeds["pooled_prompt_embeds"][None].to(self.device)
            inputs[f"{prefix}prompt_cu_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        if self.task in ("i2i", "i2v"):
            inputs["image"] = request.start
        if self.task in ("t2v", "i2v"):
            return list(self.pipeline(**inputs, num_frames=request.num_frames, output_type="pil").frames[0])
        # The pipeline rounds every request to its list of sizes, so the list is set to the requested size.
        self.pipeline.resolutions = [(request.width, request.height)]
        return list(self.pipeline(**inputs).image[:1])

    def z_of(self, latents: Tensor) -> Tensor:
        """z `B C F H W` from the pipeline's `B F H W C'`, which may have condition channels after z."""
        return latents[..., : self.pipeline.transformer.config.out_visual_dim].movedim(-1, 1)


def pipeline_name(task: Task) -> str:
    """The class of diffusers that samples a task."""
    return f"Kandinsky5{task.upper()}Pipeline"


def usage_snippet(usage: Usage) -> str:
    """Python code that reproduces the preview of the same prompt and seed."""
    pipeline, shift = pipeline_name(usage.task), f"{usage.shift:g}" if usage.shift else ""
    imports = ["from simpletuner.models.kandinsky5.loading import load_processor"]
    load = [
        f"model = {text(usage.model)}",
        f"pipe = {pipeline}.from_pretrained(model, tokenizer=load_processor(model), dtype=torch.{usage.dtype})",
    ]
    if usage.options.of(KandinskyOptions).text_template == "official":
        imports.append("from simpletuner.models.kandinsky5.templates import OFFICIAL")
        load.append(f'pipe.prompt_template = OFFICIAL["{TEMPLATES[usage.task]}"].text')
        load.append(f'pipe.prompt_template_encode_start_idx = OFFICIAL["{TEMPLATES[usage.task]}"].crop')
    more = [f"num_frames={usage.frames}"] if usage.task in ("t2v", "i2v") else []
    if not more and usage.size not in IMAGE_SIZES:  # to which pipelines of pictures round sizes
        load.append(f"pipe.resolutions = [{usage.size}]  # sample exactly this size")
    scheduler = f"{EULER}.from_config(pipe.scheduler.config, shift={shift})" if shift else None
    if usage.solver not in (None, "euler"):
        scheduler = solver_code(usage.solver, shift or "pipe.scheduler.config.shift")
    return snippet(usage, pipeline, load, imports=imports, scheduler=scheduler, more=more)
