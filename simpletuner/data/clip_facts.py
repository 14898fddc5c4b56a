"""Facts of a clip: size, length and rate, read from the packets of its container.

Most clips are not decoded for that. Frames are counted by the times at which they are shown.
Packets are not frames: some are hidden by an edit list, some are only a reference for later frames
(VP8, VP9), and some hold one field of an interlaced frame, or a comment.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import av
import numpy as np
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from simpletuner.data.clip_file import ClipFile, UndecodableError, open_clip
from simpletuner.data.clip_frames import end_of_last_frame, frames_with_times
from simpletuner.data.clip_truncation import is_truncated
from simpletuner.data.clips import ClipFacts, ColorMatrix
from simpletuner.data.colour import refuse_hdr
from simpletuner.data.files import MediaError, UnsuitableError

# H.273 number of a colour matrix (table 4) that is not specified.
UNSPECIFIED = 2
# Display matrices are 16.16 fixed point; RIGHT_ANGLE is the tolerance in quarter turns.
UNIT = 1 << 16
RIGHT_ANGLE = 0.01
# The last byte of a VP9 packet that holds several frames, of which only the last is shown: its
# upper three bits, and their mask.
SUPERFRAME = 0xC0
SUPERFRAME_MASK = 0xE0


def read_facts(path: Path) -> ClipFacts:
    """Size, length and rate of a clip.

    Raises:
        MediaError: empty, not a clip, without frames, damaged or truncated.
    """
    with open_clip(path) as clip:
        packets = _read_packets(clip)
        first = packets.first
        _check_complete(clip, is_corrupt=packets.is_corrupt)
        _check_shown(first, clip.stream)
        width, height = _shown_size(first, clip.stream)
        guessed_rate = float(clip.stream.guessed_rate or 1)
        spans = packets.shown_from_first(clip.format)
        declared_seconds = end_of_last_frame(clip) - min(spans)
        # A packet may hold one of two fields; in a GIF, it may hold a comment.
        counts_frames = not first.interlaced_frame and clip.format != "gif"
    if not counts_frames:
        spans = _decoded_spans(path)
    start = min(spans)
    last = max(spans)
    rate = 0.0
    if last > start:
        rate = (len(spans) - 1) / (last - start)
    # Some containers have no duration for the last frame.
    last_seconds = spans[last] or 1 / (rate or guessed_rate)
    end = last + last_seconds
    return ClipFacts(
        width=width,
        height=height,
        seconds=max(end - start, declared_seconds),
        source_rate=rate,
        matrix=_guessed_matrix(first),
        is_interlaced=first.interlaced_frame,
    )


@dataclass
class _Packets:
    """What the packets of a clip contain.

    Attributes:
        first: the first frame that can be decoded.
        spans: duration of every frame by its time, both in seconds.
        is_corrupt: a packet is incomplete.
    """

    first: VideoFrame
    spans: dict[float, float] = field(default_factory=dict)
    is_corrupt: bool = False

    def shown_from_first(self, container_format: str) -> dict[float, float]:
        """`spans` without frames before the first that can be decoded.

        A recording that starts late has such frames.
        """
        start = self.first.time
        # The packets of an AVI are numbered as they are stored: the first frame may have a later
        # number.
        if start is None or container_format == "avi":
            return self.spans
        spans = {time: seconds for time, seconds in self.spans.items() if time >= start}
        return spans or self.spans


def _read_packets(clip: ClipFile) -> _Packets:
    first: VideoFrame | None = None
    spans: dict[float, float] = {}
    is_corrupt = False
    codec = clip.stream.codec_context.name
    for packet in clip.packets():
        if first is None:
            frames = clip.decode(packet)
            if frames:
                first = frames[0]
        is_corrupt |= packet.is_corrupt
        span = _shown_span(packet, codec)
        if span is not None:
            time, seconds = span
            spans[time] = seconds
    if first is not None and spans:
        return _Packets(first, spans, is_corrupt)
    if spans:
        raise UndecodableError("holds no frame that can be decoded")
    _check_complete(clip, is_corrupt=is_corrupt)
    raise UnsuitableError("holds no frames")


def _shown_span(packet: av.Packet, codec: str) -> tuple[float, float] | None:
    """(start, duration) of a packet in seconds; None if it is not shown."""
    stamp = packet.dts if packet.pts is None else packet.pts
    # Packets hidden by an edit list are decoded but never shown.
    if stamp is None or packet.is_discard or _is_reference_only(packet, codec):
        return None
    start = float(stamp * packet.time_base)
    duration = float((packet.duration or 0) * packet.time_base)
    return start, duration


def _is_reference_only(packet: av.Packet, codec: str) -> bool:
    """Whether a packet of VP8 or VP9 holds a frame that is never shown ("alt-ref")."""
    if codec not in ("vp8", "vp9") or packet.size < 2:
        return False
    data = memoryview(packet)
    head = data[0]
    if codec == "vp8":
        return not _bit(head, 4)  # RFC 6386, 9.1: show_frame
    if data[-1] & SUPERFRAME_MASK == SUPERFRAME:
        return False
    # The uncompressed header, from the highest bit: marker (2 bits), profile (2 bits, one more in
    # profile 3), show_existing_frame, frame_type, show_frame.
    profile = head >> 4 & 3
    place = 2 if profile == 3 else 3
    shows_existing = _bit(head, place)
    shows_itself = _bit(head, place - 2)
    return not (shows_existing or shows_itself)


def _bit(byte: int, place: int) -> bool:
    """A bit of a byte; place 0 is the lowest."""
    return bool(byte >> place & 1)


def _decoded_spans(path: Path) -> dict[float, float]:
    """Duration of every frame by its time, in seconds; decodes the whole clip."""
    spans: dict[float, float] = {}
    with open_clip(path) as clip:
        for frame, time in frames_with_times(clip, 0.0):
            spans[time] = float((frame.duration or 0) * (frame.time_base or 0))
    return spans


def _check_complete(clip: ClipFile, *, is_corrupt: bool) -> None:
    """Check for an incomplete packet, an index that points past the end, or a declared size.

    Raises:
        MediaError: truncated.
    """
    indexed_end = max((entry.pos + entry.size for entry in clip.stream.index_entries), default=0)
    is_cut = is_corrupt or indexed_end > clip.path.stat().st_size
    if is_cut or is_truncated(clip.path, clip.format):
        raise MediaError("is truncated: a part of its frames is missing")


def _check_shown(frame: VideoFrame, stream: VideoStream) -> None:
    """Refuse clips that players show correctly but that would be decoded wrongly.

    Raises:
        UnsuitableError: HDR or wide colours, mirrored, or not rotated by a multiple of 90 degrees.
    """
    codec = stream.codec_context
    curves = (frame.color_trc, codec.color_trc)
    primaries = (frame.color_primaries, codec.color_primaries)
    refuse_hdr(curves, primaries, "frames", "BT.709")
    side_data: Any = frame.side_data  # its type hints do not fit its keys
    matrix = side_data.get(SideDataType.DISPLAYMATRIX)
    if matrix is not None:
        numbers = np.frombuffer(bytes(matrix)[:20], dtype=np.int32)
        _check_rotation(numbers / UNIT)


def _name_unknown(kind: type[SideDataType], number: int) -> SideDataType:
    """The value of an enumeration for a type of side data that it lacks."""
    member: Any = object.__new__(kind)
    member._name_ = f"TYPE_{number}"
    member._value_ = number
    return cast(SideDataType, member)


# FFmpeg adds types of side data (stereo views, EXIF) before PyAV names them, and `frame.side_data`
# would fail as a whole. With this, such a type gets a name instead.
SideDataType._missing_ = classmethod(_name_unknown)  # type: ignore[assignment]


def _check_rotation(matrix: NDArray[np.float64]) -> None:
    """Check the first five numbers of a display matrix, row by row: a, b, u, c, d."""
    a, b, _, c, d = matrix
    remedy = "re-encode it with ffmpeg to store it the way it is shown"
    if a * d - b * c < 0:  # a negative determinant mirrors
        raise UnsuitableError(f"is shown mirrored, by its display matrix; {remedy}")
    quarters = math.atan2(b, a) / (math.pi / 2)
    if abs(quarters - round(quarters)) > RIGHT_ANGLE:
        degrees = f"{quarters * 90:.0f} degrees"
        raise UnsuitableError(f"is shown rotated by {degrees}, by its display matrix; {remedy}")


def _shown_size(frame: VideoFrame, stream: VideoStream) -> tuple[int, int]:
    """Width and height as shown: upright, in square pixels."""
    # Before rotation, since the pixel aspect ratio applies to stored pixels.
    width = round(frame.width * float(stream.sample_aspect_ratio or 1))
    height = frame.height
    if frame.rotation % 180:
        return height, width
    return width, height


def _guessed_matrix(frame: VideoFrame) -> ColorMatrix | None:
    """The colour matrix that players assume for an untagged clip, by its stored size.

    None if it is tagged.
    """
    if frame.format.is_rgb or frame.colorspace != UNSPECIFIED:
        return None
    if frame.width >= 1280 or frame.height >= 720:
        return "bt709"
    return "bt601"
