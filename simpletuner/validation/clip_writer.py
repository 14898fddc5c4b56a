"""Clips to files: mp4 that every browser plays."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import av
from av.video.frame import VideoFrame
from av.video.reformatter import Colorspace
from av.video.stream import VideoStream
from PIL import Image

from simpletuner.atomic import write_atomically

QUALITY = "18"  # crf: seen as lossless
# The number of ITU-R BT.709 among the primaries, the transfer curves and the matrices of H.264.
BT709 = 1
LIMITED_RANGE = 1


def write_mp4(path: Path, frames: Sequence[Image.Image], rate: float) -> None:
    """Write H.264 at a constant rate; it appears whole or not at all.

    Args:
        path: its folder is created when missing.
        frames: all of one size, at least one. An odd width or height loses its last pixel: the codec takes even ones.
        rate: frames per second.

    Raises:
        DiskFullError: no space left; the file that was there is kept.
    """
    with TemporaryDirectory() as folder:
        draft = Path(folder) / "clip.mp4"
        _encode(draft, frames, Fraction(rate).limit_denominator(1001))
        write_atomically(path, draft.read_bytes(), durable=False)


def _encode(path: Path, frames: Sequence[Image.Image], rate: Fraction) -> None:
    width, height = (side // 2 * 2 for side in frames[0].size)
    # The index comes first, so that a browser can begin to play before it has everything.
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": QUALITY})
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED_RANGE
        for picture in frames:
            container.mux(stream.encode(_to_yuv(picture.convert("RGB").crop((0, 0, width, height)))))
        container.mux(stream.encode(None))


def _to_yuv(picture: Image.Image) -> VideoFrame:
    """With the matrix that the file says it has; players guess it where a file says nothing."""
    return VideoFrame.from_image(picture).reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709)
