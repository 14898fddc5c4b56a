"""Loads the parts of a Kandinsky 5 checkpoint, for pictures and clips.

The Qwen2.5-VL processor is built without torchvision, which its own class imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Transformer3DModel
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from simpletuner.models.adapter import LatentEncoder, PreviewRequest
from simpletuner.models.loading import load_denoiser
from simpletuner.models.source import Part

WITHOUT_TEXT = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


def load_transformer(part: Part, dtype: torch.dtype, *, hollow: bool) -> nn.Module:
    """Load the transformer onto the CPU; time and modulation layers stay float32."""
    transformer: nn.Module = load_denoiser(Kandinsky5Transformer3DModel, part, dtype, hollow=hollow)
    move_with_the_model(transformer)
    return transformer


def move_with_the_model(transformer: Any) -> None:
    """Turn the frequencies of the timestep embedding into a buffer.

    diffusers keeps them in a plain attribute, which `to` does not move: every forward pass would copy them from the
    host and synchronise with the GPU.
    """
    embeddings = transformer.time_embeddings
    frequencies = embeddings.freqs
    del embeddings.freqs
    embeddings.register_buffer("freqs", frequencies, persistent=False)


def stock_pipeline(pipeline_class: Any, transformer: nn.Module, vae: Any, scheduler: Any) -> Any:
    """The stock pipeline around a transformer, without text encoders."""
    pipeline = pipeline_class(transformer=transformer, vae=vae, scheduler=scheduler, **dict.fromkeys(WITHOUT_TEXT))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class StockPipeline:
    """diffusers' own pipeline of the flavour, called with cached embeddings; a subclass defines `render`."""

    def __init__(self, pipeline: Any, encoder: LatentEncoder, device: torch.device, takes_picture: bool) -> None:
        self.pipeline, self.vae, self.device, self.takes_picture = pipeline, pipeline.vae, device, takes_picture
        self.encoder = encoder

    def z_of(self, latents: Tensor) -> Tensor:
        """z `B C F H W` from the pipeline's `B F H W C'`, which may have condition channels after z."""
        return latents[..., : self.pipeline.transformer.config.out_visual_dim].movedim(-1, 1)

    def inputs(self, request: PreviewRequest) -> dict[str, Any]:
        """Arguments of the pipeline's call for one preview."""
        inputs: dict[str, Any] = {
            "height": request.height,
            "width": request.width,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": request.guidance_scale,
            "generator": torch.Generator(request.seed_device).manual_seed(request.seed),
            "callback_on_step_end": request.on_step_end(self.z_of),
            **({"image": request.start} if self.takes_picture else {}),
        }
        for prefix, embeds in (("", request.embeds), ("negative_", request.negative)):
            lengths = [0, len(embeds["prompt_embeds"])]
            inputs[f"{prefix}prompt_embeds_qwen"] = embeds["prompt_embeds"][None].to(self.device)
            inputs[f"{prefix}prompt_embeds_clip"] = embeds["pooled_prompt_embeds"][None].to(self.device)
            inputs[f"{prefix}prompt_cu_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        return inputs


class _TextAndImageProcessor(Qwen2VLProcessor):
    """`Qwen2VLProcessor` without video. The base class infers the processor's parts from this signature."""

    def __init__(
        self,
        image_processor: Qwen2VLImageProcessorPil,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
    ) -> None:
        self.image_token = "<|image_pad|>"
        self.video_token = "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


# Pipelines write these two names to model_index.json: a checkpoint saved with this class must load anywhere.
_TextAndImageProcessor.__name__ = _TextAndImageProcessor.__qualname__ = Qwen2VLProcessor.__name__
_TextAndImageProcessor.__module__ = Qwen2VLProcessor.__module__


def build_processor(image_processor: Qwen2VLImageProcessorPil, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Build a processor from its two parts; it passes for a `Qwen2VLProcessor`."""
    return _TextAndImageProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)


def load_processor(model: str | Path, *, subfolder: str = "tokenizer", **hub_kwargs: Any) -> ProcessorMixin:
    """The processor of a diffusers Kandinsky 5 checkpoint, to pass to a pipeline as `tokenizer=`.

    `model` is a local folder or a hub id; `hub_kwargs` (`revision`, `cache_dir`, ...) are passed to the download.
    Raises `OSError`, as transformers does, if the files are missing.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(model), subfolder=subfolder, **hub_kwargs)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(str(model), subfolder=subfolder, **hub_kwargs)
    return build_processor(image_processor, tokenizer)
