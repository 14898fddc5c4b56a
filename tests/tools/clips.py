"""Clips as people have them, whole and broken, made on the fly.

Every whole clip shows the scene of `tests.tools.pictures` for two seconds with a grey block in the
middle whose brightness gives the time at which the frame was filmed, so that a test sees rotation,
colour and the moment at once.
"""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.frame import VideoFrame
from PIL import Image

from simpletuner.data.clips import frames_of, probe_clip
from tests.tools import pictures
from tests.tools.pictures import RED, Writer

WIDTH = 96
HEIGHT = 64
SECONDS = 2
RATE = 24
# Brightness at time 0, and how much it grows in a second.
DARK = 50
GROWTH = 80
# Codecs by the ending of a file; all other files are of H.264.
CODECS = {
    ".webm": "libvpx-vp9",
    ".flv": "flv",
    ".wmv": "wmv2",
    ".mpg": "mpeg2video",
    ".mpeg": "mpeg2video",
}
# Codecs that take a quality (`crf`); the others need a bit rate.
CONSTANT_QUALITY = ("libx264", "libx265", "libsvtav1")
# Times of frames: 30 frames in the first second, 10 in the next.
UNEVEN = tuple(sorted({*np.arange(0, 1, 1 / 30).round(3), *np.arange(1, SECONDS, 1 / 10).round(3)}))
SAMPLE_RATE = 16000


def filmed(time: float, size: tuple[int, int] = (WIDTH, HEIGHT)) -> np.ndarray:
    """What is seen at a time in seconds, `H W 3`."""
    width, height = size
    pixels = np.array(pictures.scene(width, height))
    rows = slice(height * 3 // 8, height * 5 // 8)
    columns = slice(width * 3 // 8, width * 5 // 8)
    pixels[rows, columns] = min(255, DARK + round(time * GROWTH))
    return pixels


def time_in(frame: np.ndarray) -> float:
    """The time in seconds that a frame shows, right to a few hundredths."""
    middle_row = frame.shape[0] // 2
    middle_column = frame.shape[1] // 2
    block = frame[middle_row - 2 : middle_row + 2, middle_column - 2 : middle_column + 2]
    return (float(block.mean()) - DARK) / GROWTH


@dataclass(frozen=True)
class Clip:
    """How a clip is made.

    Attributes:
        codec: by default that of the ending, by `CODECS`.
        times: when each frame is shown, in seconds; by default evenly at `rate`.
        origin: the moment that counts as time 0; by default that of the first frame.
        turned: degrees counter-clockwise by which a player turns it; it is stored turned back.
        aspect: width of a pixel to its height.
        container: the muxer's own switches.
    """

    seconds: float = SECONDS
    rate: float = RATE
    size: tuple[int, int] = (WIDTH, HEIGHT)
    codec: str | None = None
    pixel_format: str = "yuv420p"
    times: Sequence[float] | None = None
    origin: float | None = None
    turned: int = 0
    aspect: Fraction | None = None
    codec_options: dict[str, str] = field(default_factory=dict)
    container: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write it in the format that the path's ending names.

        A thread of its own encodes, and ends: for root, libsvtav1 gives its caller real-time
        priority, and everything else on that core would wait for the rest of the tests.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            ThreadPoolExecutor(1) as encoder,
            av.open(str(path), "w", options=self.container) as container,
        ):
            encoder.submit(self._fill, container, self._codec_for(path)).result()

    def write_live(self, path: Path) -> None:
        """Write it as a stream: no length in the header, no index at the end."""
        pipe = _Pipe()
        formats = {".mkv": "matroska", ".webm": "webm"}
        with av.open(pipe, "w", format=formats[path.suffix]) as container:
            self._fill(container, self._codec_for(path))
        path.write_bytes(pipe.content)

    def _codec_for(self, path: Path) -> str:
        return self.codec or CODECS.get(path.suffix.lower(), "libx264")

    def _fill(self, container: av.container.OutputContainer, codec: str) -> None:
        stream = self._add_stream(container, codec)
        time_base = stream.codec_context.time_base
        times = self.times or [i / self.rate for i in range(round(self.seconds * self.rate))]
        origin = self.origin
        if origin is None:
            origin = times[0]
        for time in times:
            pixels = np.rot90(filmed(time - origin, self.size), -self.turned // 90)
            frame = VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts = round(time / time_base)
            frame.time_base = time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))

    def _add_stream(self, container: av.container.OutputContainer, codec: str) -> av.VideoStream:
        options = {"crf": "4", "g": "12", **self.codec_options}
        if codec == "libx265":
            options["x265-params"] = "log-level=none"
        # 1001 keeps the rates of television, 24000/1001 and the like, exact.
        rate = Fraction(self.rate).limit_denominator(1001)
        stream = container.add_stream(codec, rate=rate, options=options)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = self.size
        if self.turned % 180 != 0:
            stream.height, stream.width = self.size
        stream.pix_fmt = self.pixel_format
        if codec not in CONSTANT_QUALITY:
            stream.codec_context.bit_rate = 4_000_000
        if self.aspect:
            stream.codec_context.sample_aspect_ratio = self.aspect
        if self.turned:
            stream.set_display_rotation(self.turned)
        stream.codec_context.time_base = 1 / rate
        if self.times:
            stream.codec_context.time_base = Fraction(1, 1000)
        return stream


