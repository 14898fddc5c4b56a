"""The Qwen2.5-VL processor of Kandinsky 5 without torchvision, which its own class imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class _TextAndImageProcessor(Qwen2VLProcessor):
    """`Qwen2VLProcessor` without video.

    The base class infers a processor's parts from the signature of its `__init__`.
    """

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
        # Past `Qwen2VLProcessor`, which would pass on a video processor as well.
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


# Pipelines write these two names to model_index.json: a checkpoint saved with this class must load
# anywhere.
_TextAndImageProcessor.__name__ = Qwen2VLProcessor.__name__
_TextAndImageProcessor.__qualname__ = Qwen2VLProcessor.__name__
_TextAndImageProcessor.__module__ = Qwen2VLProcessor.__module__


def build_processor(
    image_processor: Qwen2VLImageProcessorPil, tokenizer: PreTrainedTokenizerBase
) -> ProcessorMixin:
    """Build a processor from its two parts; it passes for a `Qwen2VLProcessor`."""
    return _TextAndImageProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)


def load_processor(
    model: str | Path, *, subfolder: str = "tokenizer", **hub_kwargs: Any
) -> ProcessorMixin:
    """The processor of a diffusers Kandinsky 5 checkpoint, to pass to a pipeline as `tokenizer=`.

    `model` is a local folder or a hub id; `hub_kwargs` (`revision`, `cache_dir`, ...) are passed to
    the download. Raises `OSError`, as transformers does, if the files are missing.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(model), subfolder=subfolder, **hub_kwargs)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(
        str(model), subfolder=subfolder, **hub_kwargs
    )
    return build_processor(image_processor, tokenizer)
