"""The second reader of clips, decord: for files that PyAV cannot read, or at the user's request.

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
from simpletuner.data.files import MediaError, UnsuitableError, describe

# Frames per call to decord; 200 frames at 1280x720 would take half a gigabyte.
SLICE = 8
# First byte of each packet of an MPEG transport stream.
TRANSPORT_SYNC = b"G"
# The program of a process that reads the facts of a clip, and the seconds that it may take.
PROBE = (
    "import pathlib, sys; from simpletuner.data.clip_decord import probe; "
    "print(probe(pathlib.Path(sys.argv[1])))"
)
LONGEST_PROBE = 60
REMEDY = "set video.reader of its dataset to pyav, or re-encode it with ffmpeg"


def read_facts_with_decord(path: Path) -> ClipFacts | None:
    """Size, length and rate of a clip that PyAV cannot read; None if decord fails as well."""
    # Only what begins like a clip: of a playlist, decord would open other files.
    if clip_suffix(head_of(path)) is None or _decord() is None:
        return None
    # In a separate process: on most of these files decord writes to the terminal, and it may crash.
    command = [sys.executable, "-c", PROBE, str(path)]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST_PROBE, check=True
        )
        return ClipFacts(**json.loads(process.stdout))
    # decord cannot read the clip, or its output is not the facts (UnicodeError is a ValueError).
    except (subprocess.SubprocessError, ValueError):
        return None


def probe(path: Path) -> str:
    """The facts of a clip as JSON; raises as `read_with_decord` if decord fails."""
    with _open_reader(path) as reader:
        spans = _spans(reader)
        height, width, _ = reader[0].shape
    start, _ = spans[0]
    last, end = spans[-1]
    rate = 0.0
    if last > start:
        rate = (len(spans) - 1) / (last - start)
    facts = ClipFacts(
        width=width, height=height, seconds=end - start, source_rate=rate, reader="decord"
    )
    return json.dumps(asdict(facts))


def read_with_decord(
    path: Path,
    moments: Sequence[float],
    matrix: ColorMatrix | None = None,
    background: str = "white",
) -> Iterator[Image.Image]:
    """The frames shown at `moments`, as `clip_frames.read_with_av`.

    Untagged colours are read as BT.601.

    Raises:
        UnsuitableError: decord is not installed, cannot read the clip, or would read it wrongly.
    """
    if matrix == "bt709":
        raise UnsuitableError(
            f"names no colours and counts as BT.709, which decord cannot read; {REMEDY}"
        )
    _check_container(path)
    with _open_reader(path) as reader:
        times = _times(reader, moments[-1])
        indices = deque(choose_frames(enumerate(times), moments))
        stop = indices[-1] + 1
        # Decode every frame: decord seeks to skip frames, and after a seek some codecs return wrong
        # ones.
        for start in range(0, stop, SLICE):
            numbers = range(start, min(start + SLICE, stop))
            frames = reader.get_batch(numbers).asnumpy()
            for number, frame in zip(numbers, frames, strict=True):
                picture = Image.fromarray(frame)
                while indices and indices[0] == number:
                    indices.popleft()
                    yield picture


def _check_container(path: Path) -> None:
    """Refuse containers whose frames decord skips or confuses."""
    head = head_of(path)
    # The files of cameras begin with a time stamp of four bytes.
    if TRANSPORT_SYNC in (head[:1], head[4:5]):
        detail = "is a transport stream, of which decord skips the first frames"
        raise UnsuitableError(f"{detail}; {REMEDY}")
    try:
        with open_container(path) as container:
            count = len(streams_of_frames(container))
    except (av.FFmpegError, MediaError):  # PyAV cannot open it, which is why decord is used
        return
    if count > 1:
        detail = f"holds {count} streams of frames, and decord may read the wrong one"
        raise UnsuitableError(f"{detail}; {REMEDY}")


@contextmanager
def _open_reader(path: Path) -> Iterator[Any]:
    """A reader of decord; its errors in the block become `UnsuitableError`."""
    decord = _decord()
    if decord is None:
        raise UnsuitableError(f"needs decord, which is not installed; {REMEDY}")
    try:
        # One reader per call: sharing a reader between threads crashes the process.
        yield decord.VideoReader(str(path), num_threads=1)
    except (decord.base.DECORDError, RuntimeError, IndexError, ValueError, OSError) as error:
        raise UnsuitableError(f"cannot be read by decord: {describe(error)}; {REMEDY}") from error


def _spans(reader: Any) -> list[tuple[float, float]]:
    """(start, end) of each frame in seconds.

    Raises:
        UnsuitableError: they are wrong: with edit lists they start below 0, in AVI and MPEG they do
            not increase.
    """
    stamps = reader.get_frame_timestamp(range(len(reader)))
    spans = [(float(start), float(end)) for start, end in stamps]
    increases = all(earlier < later for (earlier, _), (later, _) in pairwise(spans))
    if not spans or len(spans) != len(reader) or spans[0][0] < 0 or not increases:
        raise UnsuitableError(f"has times that decord reads wrongly; {REMEDY}")
    return spans


def _times(reader: Any, last: float) -> list[float]:
    """Start of each frame in seconds after the first.

    Raises:
        UnsuitableError: the clip ends before the last moment, or its times are wrong.
    """
    spans = _spans(reader)
    start, _ = spans[0]
    _, end = spans[-1]
    if last > end - start + MISSING_SECONDS:
        raise UnsuitableError(f"ends too early for decord; {REMEDY}")
    return [frame_start - start for frame_start, _ in spans]


@functools.cache
def _decord() -> Any:
    """The decord module, or None if it is not installed or its libraries do not load."""
    try:
        decord = importlib.import_module("decord")
    except (ImportError, OSError, RuntimeError):
        return None
    decord.logging.set_level(decord.logging.QUIET)
    return decord