class _Pipe(io.RawIOBase):
    """A file that cannot go back: what was written stays."""

    def __init__(self) -> None:
        self.content = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:
        self.content += bytes(data)
        return len(data)


def write_clip(path: Path, **changes: object) -> None:
    """Write a clip of the usual kind with some changes."""
    replace(Clip(), **changes).write(path)


def cut_by_edit_list(path: Path) -> None:
    """A clip trimmed by a phone: it stores earlier frames and a note to hide them."""
    hidden = 0.25
    write_trimmed(
        path,
        hidden,
        seconds=SECONDS + hidden,
        origin=hidden,
        codec_options={"g": "12", "bf": "0"},
    )


def starting_within_a_frame(path: Path) -> None:
    """One frame per second, trimmed in the middle of a frame by an edit list."""
    write_trimmed(path, hidden=2.5, rate=1, seconds=6, codec_options={"bf": "0"})


def write_trimmed(path: Path, hidden: float, **clip: object) -> None:
    """Move a clip's first seconds to before time 0, for which the muxer writes an edit list."""

    def shift_back(packets: list[av.Packet]) -> list[av.Packet]:
        for packet in packets:
            ticks = round(Fraction(hidden) / packet.time_base)
            packet.pts -= ticks
            packet.dts -= ticks
        return packets

    remux(path, shift_back, **clip)


def with_sound(path: Path) -> None:
    """Sound that lasts longer than the frames."""
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=SAMPLE_RATE)
        Clip()._fill(container, "libx264")
        _add_silence(container, sound, seconds=SECONDS + 1)


def only_sound(path: Path) -> None:
    """A voice memo."""
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=SAMPLE_RATE)
        _add_silence(container, sound, seconds=1)


def _add_silence(
    container: av.container.OutputContainer, stream: av.AudioStream, seconds: int
) -> None:
    silence = np.zeros((1, SAMPLE_RATE * seconds), dtype=np.float32)
    frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
    frame.sample_rate = SAMPLE_RATE
    container.mux(stream.encode(frame))
    container.mux(stream.encode(None))


def without_index(path: Path) -> None:
    """An AVI whose index was never written, though every frame was."""
    write_clip(path)
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"idx1")])


def with_broken_index(path: Path) -> None:
    """An AVI whose index points to nowhere."""
    write_clip(path)
    content = bytearray(path.read_bytes())
    # The index begins after its name and its length.
    start = content.rindex(b"idx1") + 8
    content[start:] = bytes(index * 37 % 256 for index in range(len(content) - start))
    path.write_bytes(bytes(content))


def animated(path: Path) -> None:
    """A GIF of 20 frames per second; a GIF counts time in hundredths of a second."""
    first, *later = (Image.fromarray(filmed(index / 20)) for index in range(20 * SECONDS))
    first.save(path, save_all=True, append_images=later, duration=50, loop=0)


