"""CPU time of reading clips, relative to a plain loop of PyAV with the same conversion to RGB.

    python -m benchmarks.clips

Both decode in one thread, as caching does, and read every frame. The plain loop yields arrays, ours
yields pictures, which are resized next.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import av
import numpy as np
from av.video.frame import VideoFrame

from benchmarks.timing import arguments, compare, interleave, show
from simpletuner.data.clip_frames import CONVERSION
from simpletuner.data.clips import frames_of, probe_clip

RATE = 24
SIZES = {"480p": (832, 480), "720p": (1280, 720)}
KINDS = {"H.264": ("libx264", "yuv420p"), "10-bit HEVC": ("libx265", "yuv420p10le")}
# The plain loop takes at least .95 of our time.
BAR = 1 / 0.95


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None, rounds=5)
    parser.add_argument("--only", choices=SIZES, nargs="+", default=[*SIZES])
    parser.add_argument("--frames", type=int, default=72)
    options = parser.parse_args()
    variants: dict[str, Callable[[], None]] = {}
    names = [f"{kind}, {size}" for kind in KINDS for size in options.only]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            kind, size = name.split(", ")
            path = Path(folder) / f"{name}.mp4"
            write(path, *KINDS[kind], SIZES[size], options.frames)
            variants[f"{name}, plain"] = partial(read_plainly, path)
            variants[f"{name}, ours"] = partial(read, path, options.frames)
        seconds = interleave(variants, options.rounds, time.process_time)
    ratios = [compare(name, seconds, f"{name}, ours", f"{name}, plain", BAR) for name in names]
    show("CPU time of reading clips / plain loop", ratios, options)


def write(path: Path, codec: str, pixel_format: str, size: tuple[int, int], frames: int) -> None:
    """Noise that moves over a gradient."""
    numbers = np.random.default_rng(0)
    width, height = size
    noise = numbers.integers(0, 64, (height, 2 * width, 3))
    gradient = np.linspace(0, 190, height)[:, None, None]
    texture = noise + gradient
    options = {"crf": "20", "preset": "veryfast", "x265-params": "log-level=none"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=RATE, options=options)
        stream.width, stream.height = size
        stream.pix_fmt = pixel_format
        for index in range(frames):
            window = texture[:, 4 * index : 4 * index + width]
            pixels = np.ascontiguousarray(window.astype(np.uint8))
            frame = VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def read_plainly(path: Path) -> None:
    """Decode and convert every frame, as PyAV's documentation shows."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            frame.to_ndarray(format="rgb24", interpolation=CONVERSION, threads=1)


def read(path: Path, frames: int) -> None:
    """Read every frame as caching does."""
    for _ in frames_of(path, frames, RATE, probe_clip(path)):
        pass


if __name__ == "__main__":
    main()
