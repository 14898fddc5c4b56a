"""Describes pictures and clips with the Qwen2.5-VL that Kandinsky 5 encodes its prompts with.

The checkpoint holds the whole model, language head included. Clips go in as Qwen's own video input: pairs of frames
with the seconds between them (Qwen2.5-VL technical report, arXiv:2502.13923), put together from patches of pictures,
because transformers' video processor needs torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image, Resampling
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, ProcessorMixin, Qwen2_5_VLForConditionalGeneration

from simpletuner.models.adapter import EncoderQuantiser
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.text import QWEN_LAYERS
from simpletuner.models.loading import load_whole, told_plainly
from simpletuner.models.source import ModelSource

# The chat format that Qwen2.5-VL was tuned with; `{}` are the picture or clip and the instruction.
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{}<|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
)
END = "<|im_end|>"
# Pixels of a picture (about 1280 tokens, which small print needs), and of a clip's frame (about 320).
PICTURE_PIXELS, FRAME_PIXELS = 1280 * 28**2, 320 * 28**2
REPETITION_PENALTY = 1.05  # as published with Qwen2.5-VL; greedy decoding may repeat itself without
IMAGE, VIDEO = 1, 2  # token types, from which positions are computed


@dataclass(frozen=True)
class DescriptionRequest:
    """A picture, or frames of a clip, to describe.

    Attributes:
        frames: one picture, or an even number of frames of one size at equal intervals.
        instruction: the task for the model.
        seconds: time span of the frames; None for a picture.
    """

    frames: Sequence[Image]
    instruction: str
    seconds: float | None = None


@dataclass(frozen=True)
class Description:
    """A text on one line, and whether the model finished it."""

    text: str
    is_whole: bool


class QwenCaptioner:
    """Qwen2.5-VL with its language head.

    Args:
        source: the checkpoint's components.
        device, dtype: where and in which precision it runs.
        quantise: quantises its language layers.
    """

    def __init__(
        self, source: ModelSource, device: torch.device, dtype: torch.dtype, quantise: EncoderQuantiser | None = None
    ) -> None:
        self.device = device
        with told_plainly(source["tokenizer"]):
            self.processor: ProcessorMixin = load_processor(source["tokenizer"].fetch().parent)
        self.qwen: Any = load_whole(Qwen2_5_VLForConditionalGeneration, source["text_encoder"], dtype=dtype)
        self.qwen.requires_grad_(False).eval()
        if quantise is not None:
            quantise(self.qwen, QWEN_LAYERS, encoder=1)
        self.qwen.to(device)

    @property
    def models(self) -> Sequence[nn.Module]:
        return [self.qwen]

    def count(self, text: str) -> int:
        """Length of a text in tokens."""
        return len(self.processor.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def describe(self, requests: Sequence[DescriptionRequest], most: int) -> list[Description]:
        """Describe each request by greedy decoding, in at most `most` tokens."""
        tokenizer = self.processor.tokenizer
        ends = [tokenizer.convert_tokens_to_ids(END), tokenizer.eos_token_id]
        rows = [self._prepare(request) for request in requests]
        start = int(rows[0]["input_ids"][0])  # in every prompt: transformers 5.17 counts padding as repetition
        fillers = {"input_ids": start, "attention_mask": 0, "mm_token_type_ids": 0}
        inputs = {  # padded on the left; the attention mask hides the padding
            name: pad_sequence([row[name] for row in rows], True, filler, "left") for name, filler in fillers.items()
        }
        visual = {name: [row[name] for row in rows if name in row] for row in rows for name in row.keys() - inputs}
        inputs |= {name: torch.cat(tensors) for name, tensors in visual.items()}
        written = self.qwen.generate(
            **{name: tensor.to(self.device) for name, tensor in inputs.items()},
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=most,
                repetition_penalty=REPETITION_PENALTY,
                eos_token_id=ends,
                pad_token_id=tokenizer.eos_token_id,
            ),
        )
        new = written[:, inputs["input_ids"].shape[1] :].cpu()
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        ended = torch.isin(new, torch.tensor(ends)).any(1).tolist()
        return [Description(" ".join(text.split()), whole) for text, whole in zip(texts, ended, strict=True)]

    def _prepare(self, request: DescriptionRequest) -> dict[str, Tensor]:
        """The model's inputs for one request."""
        is_clip = request.seconds is not None
        frames = [_shrunk(frame, FRAME_PIXELS if is_clip else PICTURE_PIXELS) for frame in request.frames]
        visual = self.processor.image_processor(images=frames, return_tensors="pt")
        patches, grid = visual["pixel_values"], visual["image_grid_thw"]
        if is_clip:
            patches, grid = self._paired(patches, len(frames)), torch.tensor([[len(frames) // 2, *grid[0, 1:]]])
        token = self.processor.video_token if is_clip else self.processor.image_token
        # The vision tower merges squares of patches into one token.
        places = int(grid.prod()) // self.processor.image_processor.merge_size**2
        prompt = CHAT.format(token * places, request.instruction)
        ids = self.processor.tokenizer(prompt, return_tensors="pt")["input_ids"][0]
        kind = VIDEO if is_clip else IMAGE
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == self.processor.tokenizer.convert_tokens_to_ids(token)).int() * kind,
        }
        if request.seconds is None:
            return {**inputs, "pixel_values": patches, "image_grid_thw": grid}
        # seconds between two pairs of frames
        between = torch.tensor([2 * request.seconds / len(frames)])
        return {**inputs, "pixel_values_videos": patches, "video_grid_thw": grid, "second_per_grid_ts": between}

    def _paired(self, patches: Tensor, frames: int) -> Tensor:
        """Patches of two successive frames, from patches in which the processor has doubled every frame."""
        depth = self.processor.image_processor.temporal_patch_size
        side = self.processor.image_processor.patch_size
        # pairs, frames of a pair, patches, 3, side, side
        single = patches.unflatten(1, (3, depth, side, side)).unflatten(0, (frames // 2, 2, -1))[:, :, :, :, 0]
        return single.permute(0, 2, 3, 1, 4, 5).flatten(0, 1).flatten(1)


def _shrunk(picture: Image, most: int) -> Image:
    """The picture, reduced to at most that many pixels."""
    scale = math.sqrt(most / (picture.width * picture.height))
    if scale >= 1:
        return picture
    return picture.resize((max(1, int(picture.width * scale)), max(1, int(picture.height * scale))), Resampling.LANCZOS)