def write_interlaced(
    path: Path, codec: str, size: tuple[int, int] = (WIDTH, HEIGHT), **options: str
) -> None:
    """A bar that moves by four pixels from field to field.

    A frame is two fields, filmed one after the other: its even rows and its odd rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options={"flags": "+ilme+ildct", **options})
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        if codec == "prores_ks":
            stream.pix_fmt = "yuv422p10le"
        stream.codec_context.bit_rate = 4_000_000
        for index in range(25):
            pixels = np.zeros((height, width, 3), dtype=np.uint8)
            for field_number in (0, 1):
                left = 4 * ((2 * index + field_number) % 20)
                pixels[field_number::2, left : left + 12] = 255
            frame = VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index
            frame.time_base = Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


# Codecs and options that store interlaced frames.
INTERLACED: dict[str, tuple[str, dict[str, str]]] = {
    "interlaced.mp4": ("libx264", {"x264-params": "interlaced=1:tff=1", "crf": "8"}),
    "interlaced.mkv": ("libx264", {"x264-params": "interlaced=1:tff=1", "crf": "8"}),
    "interlaced.ts": ("libx264", {"x264-params": "interlaced=1:tff=1", "crf": "8"}),
    "interlaced.mpg": ("mpeg2video", {}),
    "interlaced.mov": ("prores_ks", {}),
}

# Codecs and pixel formats that store transparency, by the name of a file.
TRANSPARENT = {
    "vp9.webm": ("libvpx-vp9", "yuva420p"),
    "vp8.webm": ("libvpx", "yuva420p"),
    "prores.mov": ("prores_ks", "yuva444p10le"),
    "png.mov": ("png", "rgba"),
    "animation.mov": ("qtrle", "argb"),
}
OPACITIES = (255, 128, 0)


def write_transparent(path: Path) -> None:
    """Three stripes of one colour, from left to right opaque, half transparent and invisible."""
    codec, pixel_format = TRANSPARENT[path.name]
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.empty((HEIGHT, WIDTH, 4), dtype=np.uint8)
    pixels[:, :, :3] = RED
    for stripe, opacity in zip(np.split(pixels, len(OPACITIES), axis=1), OPACITIES, strict=True):
        stripe[:, :, 3] = opacity
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=24, options={"crf": "4", "auto-alt-ref": "0"})
        stream.width = WIDTH
        stream.height = HEIGHT
        stream.pix_fmt = pixel_format
        stream.codec_context.bit_rate = 4_000_000
        if path.suffix == ".webm":
            stream.metadata["alpha_mode"] = "1"
        for index in range(5):
            frame = VideoFrame.from_ndarray(pixels, format="rgba").reformat(format=pixel_format)
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def remux(path: Path, change: Callable[[list[av.Packet]], list[av.Packet]], **clip: object) -> None:
    """Write the packets of a clip of the usual kind after a change."""
    original = path.with_name(f"original{path.suffix}")
    write_clip(original, **clip)
    with av.open(str(original)) as source, av.open(str(path), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        # The demuxer ends with an empty packet, which has no time.
        packets = [packet for packet in source.demux(video=0) if packet.dts is not None]
        for packet in change(packets):
            packet.stream = stream
            target.mux(packet)
    original.unlink()


# The bit of a frame's first byte by which it is shown (RFC 6386, 9.1; VP9 bitstream, 6.2).
SHOW_FRAME = {"libvpx": 0x10, "libvpx-vp9": 0x02}


def write_with_hidden_frames(codec: str) -> Writer:
    """Copies of key frames that are decoded and never shown, as encoders write for reference."""

    def change(packets: list[av.Packet]) -> list[av.Packet]:
        changed = packets[:1]
        for packet in packets[1:]:
            if packet.is_keyframe:
                changed.append(_hidden(packet, SHOW_FRAME[codec]))
            changed.append(packet)
        return changed

    return lambda path: remux(path, change, codec=codec)


def _hidden(packet: av.Packet, show_frame: int) -> av.Packet:
    content = bytearray(bytes(packet))
    content[0] &= ~show_frame
    hidden = av.Packet(bytes(content))
    hidden.time_base = packet.time_base
    # 10 milliseconds earlier.
    hidden.pts = packet.pts - 10
    hidden.dts = hidden.pts
    hidden.is_keyframe = True
    return hidden


def write_held(path: Path, seconds: float = 2.0) -> None:
    """A screen capture: the last of nine frames is shown for a long time."""
    times = [index / RATE for index in range(9)]

    def drop_last(packets: list[av.Packet]) -> list[av.Packet]:
        # The tenth frame only gave the ninth its end.
        packets[-2].duration = round(seconds / packets[-2].time_base)
        return packets[:-1]

    remux(path, drop_last, times=[*times, times[-1] + seconds], codec_options={"bf": "0"})


def with_comment(path: Path) -> None:
    """A GIF with a delay and a comment after its last frame."""
    animated(path)
    content = path.read_bytes()
    delay = b"\x21\xf9\x04\0\x64\0\0\0"
    comment = b"\x21\xfe\x05hello\0"
    path.write_bytes(content[:-1] + delay + comment + content[-1:])


def without_end_mark(path: Path) -> None:
    """A GIF that ends after its last frame."""
    animated(path)
    path.write_bytes(path.read_bytes()[:-1])


def _cut_gif(path: Path) -> None:
    """A GIF that ends early, after a little more than half of its bytes."""
    animated(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 55 // 100])


def _clip(**changes: object) -> Writer:
    return lambda path: write_clip(path, **changes)


# Each shows the usual scene at WIDTH x HEIGHT for SECONDS seconds; only the sizes and the frame
# rates in the file differ.
WHOLE: dict[str, Writer] = {
    "h264.mp4": _clip(),
    "H264.MOV": _clip(),
    "h264.mkv": _clip(),
    "h264.avi": _clip(),
    "h264.m4v": _clip(),
    "hevc.mp4": _clip(codec="libx265"),
    "ten-bit.mp4": _clip(codec="libx265", pixel_format="yuv420p10le"),
    "prores.mov": _clip(codec="prores_ks", pixel_format="yuv422p10le"),
    "vp9.webm": _clip(),
    "vp8.webm": _clip(codec="libvpx"),
    "av1.mp4": _clip(codec="libsvtav1", codec_options={"preset": "12", "crf": "10"}),
    "mpeg4.avi": _clip(codec="mpeg4"),
    "old.mpg": _clip(),
    "old.mpeg": _clip(),
    "flash.flv": _clip(),
    "windows.wmv": _clip(),
    "phone.3gp": _clip(),
    "uneven.mp4": _clip(times=UNEVEN),
    "uneven.mkv": _clip(times=UNEVEN),
    "slow.mp4": _clip(rate=12),
    "fast.mp4": _clip(rate=60),
    "film.mp4": _clip(rate=24000 / 1001),
    "late.mp4": _clip(times=[1.5 + index / RATE for index in range(SECONDS * RATE)]),
    "one-key-frame.mp4": _clip(codec_options={"g": "600"}),
    "faststart.mp4": _clip(container={"movflags": "faststart"}),
    "fragmented.mp4": _clip(container={"movflags": "frag_keyframe+empty_moov"}),
    "upright-90.mp4": _clip(turned=90),
    "upright-180.mp4": _clip(turned=180),
    "upright-270.mp4": _clip(turned=-90),
    "live.mkv": lambda path: Clip().write_live(path),
    "live.webm": lambda path: Clip().write_live(path),
    "no-index.avi": without_index,
    "broken-index.avi": with_broken_index,
    "edited.mp4": cut_by_edit_list,
    "sound.mp4": with_sound,
    "stream.ts": _clip(),
    "camera.m2ts": _clip(),
    "animated.gif": animated,
}


# Display matrices, in fixed point (ISO/IEC 14496-12, 8.3.2), that are not quarter turns.
MIRRORED = (-1 << 16, 0, 0, 0, 1 << 16, 0, WIDTH << 16, 0, 1 << 30)
UPSIDE_DOWN = (1 << 16, 0, 0, 0, -1 << 16, 0, 0, HEIGHT << 16, 1 << 30)
# 46341 is the cosine of 45 degrees in 65536ths.
DIAGONAL = (46341, 46341, 0, -46341, 46341, 0, 0, 0, 1 << 30)


def _with_matrix(matrix: tuple[int, ...]) -> Writer:
    """A clip whose track header turns or mirrors it."""

    def write(path: Path) -> None:
        write_clip(path)
        content = bytearray(path.read_bytes())
        # In the track header the matrix follows its name and 40 bytes of other fields.
        start = content.index(b"tkhd") + 44
        content[start : start + 36] = struct.pack(">9i", *matrix)
        path.write_bytes(bytes(content))

    return write


def write_with_colours(primaries: int, curve: int) -> Writer:
    """A clip that declares its primaries and its transfer curve by their numbers in ITU-T H.273."""

    def write(path: Path) -> None:
        with av.open(str(path), "w") as container:
            stream = container.add_stream(
                "libx265", rate=RATE, options={"x265-params": "log-level=none"}
            )
            stream.width = WIDTH
            stream.height = HEIGHT
            stream.pix_fmt = "yuv420p10le"
            codec = stream.codec_context
            codec.color_primaries = primaries
            codec.color_trc = curve
            codec.colorspace = primaries
            for index in range(5):
                filmed_frame = VideoFrame.from_ndarray(filmed(index / RATE), format="rgb24")
                frame = filmed_frame.reformat(format="yuv420p10le")
                frame.pts = index
                frame.color_primaries = primaries
                frame.color_trc = curve
                frame.colorspace = primaries
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))

    return write


# Whole, and yet refused, since a player shows it differently from what is read.
SHOWN_OTHERWISE: dict[str, tuple[Writer, str]] = {
    "mirrored.mp4": (_with_matrix(MIRRORED), "is shown mirrored"),
    "upside-down.mov": (_with_matrix(UPSIDE_DOWN), "is shown mirrored"),
    "diagonal.mp4": (_with_matrix(DIAGONAL), "is shown rotated by 45 degrees"),
    "pq.mp4": (write_with_colours(9, 16), "is HDR (PQ)"),
    "hlg.mov": (write_with_colours(9, 18), "is HDR (HLG)"),
    "wide.mkv": (write_with_colours(9, 14), "is in wide colours (BT.2020)"),
}


def _bytes(content: bytes) -> Writer:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def _cut(suffix: str, share: float, **changes: object) -> Writer:
    """A download that broke off."""

    def write(path: Path) -> None:
        original = path.with_name(f"original{suffix}")
        write_clip(original, **changes)
        content = original.read_bytes()
        original.unlink()
        path.write_bytes(content[: int(len(content) * share)])

    return write


def _wave(path: Path) -> None:
    """A tenth of a second of sound in a file that is called a clip."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(1600))


