"""Clip readers: decord, which is fast, and PyAV, which reads every codec on every machine.

decord is unmaintained, not available everywhere, and decodes some files wrongly. Its reader refuses any clip it may get
wrong, and PyAV takes over. Frames are selected by display time, never by frame number.
"""

from __future__ import annotations

import functools
import heapq
import importlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import Type as SideDataType
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from simpletuner.data.clips import MISSING_SECONDS, ClipFacts, ColorMatrix, choose_frames
from simpletuner.data.colour import check_range
from simpletuner.data.files import EXHAUSTED, LARGEST_CLIP, MediaError, UnsuitableError, check_regular, content_hash

Frames = Iterator[NDArray[np.uint8]]


class NotForThisReaderError(Exception):
    """A reader is not installed, cannot read a clip, or would read it wrongly; the next reader continues."""


class Reader(Protocol):
    """Reads frames of a clip.

    Args:
        moments: times in seconds after the first frame, increasing.
        matrix: colour matrix; None uses the file's tag.

    Returns:
        the frames shown at those times, upright RGB, `H W 3`.

    Raises:
        NotForThisReaderError: use another reader for the remaining frames.
        MediaError: the clip is damaged, or it ends before the last moment.
    """

    def __call__(self, path: Path, moments: Sequence[float], matrix: ColorMatrix | None = None) -> Frames: ...


# Frames per call to decord; 200 frames at 1280x720 would take half a gigabyte.
SLICE = 8
# H.273 numbers of colour matrices (table 4).
UNSPECIFIED, MATRICES = 2, {"bt709": 1, "bt601": 6}
# Display matrices are 16.16 fixed point; RIGHT_ANGLE is the tolerance in quarter turns.
UNIT, RIGHT_ANGLE = 1 << 16, 0.01
# First byte of each packet of an MPEG transport stream.
TRANSPORT_SYNC = b"G"
# Tags may be in any encoding. PyAV 19 decodes them all; older releases need an option to skip what is not UTF-8.
TAGS: dict[str, Any] = {} if int(av.__version__.split(".")[0]) >= 19 else {"metadata_errors": "ignore"}
# FFmpeg's formats for clips and, for a better message, for pictures and sound. No playlists: they open further files.
CLIP_FORMATS = "mov,matroska,avi,mpeg,mpegts,mpegvideo,flv,asf,ogg,rm,mxf,dv,ivf,nut,gif"
FORMATS = f"{CLIP_FORMATS},wav,png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe"
# Maximum number of frames a decoder delays to restore display order (H.264 and HEVC).
REORDERED = 16


def read_facts(path: Path) -> ClipFacts:
    """Size, length and rate from the container; only the first frame is decoded.

    Raises:
        MediaError: empty, not a clip, without frames, damaged or truncated.
    """
    first: VideoFrame | None = None
    is_cut, times, durations = False, list[float](), dict[float, float]()
    with _opened(path) as (container, stream):
        for packet in container.demux(stream):
            if first is None:
                first = next((frame for frame in packet.decode() if isinstance(frame, VideoFrame)), None)
            is_cut |= packet.is_corrupt
            for time, duration in _shown(packet):
                times.append(time)
                durations[time] = duration
        if first is None or not times:
            raise MediaError("holds no frame that can be decoded")
        seconds, last = max(times) - min(times), durations[max(times)]
        _check_whole(path, container, stream, seconds + last, is_cut=is_cut)
        _check_shown(first, stream)
        width, height = _shown_size(first, stream)
        rate = (len(times) - 1) / seconds if seconds > 0 else 0.0
        # Some containers have no duration for the last frame.
        fallback = 1 / rate if rate else 1 / float(stream.guessed_rate or 1)
        return ClipFacts(width, height, seconds + (last or fallback), rate, _guessed_matrix(first))


def _shown(packet: av.Packet) -> Iterator[tuple[float, float]]:
    """(start, duration) of a packet in seconds; empty if it is not shown."""
    stamp = packet.dts if packet.pts is None else packet.pts
    # Packets hidden by an edit list are decoded but never shown.
    if stamp is not None and not packet.is_discard:
        yield float(stamp * packet.time_base), float((packet.duration or 0) * packet.time_base)


