"""Draw the demo before and after: a column for each prompt, and the training pictures below.

    python scripts/demo/figure.py output/demo docs/images/demo.png

The first argument is the output folder of a finished run, `simpletuner train --example demo`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

PICTURES = Path(__file__).parents[2] / "simpletuner" / "examples" / "demo" / "pictures"
CONCEPT = "glimmer"
SIDE = 144  # of a preview, one and a half times its size
GAP = 12
LEFT = 76  # width of the column of labels
TOP = 78  # height of the row of prompts
INK = (40, 40, 40)
PAPER = (255, 255, 255)
FONT = ImageFont.load_default(17)
SMALL = ImageFont.load_default(14)


def preview_files(folder: Path, concept: str) -> dict[str, tuple[Path, Path]]:
    """The first and the last preview of each prompt, without the empty one.

    Prompts with the concept come first.
    """
    lines = (folder / "validation_media.jsonl").read_text(encoding="utf-8").splitlines()
    paths_by_step: dict[str, dict[int, Path]] = {}
    for record in map(json.loads, lines):
        if record["prompt"] and not record["ema"]:
            paths = paths_by_step.setdefault(record["prompt"], {})
            paths[record["step"]] = folder / record["path"]

    previews = {}
    for prompt in sorted(paths_by_step, key=lambda prompt: concept not in prompt):
        paths = paths_by_step[prompt]
        previews[prompt] = (paths[min(paths)], paths[max(paths)])
    return previews


def draw_figure(previews: dict[str, tuple[Path, Path]], pictures: Sequence[Path]) -> Image.Image:
    """The whole figure."""
    width = LEFT + len(previews) * (SIDE + GAP)
    side = (width - LEFT - GAP) // len(pictures) - GAP
    strip = TOP + 2 * (SIDE + GAP) + GAP
    figure = Image.new("RGB", (width, strip + side + GAP), PAPER)
    pen = ImageDraw.Draw(figure)
    for column, (prompt, pair) in enumerate(previews.items()):
        x = LEFT + column * (SIDE + GAP)
        pen.multiline_text((x, TOP - 8), wrapped(prompt, pen), INK, SMALL, anchor="ld", spacing=4)
        for row, picture in enumerate(pair):
            figure.paste(load(picture, SIDE), (x, TOP + row * (SIDE + GAP)))
    for row, title in enumerate(("before", "after")):
        pen.text((GAP, TOP + row * (SIDE + GAP) + SIDE // 2), title, INK, FONT, anchor="lm")
    pen.multiline_text((GAP, strip + side // 2), "trained\non", INK, FONT, anchor="lm")
    for index, path in enumerate(pictures):
        figure.paste(load(path, side), (LEFT + index * (side + GAP), strip))
    return figure


def load(path: Path, side: int) -> Image.Image:
    with Image.open(path) as picture:
        return picture.convert("RGB").resize((side, side), Image.Resampling.LANCZOS)


def wrapped(text: str, pen: ImageDraw.ImageDraw) -> str:
    """The text in lines no longer than a picture."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer, SMALL) > SIDE:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def main(folder: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure = draw_figure(preview_files(folder, CONCEPT), sorted(PICTURES.glob("*.png")))
    figure.save(target, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
