"""Writes captions beside files, whichever captioner describes them.

    files without caption ─► batch by batch: decode ─► describe ─► write beside each file

A captioner is the checkpoint's own model (`captioner`), or a server (`address_captioner`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from PIL.Image import Image, Resampling

from simpletuner.annexes.captions.wording import Wording
from simpletuner.atomic import write_atomically
from simpletuner.data.dataset import DatasetFile
from simpletuner.data.files import MediaError
from simpletuner.errors import UserError
from simpletuner.reporting.events import EventStream

FRAMES = 8  # per clip, evenly spaced over its trained part
WIDEST = 100  # maximum aspect ratio of a picture
# Most pixels of what is described: a picture of which small print can be read, and the frame of a
# clip. They are 1280 and 320 tokens of Qwen2.5-VL, each of which covers 28x28 pixels.
PICTURE_PIXELS = 1280 * 28**2
FRAME_PIXELS = 320 * 28**2

logger = logging.getLogger(__name__)


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

    @property
    def small_frames(self) -> list[Image]:
        """The frames, downscaled to the most pixels that are described."""
        most = PICTURE_PIXELS if self.seconds is None else FRAME_PIXELS
        return [_shrunk(frame, most) for frame in self.frames]


FileRequest = tuple[DatasetFile, DescriptionRequest]


class Description(NamedTuple):
    """What a captioner says about a file.

    Attributes:
        is_whole: the model finished the text.
        problem: why there is no text, as a sentence without its full stop; else empty.
    """

    text: str
    is_whole: bool = True
    problem: str = ""


class Captioner(Protocol):
    """Describes pictures and clips.

    Attributes:
        batch: number of files to describe at once.
    """

    batch: int

    def __call__(self, requests: Sequence[FileRequest], /) -> Sequence[Description]:
        """One description for each request.

        Raises:
            UserError: no file can be described.
        """


def write_captions(
    captioner: Captioner,
    files: Sequence[DatasetFile],
    wording: Wording,
    events: EventStream,
    noun: str,
) -> int:
    """Write a caption file beside each file; returns how many were written.

    Existing captions are kept.

    Raises:
        UserError: the captioner cannot go on; what was written is kept.
    """
    written = 0
    try:
        for file, caption in described(captioner, files, wording, events, noun):
            path = file.caption_path
            # The user may have written a caption in the meantime.
            if not path.exists() or not path.read_bytes().strip():
                write_atomically(path, f"{caption}\n")
                written += 1
    except UserError as error:
        if not written:
            raise
        kept = f"{written} captions are written; the same command writes the rest."
        raise UserError(f"{error} {kept}") from error
    return written


def described(
    captioner: Captioner,
    files: Sequence[DatasetFile],
    wording: Wording,
    events: EventStream,
    noun: str,
) -> Iterator[tuple[DatasetFile, str]]:
    """Caption files; those that cannot be decoded or described are logged and skipped.

    Args:
        noun: what the files are, for the progress.
    """
    with events.phase("Writing captions", len(files), noun) as phase:
        for start in range(0, len(files), captioner.batch):
            batch = files[start : start + captioner.batch]
            requests = list(_requests(batch, wording))
            for (file, _), answer in zip(requests, captioner(requests), strict=True):
                caption = wording.caption(answer.text, is_whole=answer.is_whole)
                if caption:
                    yield file, caption
                else:
                    problem = answer.problem or "the model returned an empty caption"
                    logger.warning("%s is left out: %s", file.path, problem)
            phase.advance(len(batch), batch[-1].name)


def _requests(files: Sequence[DatasetFile], wording: Wording) -> Iterator[FileRequest]:
    """The frames of files with the instruction, without those that cannot be decoded."""
    for file in files:
        try:
            frames = file.frames(FRAMES)
            width, height = frames[0].size
            if max(width, height) > WIDEST * min(width, height):
                raise MediaError(f"is {width}x{height}, too narrow to describe")
        except MediaError as error:
            logger.warning("%s is left out: it %s", file.path, error)
            continue
        instruction = wording.instruction(is_clip=file.clip is not None)
        yield file, DescriptionRequest(frames, instruction, file.seconds)


def _shrunk(picture: Image, most: int) -> Image:
    """The picture, downscaled to at most `most` pixels."""
    scale = math.sqrt(most / (picture.width * picture.height))
    if scale >= 1:
        return picture
    width = max(1, int(picture.width * scale))
    height = max(1, int(picture.height * scale))
    return picture.resize((width, height), Resampling.LANCZOS)