def read_with_av(path: Path, moments: Sequence[float], matrix: ColorMatrix | None = None) -> Frames:
    """A `Reader` for every clip."""
    with _opened(path) as (container, stream):
        for frame in choose_frames(_timed(container, stream, moments[-1]), moments):
            yield _to_rgb(frame, matrix)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container and its video stream; PyAV's errors in the block become MediaErrors if the file is damaged."""
    if check_regular(path, LARGEST_CLIP)[0] == 0:
        raise MediaError("is empty")
    try:
        with _open(path) as container:
            yield container, _clip_of(container)
    except MemoryError:
        raise
    except av.FFmpegError as error:
        if error.errno in EXHAUSTED:
            raise
        # FFmpeg reports damaged data as I/O errors too: if the whole file can be read, the data is damaged.
        content_hash(path)
        raise MediaError(f"cannot be decoded: {error.strerror}") from error


def _open(path: Path) -> InputContainer:
    # A container may refer to other files or addresses, which FFmpeg would open.
    options = {"protocol_whitelist": "file", "format_whitelist": FORMATS}
    try:
        # With an explicit protocol, since FFmpeg parses the part of a path before a colon as one.
        return av.open(f"file:{path}", options=options, **TAGS)
    except av.ArgumentError as error:  # the format is not listed
        raise MediaError("is named like a clip, but in another format") from error


def _clip_of(container: InputContainer) -> VideoStream:
    """The first video stream that is not a cover picture."""
    if container.format.name.endswith("_pipe"):
        raise UnsuitableError("is a picture, not a clip")
    streams = [each for each in container.streams.video if not each.disposition & Disposition.attached_pic]
    if not streams:
        raise UnsuitableError("holds no frames, only sound" if container.streams.audio else "holds no frames")
    if not streams[0].codec_context:
        raise UnsuitableError("is in a format that cannot be decoded here")
    # Clips are decoded in parallel; more threads per clip would only compete for cores.
    streams[0].codec_context.thread_count = 1
    return streams[0]


def _check_whole(path: Path, container: InputContainer, stream: VideoStream, seconds: float, *, is_cut: bool) -> None:
    """Detect truncation from an incomplete packet, an index that points past the end, or the length.

    Raises:
        MediaError: truncated.
    """
    indexed = max((entry.pos + entry.size for entry in stream.index_entries), default=0)
    if is_cut or indexed > path.stat().st_size:
        raise MediaError("is truncated: a part of its frames is missing")
    declared = _declared_seconds(container, stream)
    if seconds < declared - MISSING_SECONDS:
        raise MediaError(f"is truncated: {seconds:.2f} of {declared:.2f} seconds are there")


def _check_shown(frame: VideoFrame, stream: VideoStream) -> None:
    """Refuse clips that players show correctly but that would be decoded with wrong colours or orientation.

    Raises:
        UnsuitableError: HDR or wide colours, mirrored, or not rotated by a multiple of 90 degrees.
    """
    codec = stream.codec_context
    curves = (frame.color_trc, codec.color_trc)
    check_range(curves, (frame.color_primaries, codec.color_primaries), "frames", "BT.709")
    side_data: Any = frame.side_data  # its type hints do not fit its keys
    matrix = side_data.get(SideDataType.DISPLAYMATRIX)
    if matrix is not None:
        _check_turn(np.frombuffer(bytes(matrix)[:20], dtype=np.int32) / UNIT)


def _check_turn(matrix: NDArray[np.float64]) -> None:
    """Check the first five numbers of a display matrix, row by row: a, b, u, c, d."""
    a, b, _, c, d = matrix
    remedy = "; re-encode it with ffmpeg to store it the way it is shown"
    if a * d - b * c < 0:
        raise UnsuitableError(f"is shown mirrored, by its display matrix{remedy}")
    quarters = math.atan2(b, a) / (math.pi / 2)
    if abs(quarters - round(quarters)) > RIGHT_ANGLE:
        raise UnsuitableError(f"is shown rotated by {quarters * 90:.0f} degrees, by its display matrix{remedy}")


def _declared_seconds(container: InputContainer, stream: VideoStream) -> float:
    """Duration of the stream from its Matroska tag, else of a container with one stream; 0 if unknown.

    With several streams, the container's duration may be that of the sound.
    """
    tag = stream.metadata.get("DURATION", "")
    try:
        hours, minutes, seconds = (float(part) for part in tag.strip("\0").split(":"))
    except ValueError:
        return (container.duration or 0) / av.time_base if len(container.streams) == 1 else 0.0
    return hours * 3600 + minutes * 60 + seconds


