"""Writes clips as mp4 files that every browser can play."""

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

QUALITY = "18"  # crf; visually lossless
# In H.264, primaries, transfer function and matrix of ITU-R BT.709 have the same number.
BT709 = 1
LIMITED_RANGE = 1  # AVCOL_RANGE_MPEG: 16 to 235


def write_mp4(path: Path, frames: Sequence[Image.Image], rate: float) -> None:
    """Write H.264 at a constant frame rate, atomically.

    Args:
        path: its folder is created if missing.
        frames: at least one, all of one size. Odd widths and heights lose their last pixel, since
            yuv420p needs even sizes.
        rate: frames per second.

    Raises:
        DiskFullError: no space left; an existing file is kept.
    """
    with TemporaryDirectory() as folder:
        draft = Path(folder) / "clip.mp4"
        _encode(draft, frames, Fraction(rate).limit_denominator(1001))
        write_atomically(path, draft.read_bytes(), durable=False)


def _encode(path: Path, frames: Sequence[Image.Image], rate: Fraction) -> None:
    width, height = (side // 2 * 2 for side in frames[0].size)  # even
    # With the index first, a browser can start playing before the download is complete.
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": QUALITY})
        assert isinstance(stream, VideoStream)
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.colorspace = BT709
        context.color_primaries = BT709
        context.color_trc = BT709
        context.color_range = LIMITED_RANGE
        for picture in frames:
            even = picture.convert("RGB").crop((0, 0, width, height))
            container.mux(stream.encode(_to_yuv(even)))
        container.mux(stream.encode(None))


def _to_yuv(picture: Image.Image) -> VideoFrame:
    """Convert with the colour matrix of the file's tag; swscale's default would be BT.601."""
    return VideoFrame.from_image(picture).reformat(
        format="yuv420p", dst_colorspace=Colorspace.ITU709
    )
