"""Opens a clip with PyAV: its container, its stream of frames, and the decoder that fits it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
from av.codec import CodecContext
from av.codec.codec import UnknownCodecError
from av.container import InputContainer
from av.error import DecoderNotFoundError, PatchWelcomeError
from av.stream import Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from simpletuner.data.files import (
    EXHAUSTED,
    LARGEST_CLIP,
    MediaError,
    UnsuitableError,
    check_regular,
    content_hash,
    with_retries,
)

# Tags may be in any encoding. PyAV 19 decodes them all; older releases need an option to skip what
# is not UTF-8.
PYAV_VERSION = int(av.__version__.split(".")[0])
TAGS: dict[str, Any] = {} if PYAV_VERSION >= 19 else {"metadata_errors": "ignore"}
# FFmpeg's formats for clips and, for a better message, for pictures and sound. No playlists: they
# open further files.
CLIP_FORMATS = "mov,matroska,avi,mpeg,mpegts,mpegvideo,flv,asf,ogg,rm,mxf,dv,ivf,nut,gif"
FORMATS = f"{CLIP_FORMATS},wav,png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe"
# First boxes of an MP4 that is a part of a stream, and whose header is in another file.
SEGMENTS = (b"styp", b"sidx", b"moof")
# Decoders that read transparency; those that FFmpeg prefers for the same codecs skip it.
TRANSPARENT = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
# Bytes by which a format is recognised.
HEAD = 64
# Control characters of texts; containers hold others in these bytes.
WHITESPACE = b"\t\n\f\r"
# Errors of FFmpeg about an intact file that it cannot read.
NOT_IMPLEMENTED = (DecoderNotFoundError, PatchWelcomeError, UnknownCodecError)


class UndecodableError(MediaError):
    """PyAV cannot decode a clip, which is probably damaged."""


class UnsupportedError(UnsuitableError):
    """PyAV cannot decode a clip, which is probably intact."""


@dataclass(frozen=True)
class ClipFile:
    """An open clip.

    Attributes:
        stream: the first stream of frames that is not a cover picture.
        decoder: of that stream; decodes transparency too.
    """

    path: Path
    container: InputContainer
    stream: VideoStream
    decoder: VideoCodecContext

    @property
    def format(self) -> str:
        """FFmpeg's name of the container's format."""
        return self.container.format.name

    def packets(self) -> Iterator[av.Packet]:
        """The packets of the stream in the order of the file.

        The last one is empty, which flushes the decoder.
        """
        return self.container.demux(self.stream)

    def decode(self, packet: av.Packet) -> list[VideoFrame]:
        """The frames that are complete with this packet."""
        return self.decoder.decode(packet)

    def frames(self) -> Iterator[VideoFrame]:
        """All frames, in the order in which they are shown."""
        for packet in self.packets():
            yield from self.decode(packet)

    def declared_seconds(self) -> float:
        """End of the stream from its Matroska tag, else of a container with one stream.

        With several streams, the container's duration may be that of the sound. 0 if unknown.
        """
        tag = _tag(self.stream, "duration")
        try:
            hours, minutes, seconds = (float(part) for part in tag.strip("\0").split(":"))
        except ValueError:
            if len(self.container.streams) != 1:
                return 0.0
            return (self.container.duration or 0) / av.time_base
        return hours * 3600 + minutes * 60 + seconds


@contextmanager
def open_clip(path: Path) -> Iterator[ClipFile]:
    """The open clip; PyAV's errors in the block become `MediaError` if the file is the cause.

    Raises:
        MediaError: empty, not a clip, without frames, or not decodable.
    """
    size, _ = check_regular(path, LARGEST_CLIP)
    if size == 0:
        raise MediaError("is empty")
    if _is_text(head_of(path)):
        raise UnsuitableError("is named like a clip, but holds text")
    try:
        with open_container(path) as container:
            stream = _stream_of(container)
            yield ClipFile(path, container, stream, _decoder_of(stream))
    except MemoryError:
        raise
    except NOT_IMPLEMENTED as error:
        raise _unsupported(error) from error
    except av.FFmpegError as error:
        if error.errno in EXHAUSTED:
            raise
        if error.errno == errno.ENOSYS:
            raise _unsupported(error) from error
        if head_of(path)[4:8] in SEGMENTS:
            detail = "is a segment of a stream, which cannot be decoded without its beginning"
            raise UnsuitableError(detail) from error
        # FFmpeg reports damaged data as I/O errors too: if the whole file can be read, the data is
        # damaged.
        content_hash(path)
        raise UndecodableError(f"cannot be decoded: {_reason(error)}") from error


def _unsupported(error: Exception) -> UnsupportedError:
    return UnsupportedError(f"is in a format that cannot be decoded here: {_reason(error)}")


def head_of(path: Path) -> bytes:
    """The first bytes of a clip, by which its format is recognised."""

    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(HEAD)

    return with_retries(path, read)


def _is_text(head: bytes) -> bool:
    """Whether a file begins like text, such as a script in TypeScript (.ts, .mts) or a web page."""
    return all(byte >= ord(" ") or byte in WHITESPACE for byte in head)


def open_container(path: Path) -> InputContainer:
    """Open a container of one of the `FORMATS`.

    Raises:
        UnsuitableError: the file is in another format.
        av.FFmpegError: FFmpeg cannot open it.
    """
    # A container may refer to other files or addresses, which FFmpeg would open.
    options = {"protocol_whitelist": "file", "format_whitelist": FORMATS}
    try:
        # With an explicit protocol, since FFmpeg parses the part of a path before a colon as one.
        return av.open(f"file:{path}", options=options, **TAGS)
    except av.ArgumentError as error:  # the format is not listed
        raise UnsuitableError("is named like a clip, but in another format") from error


def streams_of_frames(container: InputContainer) -> list[VideoStream]:
    """The video streams that are not cover pictures."""
    return [
        stream
        for stream in container.streams.video
        if not stream.disposition & Disposition.attached_pic
    ]


def _stream_of(container: InputContainer) -> VideoStream:
    if container.format.name.endswith("_pipe"):
        raise UnsuitableError("is a picture, not a clip")
    streams = streams_of_frames(container)
    if not streams:
        detail = "holds no frames, only sound" if container.streams.audio else "holds no frames"
        raise UnsuitableError(detail)
    if not streams[0].codec_context:
        raise UnsupportedError("is in a format that cannot be decoded here")
    return streams[0]


def _decoder_of(stream: VideoStream) -> VideoCodecContext:
    """The decoder of a stream; one that reads transparency if the stream has it."""
    decoder: CodecContext = stream.codec_context
    if _tag(stream, "alpha_mode") == "1" and decoder.name in TRANSPARENT:
        decoder = CodecContext.create(TRANSPARENT[decoder.name], "r")
    assert isinstance(decoder, VideoCodecContext)
    # Clips are decoded in parallel; more threads per clip would only compete for cores.
    decoder.thread_count = 1
    return decoder


def _tag(stream: VideoStream, name: str) -> str:
    """A tag of a stream, whose name may be in any case; empty if it is missing."""
    for key, value in stream.metadata.items():
        if key.lower() == name:
            return value
    return ""


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