def _timed(container: InputContainer, stream: VideoStream, last: float) -> Iterator[tuple[VideoFrame, float]]:
    """Frames in display order, with their times in seconds after the first frame.

    AVI has no display times: packets are numbered in storage order, so times jump back and forth although the decoder
    returns frames in display order. Each frame gets the earliest remaining time.

    Raises:
        MediaError: the clip ends before the last moment.
    """
    held_back = REORDERED if container.format.name == "avi" else 0
    frames: deque[VideoFrame] = deque()
    times: list[float] = []
    start: float | None = None
    begin = end = 0.0
    for decoded in chain(container.decode(stream), [None] * held_back):
        if decoded is not None:
            if decoded.time is None:
                raise MediaError("holds frames without a time")
            frames.append(decoded)
            heapq.heappush(times, decoded.time)
        if frames and (decoded is None or len(frames) > held_back):
            start = times[0] if start is None else start
            frame, time = frames.popleft(), heapq.heappop(times) - start
            # A frame lasts for its declared duration, or at least as long as its predecessor.
            begin, end = time, time + max(float((frame.duration or 0) * (frame.time_base or 0)), time - begin)
            yield frame, time
    if start is None or last > end + MISSING_SECONDS:
        raise MediaError(f"ends after {end:.2f} seconds, and a frame at {last:.2f} is needed")


def _shown_size(frame: VideoFrame, stream: VideoStream) -> tuple[int, int]:
    # Before rotation, since the pixel aspect ratio applies to stored pixels.
    width, height = round(frame.width * float(stream.sample_aspect_ratio or 1)), frame.height
    return (height, width) if frame.rotation % 180 else (width, height)


def _guessed_matrix(frame: VideoFrame) -> ColorMatrix | None:
    """The colour matrix that players assume for an untagged clip, by its stored size; None if it is tagged."""
    if frame.format.is_rgb or frame.colorspace != UNSPECIFIED:
        return None
    return "bt709" if frame.width >= 1280 or frame.height >= 720 else "bt601"


def _to_rgb(frame: VideoFrame, matrix: ColorMatrix | None) -> NDArray[np.uint8]:
    """8-bit RGB, upright."""
    if matrix is not None:
        frame.colorspace = MATRICES[matrix]
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))


def read_with_decord(path: Path, moments: Sequence[float], matrix: ColorMatrix | None = None) -> Frames:
    """A `Reader` for clips that decord reads correctly; untagged colours are read as BT.601."""
    if matrix == "bt709":
        raise NotForThisReaderError("its colours are BT.709")
    with path.open("rb") as file:
        if TRANSPORT_SYNC in file.read(5)[::4]:  # at byte 0, or after the four-byte time stamp of camera files
            raise NotForThisReaderError("decord skips the first group of pictures of a transport stream")
    decord = _decord()
    if decord is None:
        raise NotForThisReaderError("decord is not installed")
    try:
        # One reader per call: sharing a reader between threads crashes the process.
        reader = decord.VideoReader(str(path), num_threads=1)
        indices = deque(choose_frames(enumerate(_times(reader, moments[-1])), moments))
        # Decode every frame: decord seeks to skip frames, and after a seek some codecs return wrong ones.
        for start in range(0, indices[-1] + 1, SLICE):
            numbers = range(start, min(start + SLICE, indices[-1] + 1))
            for number, frame in zip(numbers, reader.get_batch(numbers).asnumpy(), strict=True):
                while indices and indices[0] == number:
                    indices.popleft()
                    yield frame
    except (decord.base.DECORDError, RuntimeError, IndexError, ValueError, OSError) as error:
        raise NotForThisReaderError(str(error)) from error


def _times(reader: Any, last: float) -> list[float]:
    """Start of each frame in seconds after the first.

    Raises:
        NotForThisReaderError: the clip ends before the last moment, or its times are wrong: with edit lists they start
            below 0, in AVI and MPEG they do not increase.
    """
    spans = reader.get_frame_timestamp(range(len(reader)))
    times = [float(begin) for begin, _ in spans]
    grows = all(earlier < later for earlier, later in pairwise(times))
    if len(times) != len(reader) or not times or times[0] < 0 or not grows:
        raise NotForThisReaderError("decord reads its times wrongly")
    if last > spans[-1][1] - times[0] + MISSING_SECONDS:
        raise NotForThisReaderError("it ends too early")
    return [time - times[0] for time in times]


@functools.cache
def _decord() -> Any:
    """The decord module, or None if it is not installed or its libraries do not load."""
    try:
        decord = importlib.import_module("decord")
    except (ImportError, OSError, RuntimeError):
        return None
    decord.logging.set_level(decord.logging.QUIET)
    return decord


# Tried in this order; the last one reads every clip that can be read.
READERS: tuple[Reader, ...] = (read_with_decord, read_with_av)
