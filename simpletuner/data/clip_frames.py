"""Frames of a clip, decoded by PyAV: deinterlaced, chosen by display time, upright, in RGB."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import av
from av.filter import Graph
from av.video.format import VideoFormat
from av.video.frame import VideoFrame
from av.video.plane import VideoPlane
from av.video.reformatter import VideoReformatter
from PIL import Image

from simpletuner.data.clip_file import ClipFile, open_clip
from simpletuner.data.clips import MISSING_SECONDS, ColorMatrix, choose_frames
from simpletuner.data.files import MediaError

# H.273 numbers of colour matrices (table 4).
MATRICES = {"bt709": 1, "bt601": 6}
# Maximum number of frames a decoder delays to restore display order (H.264 and HEVC).
REORDERED = 16
# Containers without durations of frames: the last one is shown until the declared end.
WITHOUT_DURATIONS = ("matroska,webm", "flv")
# swscale's bicubic chroma, at full resolution (SWS_FULL_CHR_H_INT), with accurate rounding
# (SWS_ACCURATE_RND), as numbers because PyAV 17 has no names for them. Without the last two,
# colours are darker by a level on average.
CONVERSION = 0x4 | 0x2000 | 0x40000
# swscale's name for the pixels of each mode of Pillow: in planes of green, blue, red and opacity.
# The values are those of packed pixels, which swscale computes in more than twice the time.
PIXELS = {"RGB": "gbrp", "RGBA": "gbrap"}
# By quarter turns, counter-clockwise.
TURNS = {1: Image.Transpose.ROTATE_90, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_270}


def read_with_av(
    path: Path,
    moments: Sequence[float],
    matrix: ColorMatrix | None = None,
    background: str = "white",
) -> Iterator[Image.Image]:
    """The frames shown at `moments`, in upright RGB.

    Args:
        moments: times in seconds after the first frame, increasing.
        matrix: colour matrix; None uses the file's tag.
        background: colour of transparent areas.

    Raises:
        MediaError: the clip is damaged, or it ends before the last moment.
    """
    converter = PictureConverter(matrix, background)
    with open_clip(path) as clip:
        for frame in choose_frames(frames_with_times(clip, moments[-1]), moments):
            yield converter.picture_of(frame)


def frames_with_times(clip: ClipFile, last: float) -> Iterator[tuple[VideoFrame, float]]:
    """Frames in display order, with their times in seconds after the first frame.

    Raises:
        MediaError: the clip ends before the last moment.
    """
    start: float | None = None
    previous = 0.0
    end = 0.0
    for frame, clock in _in_order(clip):
        if start is None:
            start = clock
        time = clock - start
        # A frame lasts for its declared duration, or at least as long as its predecessor.
        duration = float((frame.duration or 0) * (frame.time_base or 0))
        end = time + max(duration, time - previous)
        previous = time
        yield frame, time
    if start is not None:
        end = max(end, end_of_last_frame(clip) - start)
    if start is None or last > end + MISSING_SECONDS:
        raise MediaError(f"ends after {end:.2f} seconds, and a frame at {last:.2f} is needed")


def _in_order(clip: ClipFile) -> Iterator[tuple[VideoFrame, float]]:
    """Frames in display order, with their times in seconds of the container.

    AVI has no display times: packets are numbered in storage order, so times jump back and forth
    although the decoder returns frames in display order. Each frame gets the earliest remaining
    time.
    """
    delay = 0
    if clip.format == "avi":
        delay = REORDERED
    frames: deque[VideoFrame] = deque()
    times: list[float] = []
    for frame in _deinterlaced(clip.frames()):
        if frame.time is None:
            raise MediaError("holds frames without a time")
        frames.append(frame)
        heapq.heappush(times, frame.time)
        if len(frames) > delay:
            yield frames.popleft(), heapq.heappop(times)
    while frames:
        yield frames.popleft(), heapq.heappop(times)


def end_of_last_frame(clip: ClipFile) -> float:
    """The time until which the last frame is shown, in seconds of the container.

    0 for containers with durations of frames.
    """
    if clip.format not in WITHOUT_DURATIONS:
        return 0.0
    return clip.declared_seconds()


def _deinterlaced(frames: Iterable[VideoFrame]) -> Iterator[VideoFrame]:
    """Frames without the combs of interlaced ones: one frame for two fields, at its time."""
    graph: Graph | None = None
    layout = ""
    for frame in frames:
        # A graph takes frames of one size and format, which broadcasts change in the middle.
        if graph is not None and _layout_of(frame) != layout:
            yield from _pushed(graph, None)
            graph = None
        if graph is None and frame.interlaced_frame:
            graph = _deinterlacer(frame)
            layout = _layout_of(frame)
        if graph is None:
            yield frame
        else:
            yield from _pushed(graph, frame)
    if graph is not None:
        yield from _pushed(graph, None)


def _layout_of(frame: VideoFrame) -> str:
    return f"{frame.width}x{frame.height} {frame.format.name}"


def _deinterlacer(frame: VideoFrame) -> Graph:
    """A filter graph for frames of this size and format: one frame for two fields."""
    graph = Graph()
    graph.threads = 1
    # Frames that are not marked as interlaced pass unchanged.
    deinterlace = graph.add("bwdif", "mode=send_frame:deint=interlaced")
    source = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base=frame.time_base
    )
    graph.link_nodes(source, deinterlace, graph.add("buffersink"))
    graph.configure()
    return graph


def _pushed(graph: Graph, frame: VideoFrame | None) -> Iterator[VideoFrame]:
    """The frames that are finished after this one; None flushes the graph."""
    graph.vpush(frame)
    while True:
        try:
            yield graph.vpull()
        except (av.BlockingIOError, av.EOFError):  # it needs the next frame, or is at its end
            return


class PictureConverter:
    """Converts frames to pictures; a repeated frame is converted once."""

    def __init__(self, matrix: ColorMatrix | None, background: str) -> None:
        self.matrix = matrix
        self.background = background
        self.reformatter = VideoReformatter()
        self.frame: VideoFrame | None = None
        self.picture = Image.new("RGB", (1, 1))

    def picture_of(self, frame: VideoFrame) -> Image.Image:
        """A picture, 8-bit RGB, upright."""
        if frame is not self.frame:
            self.picture = self._convert(frame)
            self.frame = frame
        return self.picture

    def _convert(self, frame: VideoFrame) -> Image.Image:
        if self.matrix is not None:
            frame.colorspace = MATRICES[self.matrix]
        mode = "RGBA" if _may_be_transparent(frame.format) else "RGB"
        picture = self._to_rgb(frame, mode)
        if picture.mode == "RGBA":
            behind = Image.new("RGBA", picture.size, self.background)
            picture = Image.alpha_composite(behind, picture).convert("RGB")
        turn = TURNS.get(round(frame.rotation / 90) % 4)
        if turn is None:
            return picture
        return picture.transpose(turn)

    def _to_rgb(self, frame: VideoFrame, mode: str) -> Image.Image:
        # Clips are decoded in parallel, so one thread each.
        frame = self.reformatter.reformat(
            frame, format=PIXELS[mode], interpolation=CONVERSION, threads=1
        )
        green, blue, red, *opacity = map(_channel, frame.planes)
        return Image.merge(mode, (red, green, blue, *opacity))


def _channel(plane: VideoPlane) -> Image.Image:
    """One channel as a greyscale picture; its pixels are not copied."""
    pixels: Any = memoryview(plane)
    size = (plane.width, plane.height)
    return Image.frombuffer("L", size, pixels, "raw", "L", plane.line_size, 1)


def _may_be_transparent(pixels: VideoFormat) -> bool:
    return pixels.has_palette or any(component.is_alpha for component in pixels.components)