# Refused without decoding more than a frame.
BROKEN: dict[str, Writer] = {
    "empty.mp4": _bytes(b""),
    "text.mp4": _bytes(b"not a clip at all"),
    "page.webm": _bytes(b"<html>404</html>"),
    "playlist.mp4": _bytes(b"#EXTM3U\n#EXTINF:2,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n"),
    "picture.mov": lambda path: pictures.scene().save(path, format="PNG"),
    "voice.mp4": only_sound,
    "voice.avi": _wave,
    "cut.mp4": _cut(".mp4", 0.6),
    "cut-faststart.mp4": _cut(".mp4", 0.6, container={"movflags": "faststart"}),
    "cut.mkv": _cut(".mkv", 0.6),
    "cut.webm": _cut(".webm", 0.6),
    "cut.avi": _cut(".avi", 0.6),
    "cut.flv": _cut(".flv", 0.6),
    "cut.wmv": _cut(".wmv", 0.6),
    "cut.gif": _cut_gif,
    "cut-fragmented.mp4": _cut(".mp4", 0.6, container={"movflags": "frag_keyframe+empty_moov"}),
}


def write_plain(
    path: Path, size: tuple[int, int], colour: tuple[int, int, int], matrix: str, *, tagged: bool
) -> None:
    """Five frames of one colour, coded by a matrix that the file declares if `tagged`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    # The matrix's number in ITU-T H.273, where 2 is "unspecified", and PyAV's name for it.
    number, name = {"bt709": (1, "ITU709"), "bt601": (6, "ITU601")}[matrix]
    if not tagged:
        number = 2
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"crf": "1"})
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv444p"
        stream.codec_context.colorspace = number
        pixels = np.full((height, width, 3), colour, dtype=np.uint8)
        for index in range(5):
            frame = VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = frame.reformat(format="yuv444p", dst_colorspace=name)
            frame.colorspace = number
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def read_clip(path: Path, frames: int, rate: float) -> np.ndarray:
    """The first frames of a clip at a rate, `T H W 3` at its own size."""
    return np.stack(list(frames_of(path, frames, rate, probe_clip(path))))
