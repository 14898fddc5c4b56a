"""Captions pictures and clips with Qwen2.5-VL, the prompt encoder of Kandinsky 5
(`simpletuner caption`).

files without caption ─► batch by batch: decode ─► describe ─► write beside each file

The checkpoint contains the whole model, including the language head. A clip is passed as Qwen's
video input: pairs of frames with the seconds between them (Qwen2.5-VL technical report,
arXiv:2502.13923), assembled from picture patches because transformers' video processor needs
torchvision.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from PIL.Image import Image, Resampling
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, ProcessorMixin, Qwen2_5_VLForConditionalGeneration

from simpletuner.annexes.captions.wording import ENCODER, LENGTHS, Wording, check_captioner
from simpletuner.atomic import write_atomically
from simpletuner.config.precision import quantisation, text_encoder_dtype
from simpletuner.config.schema import OffloadConfig, PrecisionConfig
from simpletuner.data.dataset import DatasetFile
from simpletuner.data.files import MediaError
from simpletuner.distributed.world import compute_threads
from simpletuner.encoding.download import download
from simpletuner.encoding.encoders import load_encoder
from simpletuner.encoding.shrinking import ShrinkingEncoder
from simpletuner.errors import Problems, UserError
from simpletuner.memory.precision import DTYPES
from simpletuner.models.adapter import EncoderQuantiser
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.text import QWEN_LAYERS
from simpletuner.models.loading import load_whole, user_errors
from simpletuner.models.source import ModelSource
from simpletuner.planning.plans import Survey
from simpletuner.reporting.events import EventStream
from simpletuner.training.assemble import make_accelerator
from simpletuner.weights.part import Part

# The chat format of Qwen2.5-VL; the placeholders are the picture or clip, and the instruction.
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|>{}<|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
)
END = "<|im_end|>"
# Maximum pixels of a picture (about 1280 tokens, enough to read small print) and of a clip's frame
# (about 320).
PICTURE_PIXELS = 1280 * 28**2
FRAME_PIXELS = 320 * 28**2
# token types, used to compute positions
IMAGE = 1
VIDEO = 2


@dataclass(frozen=True)
class DescriptionRequest:
    """A picture, or frames of a clip, to describe.

    Attributes:
        frames: one picture, or an even number of equally spaced frames of the same size.
        instruction: what the model is asked to do.
        seconds: duration of the frames; None for a picture.
    """

    frames: Sequence[Image]
    instruction: str
    seconds: float | None = None


class QwenCaptioner:
    """Qwen2.5-VL with its language head.

    Args:
        source: the checkpoint's components.
        device, dtype: of the model.
        quantise: quantises the language layers.
    """

    def __init__(
        self,
        source: ModelSource,
        device: torch.device,
        dtype: torch.dtype,
        quantise: EncoderQuantiser | None = None,
    ) -> None:
        self.device = device
        with user_errors(source["tokenizer"]):
            self.processor: ProcessorMixin = load_processor(source["tokenizer"].fetch().parent)
        self.qwen: Any = load_whole(
            Qwen2_5_VLForConditionalGeneration, source["text_encoder"], dtype=dtype
        )
        self.qwen.requires_grad_(False).eval()
        if quantise is not None:
            quantise(self.qwen, QWEN_LAYERS, encoder=1)
        self.qwen.to(device)

    @property
    def models(self) -> Sequence[nn.Module]:
        return [self.qwen]

    def count(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.processor.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def describe(self, requests: Sequence[DescriptionRequest], most: int) -> list[tuple[str, bool]]:
        """Describe pictures and clips by greedy decoding of at most `most` tokens.

        Returns:
            for each request, a text on one line, and whether the model finished it.
        """
        tokenizer = self.processor.tokenizer
        ends = [tokenizer.convert_tokens_to_ids(END), tokenizer.eos_token_id]
        rows = [self._prepare(request) for request in requests]
        # Padded with a token of every prompt, since transformers 5.17 counts padding as repetition.
        start = int(rows[0]["input_ids"][0])
        fillers = {"input_ids": start, "attention_mask": 0, "mm_token_type_ids": 0}
        inputs = {  # padded on the left; the attention mask hides the padding
            name: pad_sequence([row[name] for row in rows], True, filler, "left")
            for name, filler in fillers.items()
        }
        visual = {
            name: [row[name] for row in rows if name in row]
            for row in rows
            for name in row.keys() - inputs
        }
        inputs |= {name: torch.cat(tensors) for name, tensors in visual.items()}
        written = self.qwen.generate(
            **{name: tensor.to(self.device) for name, tensor in inputs.items()},
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=most,
                # Qwen2.5-VL's published value; without it, greedy decoding may loop
                repetition_penalty=1.05,
                eos_token_id=ends,
                pad_token_id=tokenizer.eos_token_id,
            ),
        )
        new = written[:, inputs["input_ids"].shape[1] :].cpu()
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        ended = torch.isin(new, torch.tensor(ends)).any(1).tolist()
        return [
            (" ".join(text.split()), is_whole) for text, is_whole in zip(texts, ended, strict=True)
        ]

    def _prepare(self, request: DescriptionRequest) -> dict[str, Tensor]:
        """The model's inputs for one request."""
        is_clip = request.seconds is not None
        frames = [
            _shrunk(frame, FRAME_PIXELS if is_clip else PICTURE_PIXELS) for frame in request.frames
        ]
        visual = self.processor.image_processor(images=frames, return_tensors="pt")
        patches = visual["pixel_values"]
        grid = visual["image_grid_thw"]
        if is_clip:
            patches = self._paired(patches, len(frames))
            grid = torch.tensor([[len(frames) // 2, *grid[0, 1:]]])
        token = self.processor.video_token if is_clip else self.processor.image_token
        # The vision tower merges a square of patches into one token.
        tokens = int(grid.prod()) // self.processor.image_processor.merge_size**2
        prompt = CHAT.format(token * tokens, request.instruction)
        ids = self.processor.tokenizer(prompt, return_tensors="pt")["input_ids"][0]
        kind = VIDEO if is_clip else IMAGE
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (
                ids == self.processor.tokenizer.convert_tokens_to_ids(token)
            ).int()
            * kind,
        }
        if request.seconds is None:
            return {**inputs, "pixel_values": patches, "image_grid_thw": grid}
        # Seconds between two pairs of frames.
        interval = torch.tensor([2 * request.seconds / len(frames)])
        return {
            **inputs,
            "pixel_values_videos": patches,
            "video_grid_thw": grid,
            "second_per_grid_ts": interval,
        }

    def _paired(self, patches: Tensor, frames: int) -> Tensor:
        """Patches of pairs of successive frames, from patches in which the processor has duplicated
        every frame.
        """
        depth = self.processor.image_processor.temporal_patch_size
        side = self.processor.image_processor.patch_size
        # pairs, frames of a pair, patches, 3, side, side
        single = patches.unflatten(1, (3, depth, side, side)).unflatten(0, (frames // 2, 2, -1))[
            :, :, :, :, 0
        ]
        return single.permute(0, 2, 3, 1, 4, 5).flatten(0, 1).flatten(1)


def _shrunk(picture: Image, most: int) -> Image:
    """The picture, downscaled to at most `most` pixels."""
    scale = math.sqrt(most / (picture.width * picture.height))
    if scale >= 1:
        return picture
    return picture.resize(
        (max(1, int(picture.width * scale)), max(1, int(picture.height * scale))),
        Resampling.LANCZOS,
    )


logger = logging.getLogger(__name__)

FRAMES = 8  # per clip, evenly spaced over its trained part
WIDEST = 100  # maximum aspect ratio of a picture
FEWEST = 16  # minimum number of tokens left for a caption after its trigger
TOGETHER = 8  # default batch size
SHARE = 0.8  # of the free device memory, at most, for weights
ADVICE = (
    "To reduce memory, set group_offload_text_encoder, or text_encoder_1_precision int8-quanto."
)

Shown = tuple[DatasetFile, DescriptionRequest]


def write_captions(
    survey: Survey, files: Sequence[DatasetFile], wording: Wording, events: EventStream
) -> int:
    """Write a caption file beside each file, keeping existing captions; returns how many were
    written.
    """
    written = 0
    for file, caption in described(survey, files, wording, events):
        target = file.caption_path
        # The user may have written one in the meantime.
        if not target.exists() or not target.read_bytes().strip():
            write_atomically(target, f"{caption}\n")
            written += 1
    return written


def described(
    survey: Survey, files: Sequence[DatasetFile], wording: Wording, events: EventStream
) -> Iterator[tuple[DatasetFile, str]]:
    """Caption files; files that cannot be decoded are logged and skipped.

    Raises:
        UserError: the model cannot be used, or does not fit into memory.
    """
    captioner = open_captioner(survey, events)
    most = longest(survey, captioner, wording)
    config = survey.config
    describe = DescribedBatches(captioner, most)
    size = (
        config.caching.text_encoder_batch_size or TOGETHER
    )  # streamed weights are copied once per batch and token
    with events.phase("Writing captions", len(files), survey.spec.media_noun) as phase:
        for start in range(0, len(files), size):
            group = files[start : start + size]
            shown = [
                (file, request)
                for file in group
                if (request := _request(file, wording)) is not None
            ]
            for (file, _), (text, is_whole) in zip(shown, describe(shown), strict=True):
                if caption := wording.caption(text, is_whole=is_whole):
                    yield file, caption
                else:
                    logger.warning("%s is left out: the model returned an empty caption", file.path)
            phase.advance(len(group), group[-1].name)


class DescribedBatches(ShrinkingEncoder[Shown, tuple[str, bool]]):
    """Describes pictures in batches that fit into memory.

    Attributes:
        most_tokens: the longest answer.
    """

    def __init__(self, captioner: QwenCaptioner, most_tokens: int) -> None:
        super().__init__(ADVICE)
        self.captioner = captioner
        self.most_tokens = most_tokens

    def name(self, item: Shown) -> str:
        file, _ = item
        return str(file.path)

    def encode(self, items: Sequence[Shown]) -> list[tuple[str, bool]]:
        return self.captioner.describe([request for _, request in items], self.most_tokens)


def open_captioner(survey: Survey, events: EventStream) -> QwenCaptioner:
    """Download missing components and load the captioner, onto the device or streamed to it.

    Raises:
        UserError: the checkpoint has no captioner.
    """
    spec = survey.spec
    source = survey.source
    config = survey.config
    torch.set_num_threads(compute_threads(config.caching.torch_num_threads))
    absent = [source[role] for role in ENCODER if source[role].local_folder() is None]
    if absent:
        download(absent, events)
        report = Problems()
        check_captioner(spec, source, report)
        report.raise_if_fatal()
    device = make_accelerator().device
    with events.phase("Loading the text encoder"):
        captioner: type[QwenCaptioner] = resolve_name(spec.captions.captioner or "")
        offload = _streamed_if_large(config.precision, config.offload, source[ENCODER[0]], device)
        return load_encoder(partial(captioner, source), config.precision, offload, device)


def _streamed_if_large(
    precision: PrecisionConfig, offload: OffloadConfig, part: Part, device: torch.device
) -> OffloadConfig:
    """The settings; with `offload: auto`, they stream an encoder that would fill most of the free
    device memory.
    """
    stored = quantisation(precision.text_encoder_1_precision)
    if offload.offload != "auto" or device.type != "cuda" or stored is not None:
        return offload
    numbers = sum(math.prod(shape) for shape in part.weight_shapes().values())
    size = numbers * DTYPES[text_encoder_dtype(precision)].itemsize
    if size < SHARE * torch.cuda.mem_get_info(device)[0]:
        return offload
    return offload.model_copy(update={"group_offload_text_encoder": True})


def longest(survey: Survey, captioner: QwenCaptioner, wording: Wording) -> int:
    """The maximum number of tokens after the trigger: by style, and so that the family's prompt is
    not truncated.

    Raises:
        UserError: the trigger leaves too few.
    """
    room = survey.spec.captions.room(survey.config.text)
    left = room - (captioner.count(wording.lead) if wording.lead else 0)
    if left < FEWEST:
        raise UserError(
            f"--trigger {wording.trigger!r} leaves {left} of {room} tokens (tokenizer_max_length)."
        )
    return min(left, LENGTHS[wording.style])


def _request(file: DatasetFile, wording: Wording) -> DescriptionRequest | None:
    """The frames of a file with the instruction; None if it cannot be decoded."""
    try:
        frames = file.frames(FRAMES)
        width, height = frames[0].size
        if max(width, height) > WIDEST * min(width, height):
            raise MediaError(f"is {width}x{height}, too narrow to describe")
    except MediaError as error:
        logger.warning("%s is left out: it %s", file.path, error)
        return None
    return DescriptionRequest(
        frames, wording.instruction(is_clip=file.clip is not None), file.seconds
    )
