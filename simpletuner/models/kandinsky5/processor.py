"""Load the Qwen2.5-VL processor of a Kandinsky 5 checkpoint without torchvision.

The stock `Qwen2VLProcessor` insists on a video processor, which exists only with torchvision. Kandinsky's prompts hold
text and pictures, never clips, so a processor without that part serves every pipeline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class _TextAndImageProcessor(Qwen2VLProcessor):
    """`Qwen2VLProcessor` for text and pictures. Which parts it has, the base class reads off this signature."""

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


# Pipelines write these two names into model_index.json: a checkpoint saved with this class must load anywhere.
_TextAndImageProcessor.__name__ = _TextAndImageProcessor.__qualname__ = Qwen2VLProcessor.__name__
_TextAndImageProcessor.__module__ = Qwen2VLProcessor.__module__


def build_processor(image_processor: Qwen2VLImageProcessorPil, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """A processor from its two parts; pipelines take it for a `Qwen2VLProcessor`, which it is."""
    return _TextAndImageProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)


def load_processor(model: str | Path, *, subfolder: str = "tokenizer", **hub_kwargs: Any) -> ProcessorMixin:
    """The processor of a diffusers Kandinsky 5 checkpoint, to be handed to a pipeline as `tokenizer=`.

    `model` is a local folder or a hub id; `hub_kwargs` (`revision`, `cache_dir`, ...) go to the downloads. Raises
    `OSError` as transformers does when the files are not there.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(model), subfolder=subfolder, **hub_kwargs)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(str(model), subfolder=subfolder, **hub_kwargs)
    return build_processor(image_processor, tokenizer)
