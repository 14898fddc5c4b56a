"""The second reader of clips, decord: for files that PyAV cannot read, and for datasets that ask
for it.

decord is unmaintained and not available everywhere. It neither deinterlaces nor shows transparency,
and rounds colours differently, so its frames are never cached under the same key as PyAV's. It
refuses clips that it would read wrongly.
"""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
from PIL import Image

from simpletuner.data.clip_file import head_of, open_container, streams_of_frames
from simpletuner.data.clips import (
    MISSING_SECONDS,
    ClipFacts,
    ColorMatrix,
    choose_frames,
    clip_suffix,
)
from simpletuner.data.files import MediaError, UnsuitableError

# Frames per call to decord; 200 frames at 1280x720 would take half a gigabyte.
SLICE = 8
# First byte of each packet of an MPEG transport stream.
TRANSPORT_SYNC = b"G"
# What a process runs that reads the facts of a clip, and how many seconds it may take.
PROBE = (
    "import pathlib, sys; from simpletuner.data.clip_decord import probe; "
    "print(probe(pathlib.Path(sys.argv[1])))"
)
LONGEST_PROBE = 60
REMEDY = "set video.reader of its dataset to pyav, or re-encode it with ffmpeg"


def read_facts_with_decord(path: Path) -> ClipFacts | None:
    """Size, length and rate of a clip that PyAV cannot read; None if decord cannot read it
    either.
    """
    # Only what begins like a clip: of a playlist, decord would open other files.
    if clip_suffix(head_of(path)) is None or _decord() is None:
        return None
    # In a process of its own: on most of these files decord writes to the terminal, and it may
    # crash.
    command = [sys.executable, "-c", PROBE, str(path)]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST_PROBE, check=True
        ).stdout
        return ClipFacts(**json.loads(answer))
    # It cannot read the clip, or it wrote something else than the facts (UnicodeError is a
    # ValueError).
    except (subprocess.SubprocessError, ValueError):
        return None


def probe(path: Path) -> str:
    """The facts of a clip as JSON; on errors of decord, as `read_with_decord`."""
    with _opened(path) as reader:
        spans = _spans(reader)
        height, width, _ = reader[0].shape
    start = spans[0][0]
    last, end = spans[-1]
    rate = (len(spans) - 1) / (last - start) if last > start else 0.0
    return json.dumps(asdict(ClipFacts(width, height, end - start, rate, reader="decord")))


def read_with_decord(
    path: Path,
    moments: Sequence[float],
    matrix: ColorMatrix | None = None,
    background: str = "white",
) -> Iterator[Image.Image]:
    """The frames shown at `moments`, as `clip_frames.read_with_av`; untagged colours are read as
    BT.601.

    Raises:
        UnsuitableError: decord is not installed, cannot read the clip, or would read it wrongly.
    """
    if matrix == "bt709":
        raise UnsuitableError(
            f"names no colours and counts as BT.709, which decord cannot read; {REMEDY}"
        )
    _check_container(path)
    with _opened(path) as reader:
        indices = deque(choose_frames(enumerate(_times(reader, moments[-1])), moments))
        # Decode every frame: decord seeks to skip frames, and after a seek some codecs return wrong
        # ones.
        for start in range(0, indices[-1] + 1, SLICE):
            numbers = range(start, min(start + SLICE, indices[-1] + 1))
            for number, frame in zip(numbers, reader.get_batch(numbers).asnumpy(), strict=True):
                picture = Image.fromarray(frame)
                while indices and indices[0] == number:
                    indices.popleft()
                    yield picture


def _check_container(path: Path) -> None:
    head = head_of(path)
    # The files of cameras begin with a time stamp of four bytes.
    if TRANSPORT_SYNC in (head[:1], head[4:5]):
        raise UnsuitableError(
            f"is a transport stream, of which decord skips the first frames; {REMEDY}"
        )
    try:
        with open_container(path) as container:
            count = len(streams_of_frames(container))
    except (av.FFmpegError, MediaError):  # PyAV cannot open it, which is why decord is asked
        return
    if count > 1:
        raise UnsuitableError(
            f"holds {count} streams of frames, and decord may read the wrong one; {REMEDY}"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A reader of decord; its errors in the block become `UnsuitableError`."""
    decord = _decord()
    if decord is None:
        raise UnsuitableError(f"needs decord, which is not installed; {REMEDY}")
    try:
        # One reader per call: sharing a reader between threads crashes the process.
        yield decord.VideoReader(str(path), num_threads=1)
    except (decord.base.DECORDError, RuntimeError, IndexError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsuitableError(f"cannot be read by decord: {reason}; {REMEDY}") from error


def _spans(reader: Any) -> list[tuple[float, float]]:
    """(start, end) of each frame in seconds.

    Raises:
        UnsuitableError: they are wrong: with edit lists they start below 0, in AVI and MPEG they do
            not increase.
    """
    spans = [
        (float(begin), float(end)) for begin, end in reader.get_frame_timestamp(range(len(reader)))
    ]
    grows = all(earlier < later for (earlier, _), (later, _) in pairwise(spans))
    if len(spans) != len(reader) or not spans or spans[0][0] < 0 or not grows:
        raise UnsuitableError(f"has times that decord reads wrongly; {REMEDY}")
    return spans


def _times(reader: Any, last: float) -> list[float]:
    """Start of each frame in seconds after the first.

    Raises:
        UnsuitableError: the clip ends before the last moment, or its times are wrong.
    """
    spans = _spans(reader)
    start = spans[0][0]
    end = spans[-1][1]
    if last > end - start + MISSING_SECONDS:
        raise UnsuitableError(f"ends too early for decord; {REMEDY}")
    return [begin - start for begin, _ in spans]


@functools.cache
def _decord() -> Any:
    """The decord module, or None if it is not installed or its libraries do not load."""
    try:
        decord = importlib.import_module("decord")
    except (ImportError, OSError, RuntimeError):
        return None
    decord.logging.set_level(decord.logging.QUIET)
    return decord
