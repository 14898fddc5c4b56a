"""`simpletuner caption`: describe pictures and clips with the checkpoint's own text encoder.

files without caption ─► batch by batch: decode ─► describe ─► write beside each file
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pkgutil import resolve_name

import torch

from simpletuner.annexes.captions.captioner import Description, DescriptionRequest, QwenCaptioner
from simpletuner.annexes.captions.wording import ENCODER, LENGTHS, Wording, check_captioner
from simpletuner.atomic import write_atomically
from simpletuner.caching.fill import ShrinkingEncoder
from simpletuner.config.precision import quantisation, text_encoder_dtype
from simpletuner.config.schema import RunConfig
from simpletuner.data.dataset import DatasetFile
from simpletuner.data.discovery import CAPTION_SUFFIX
from simpletuner.data.files import MediaError
from simpletuner.distributed.world import compute_threads
from simpletuner.errors import Problems, UserError
from simpletuner.memory.precision import DTYPES
from simpletuner.models.source import Part
from simpletuner.plan.build import Plan
from simpletuner.reporting.events import EventStream
from simpletuner.run.caches import download, load_encoder
from simpletuner.training.assemble import make_accelerator

logger = logging.getLogger(__name__)

FRAMES = 8  # of a clip, evenly spaced over what is trained of it
WIDEST = 100  # ratio of the sides of a picture, beyond which nothing is left of it
FEWEST = 16  # tokens of a caption besides its trigger
TOGETHER = 8  # files described at a time, unless configured
SHARE = 0.8  # of the free device memory that weights may take
ADVICE = "These need less memory: group_offload_text_encoder, text_encoder_1_precision int8-quanto."

Shown = tuple[DatasetFile, DescriptionRequest]


def write_captions(survey: Plan, files: Sequence[DatasetFile], wording: Wording, events: EventStream) -> int:
    """Write a caption file beside each file and return their number; no caption is overwritten."""
    written = 0
    for file, caption in described(survey, files, wording, events):
        target = file.path.with_suffix(CAPTION_SUFFIX)
        # It may have been written meanwhile.
        if not target.exists() or not target.read_bytes().strip():
            write_atomically(target, f"{caption}\n")
            written += 1
    return written


def described(
    survey: Plan, files: Sequence[DatasetFile], wording: Wording, events: EventStream
) -> Iterator[tuple[DatasetFile, str]]:
    """Each file with its caption; the log names those that cannot be decoded.

    Raises:
        UserError: the model cannot be used, or does not fit into memory.
    """
    captioner = open_captioner(survey, events)
    most, config = longest(survey, captioner, wording), survey.config

    def describe(shown: Sequence[Shown]) -> list[Description]:
        return captioner.describe([request for _, request in shown], most)

    encode = ShrinkingEncoder(describe, lambda shown: str(shown[0].path), ADVICE)
    size = config.caching.text_encoder_batch_size or TOGETHER  # streamed weights are copied once per batch and token
    with events.phase("Writing captions", len(files), survey.spec.media_noun) as phase:
        for start in range(0, len(files), size):
            group = files[start : start + size]
            shown = [(file, request) for file in group if (request := _request(file, wording)) is not None]
            for (file, _), said in zip(shown, encode(shown), strict=True):
                caption = wording.caption(said.text, is_whole=said.is_whole)
                if caption:
                    yield file, caption
                else:
                    logger.warning("%s is left out: the model returned an empty caption", file.path)
            phase.advance(len(group), group[-1].name)


def open_captioner(survey: Plan, events: EventStream) -> QwenCaptioner:
    """Download what is missing, and load the captioner onto the device, or streamed to it.

    Raises:
        UserError: the checkpoint has none.
    """
    spec, source, config = survey.spec, survey.source, survey.config
    torch.set_num_threads(compute_threads(config.caching.torch_num_threads))
    absent = [source[role] for role in ENCODER if source[role].local_folder() is None]
    if absent:
        download(absent, events)
        Problems(check_captioner(spec, source)).raise_if_fatal()
    device = make_accelerator().device
    with events.phase("Loading the text encoder"):
        captioner: type[QwenCaptioner] = resolve_name(spec.words.captioner or "")
        return load_encoder(partial(captioner, source), _streamed_if_large(config, source[ENCODER[0]], device), device)


def _streamed_if_large(config: RunConfig, part: Part, device: torch.device) -> RunConfig:
    """With `offload: auto`, the settings with streaming if the weights would take most of the free device memory."""
    stored = quantisation(config.precision.text_encoder_1_precision)
    if config.offload.offload != "auto" or device.type != "cuda" or stored is not None:
        return config
    size = sum(map(math.prod, part.weight_shapes().values())) * DTYPES[text_encoder_dtype(config.precision)].itemsize
    fits = size < SHARE * torch.cuda.mem_get_info(device)[0]
    return config if fits else config.with_values({"group_offload_text_encoder": True}, "chosen by offload auto")


def longest(survey: Plan, captioner: QwenCaptioner, wording: Wording) -> int:
    """How many tokens may follow the trigger, so that the family's prompt truncates nothing.

    Raises:
        UserError: too few are left.
    """
    room = survey.spec.words.room(survey.config.text)
    left = room - (captioner.count(wording.lead) if wording.lead else 0)
    if left < FEWEST:
        raise UserError(f"--trigger {wording.trigger!r} leaves {left} of {room} tokens (tokenizer_max_length).")
    return min(left, LENGTHS[wording.style])


def _request(file: DatasetFile, wording: Wording) -> DescriptionRequest | None:
    """The pictures of a file and the instruction; None if it cannot be decoded."""
    try:
        frames = file.frames(FRAMES)
        width, height = frames[0].size
        if max(width, height) > WIDEST * min(width, height):
            raise MediaError(f"is {width}x{height}, too narrow to be described")
    except MediaError as error:
        logger.warning("%s is left out: it %s", file.path, error)
        return None
    return DescriptionRequest(frames, wording.instruction(is_clip=file.clip is not None), file.seconds)
