"""Draw the video demo before and after: two strips of frames per prompt, and a training clip.

    python scripts/demo/figure_video.py output/demo-video docs/images/demo-video.png

The first argument is the output folder of a finished run, `simpletuner train --example demo-video`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import av
from build_video import VIDEO_DEMO
from figure import FONT, GAP, INK, PAPER, SMALL, preview_files
from PIL import Image, ImageDraw
from video_world import HOP

SIDE = 96  # of a frame, one and a half times its size
EVERY = 2  # every second frame of 17
LEFT = 76  # width of the column of labels
HEAD = 26  # height of a line with a prompt


def read_strip(path: Path) -> list[Image.Image]:
    """Every second frame of a clip, enlarged."""
    with av.open(str(path)) as container:
        frames = [frame.to_image() for frame in container.decode(video=0)]
    return [frame.resize((SIDE, SIDE), Image.Resampling.LANCZOS) for frame in frames[::EVERY]]


def draw_figure(sections: list[tuple[str, list[tuple[str, Path]]]]) -> Image.Image:
    """Sections of a heading and labelled strips, one below the other."""
    strips = [
        (title, [(label, read_strip(path)) for label, path in rows]) for title, rows in sections
    ]
    frames = len(strips[0][1][0][1])
    height = sum(HEAD + GAP + len(rows) * (SIDE + 4) for _, rows in strips)
    figure = Image.new("RGB", (LEFT + frames * (SIDE + 2) + GAP, height), PAPER)
    pen = ImageDraw.Draw(figure)
    y = 0
    for title, rows in strips:
        pen.text((LEFT, y + HEAD - 4), title, INK, SMALL, anchor="ld")
        y += HEAD
        for label, strip in rows:
            pen.text((GAP, y + SIDE // 2), label, INK, FONT, anchor="lm")
            for column, frame in enumerate(strip):
                figure.paste(frame, (LEFT + column * (SIDE + 2), y))
            y += SIDE + 4
        y += GAP
    return figure


def main(folder: Path, target: Path) -> None:
    sections = [
        (prompt, [("before", first), ("after", last)])
        for prompt, (first, last) in preview_files(folder, HOP).items()
    ]
    clip = sorted((VIDEO_DEMO / "clips").glob("*.mp4"))[2]
    caption = clip.with_suffix(".txt").read_text(encoding="utf-8").strip()
    chosen = [
        sections[0],
        sections[2],
        sections[3],
        (f"one of the clips it was trained on: {caption}", [("clip", clip)]),
    ]
    target.parent.mkdir(parents=True, exist_ok=True)
    # With a palette, the file has less than half the size.
    figure = draw_figure(chosen).quantize(256, dither=Image.Dither.NONE)
    figure.save(target, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
