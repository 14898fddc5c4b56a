"""A captioner of the checkpoint: Qwen2.5-VL, the prompt encoder of Kandinsky 5.

The checkpoint contains the whole model, including the language head. A clip is passed as Qwen's
video input: pairs of frames with the seconds between them (Qwen2.5-VL technical report,
arXiv:2502.13923), assembled from picture patches because transformers' video processor needs
torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, ProcessorMixin, Qwen2_5_VLForConditionalGeneration

from simpletuner.annexes.captions.wording import ENCODER, LENGTHS, Wording, check_captioner
from simpletuner.annexes.captions.writing import Description, DescriptionRequest, FileRequest
from simpletuner.config.precision import quantisation, text_encoder_dtype
from simpletuner.config.schema import OffloadConfig, PrecisionConfig
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
# Types of tokens, from which the model computes positions.
IMAGE = 1
VIDEO = 2
# Qwen2.5-VL's published value; without it, greedy decoding may loop.
REPETITION_PENALTY = 1.05
FEWEST_TOKENS = 16  # left for a caption after its trigger
BATCH = 8  # by default
WEIGHTS_SHARE = 0.8  # of the free device memory, at most, for weights
ADVICE = (
    "To reduce memory, set group_offload_text_encoder, or text_encoder_1_precision int8-quanto."
)


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
            For each request, a text on one line, and whether the model finished it.
        """
        tokenizer = self.processor.tokenizer
        ends = [tokenizer.convert_tokens_to_ids(END), tokenizer.eos_token_id]
        inputs = _batched([self._prepare(request) for request in requests])
        sequences = self.qwen.generate(
            **{name: tensor.to(self.device) for name, tensor in inputs.items()},
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=most,
                repetition_penalty=REPETITION_PENALTY,
                eos_token_id=ends,
                pad_token_id=tokenizer.eos_token_id,
            ),
        )
        prompt_length = inputs["input_ids"].shape[1]
        answers = sequences[:, prompt_length:].cpu()
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        finished = torch.isin(answers, torch.tensor(ends)).any(1).tolist()
        return [
            (" ".join(text.split()), is_whole)
            for text, is_whole in zip(texts, finished, strict=True)
        ]

    def _prepare(self, request: DescriptionRequest) -> dict[str, Tensor]:
        """The model's inputs for one request."""
        is_clip = request.seconds is not None
        frames = request.small_frames
        visual = self.processor.image_processor(images=frames, return_tensors="pt")
        patches = visual["pixel_values"]
        grid = visual["image_grid_thw"]  # frames or pairs of frames, rows and columns of patches
        if is_clip:
            patches = self._paired(patches, len(frames))
            grid = torch.tensor([[len(frames) // 2, *grid[0, 1:]]])
        token = self.processor.video_token if is_clip else self.processor.image_token
        # The vision tower merges a square of patches into one token.
        tokens = int(grid.prod()) // self.processor.image_processor.merge_size**2
        prompt = CHAT.format(token * tokens, request.instruction)
        ids = self.processor.tokenizer(prompt, return_tensors="pt")["input_ids"][0]
        is_visual = ids == self.processor.tokenizer.convert_tokens_to_ids(token)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": is_visual.int() * (VIDEO if is_clip else IMAGE),
        }
        if request.seconds is None:
            return {**inputs, "pixel_values": patches, "image_grid_thw": grid}
        seconds_per_pair = 2 * request.seconds / len(frames)
        return {
            **inputs,
            "pixel_values_videos": patches,
            "video_grid_thw": grid,
            "second_per_grid_ts": torch.tensor([seconds_per_pair]),
        }

    def _paired(self, patches: Tensor, frames: int) -> Tensor:
        """Patches of pairs of successive frames.

        Args:
            patches: of single frames, in which the processor has repeated every frame to fill a
                temporal patch.
        """
        depth = self.processor.image_processor.temporal_patch_size
        side = self.processor.image_processor.patch_size
        repeated = patches.unflatten(1, (3, depth, side, side)).unflatten(0, (frames // 2, 2, -1))
        # pairs, frames of a pair, patches, 3, side, side
        single = repeated[:, :, :, :, 0]
        return single.permute(0, 2, 3, 1, 4, 5).flatten(0, 1).flatten(1)


def _batched(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The inputs of several requests as one batch, padded on the left."""
    # Padded with a token of every prompt, since transformers 5.17 counts padding as repetition. The
    # attention mask hides the padding.
    filler = int(rows[0]["input_ids"][0])
    fillers = {"input_ids": filler, "attention_mask": 0, "mm_token_type_ids": 0}
    inputs = {}
    for name, padding in fillers.items():
        sequences = [row[name] for row in rows]
        inputs[name] = pad_sequence(
            sequences, batch_first=True, padding_value=padding, padding_side="left"
        )
    # Pictures and clips have inputs of different names; each is concatenated over its requests.
    visual: dict[str, list[Tensor]] = {}
    for row in rows:
        for name in row.keys() - fillers.keys():
            visual.setdefault(name, []).append(row[name])
    return inputs | {name: torch.cat(tensors) for name, tensors in visual.items()}


class DescribedBatches(ShrinkingEncoder[FileRequest, Description]):
    """Describes pictures in batches that fit into memory.

    Attributes:
        most_tokens: the longest answer.
        batch: number of files to describe at once.
    """

    def __init__(self, captioner: QwenCaptioner, most_tokens: int, batch: int) -> None:
        super().__init__(ADVICE)
        self.captioner = captioner
        self.most_tokens = most_tokens
        self.batch = batch

    def name(self, item: FileRequest) -> str:
        file, _ = item
        return str(file.path)

    def encode(self, items: Sequence[FileRequest]) -> list[Description]:
        answers = self.captioner.describe([request for _, request in items], self.most_tokens)
        return [Description(text, is_whole) for text, is_whole in answers]


def checkpoint_captioner(survey: Survey, wording: Wording, events: EventStream) -> DescribedBatches:
    """The captioner of the run's checkpoint.

    Raises:
        UserError: the model cannot be used, or does not fit into memory.
    """
    captioner = open_captioner(survey, events)
    # A large batch is fast: streamed weights are copied once per batch and token.
    batch = survey.config.caching.text_encoder_batch_size or BATCH
    return DescribedBatches(captioner, longest(survey, captioner, wording), batch)


def open_captioner(survey: Survey, events: EventStream) -> QwenCaptioner:
    """Download missing components and load the captioner, onto the device or streamed to it.

    Raises:
        UserError: the checkpoint has no captioner.
    """
    spec = survey.spec
    source = survey.source
    config = survey.config
    torch.set_num_threads(compute_threads(config.caching.torch_num_threads))
    missing = [source[role] for role in ENCODER if source[role].local_folder() is None]
    if missing:
        download(missing, events)
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
    """The settings; with `offload: auto`, they stream an encoder that would fill the device."""
    is_quantised = quantisation(precision.text_encoder_1_precision) is not None
    if offload.offload != "auto" or device.type != "cuda" or is_quantised:
        return offload
    parameters = sum(math.prod(shape) for shape in part.weight_shapes().values())
    weight_bytes = parameters * DTYPES[text_encoder_dtype(precision)].itemsize
    free_bytes, _total = torch.cuda.mem_get_info(device)
    if weight_bytes < WEIGHTS_SHARE * free_bytes:
        return offload
    return offload.model_copy(update={"group_offload_text_encoder": True})


def longest(survey: Survey, captioner: QwenCaptioner, wording: Wording) -> int:
    """The maximum number of tokens after the trigger: of the style, and of the family's prompt.

    Raises:
        UserError: the trigger leaves too few.
    """
    room = survey.spec.captions.room(survey.config.text)
    left = room
    if wording.lead:
        left -= captioner.count(wording.lead)
    if left < FEWEST_TOKENS:
        raise UserError(
            f"--trigger {wording.trigger!r} leaves {left} of {room} tokens (tokenizer_max_length)."
        )
    return min(left, LENGTHS[wording.style])
