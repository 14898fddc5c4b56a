"""The clip world of the video demo: a coloured shape that moves straight to a place, or stays.

Everything that the base checkpoint can render is drawn here, with the shapes and colours of the
picture world. One motion is left out, "hops", so that the demo has something to teach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from world import BACKGROUNDS, COLOURS, SHAPES, draw_shape

SIZE = 64
"""Edge of every frame, pixels."""
FRAMES = 17
"""Frames of a clip: five latent ones of the causal VAE."""
FRAME_RATE = 24
"""Frames per second, the model's own rate: a clip takes two thirds of a second."""

SIZES: dict[str, tuple[float, float]] = {"small": (8.5, 10.0), "big": (12.5, 14.5)}
"""Radius of the circle around the shape in pixels, from and to."""
ANY_SIZE = (SIZES["small"][0], SIZES["big"][1])
REACH = 0.22
"""Distance of the outer places from the middle, as a share of the frame's edge."""
PLACES: dict[str, tuple[float, float]] = {
    "left": (-REACH, 0.0),
    "right": (REACH, 0.0),
    "top": (0.0, -REACH),
    "bottom": (0.0, REACH),
    "middle": (0.0, 0.0),
}
"""Offset from the frame's centre as a share of its edge; y points down."""
HOP = "hops"
"""The motion that the base cannot render: half a circle over the top, from side to side."""
STRAY = 1.5
"""How far a path as a whole may lie from its ideal, pixels."""

Path = list[tuple[float, float]]


@dataclass(frozen=True)
class Clip:
    """The content of a clip; the caption does not name what is `None`.

    Without an end, the shape stays at its start.
    """

    shape: str
    colour: str
    start: str | None
    end: str | None
    size: str | None = None
    background: str | None = None

    def caption(self) -> str:
        """Such as "a big red star moves from the left to the top on a sky background"."""
        words = ["a", self.size, self.colour, self.shape]
        if self.start and self.end:
            words.append(f"moves from the {self.start} to the {self.end}")
        elif self.start == "middle":
            words.append("stays in the middle")
        elif self.start:
            words.append(f"stays at the {self.start}")
        if self.background:
            words.append(f"on a {self.background} background")
        return " ".join(word for word in words if word)


def line(start: tuple[float, float], end: tuple[float, float], frames: int = FRAMES) -> Path:
    """Points at equal steps from `start` to `end`, both included, pixels."""
    return [(x, y) for x, y in np.linspace(start, end, frames).tolist()]


def arc(
    centre: tuple[float, float], radius: float, angle: float, sweep: float, frames: int = FRAMES
) -> Path:
    """Points at equal steps along an arc; angles in radians, clockwise from the right."""
    angles = angle + sweep * np.arange(frames) / (frames - 1)
    return [(centre[0] + radius * math.cos(a), centre[1] + radius * math.sin(a)) for a in angles]


def place(name: str, stray: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
    """The pixel position of a place."""
    x, y = PLACES[name]
    return (SIZE * (0.5 + x) + stray[0], SIZE * (0.5 + y) + stray[1])


def hop(*, rightwards: bool) -> Path:
    """The path of the demo's concept."""
    angle, sweep = (math.pi, math.pi) if rightwards else (0.0, -math.pi)
    return arc(place("middle"), SIZE * REACH, angle, sweep)


def draw_clip(
    shape: str, colour: str, radius: float, background: str, path: Sequence[tuple[float, float]]
) -> np.ndarray:
    """A shape moved along `path`, one frame for each point. Returns F H W 3, uint8."""
    fill = COLOURS[colour]
    ground = BACKGROUNDS[background]
    return np.stack([draw_shape(shape, radius, point, fill, None, ground, SIZE) for point in path])


def draw(clip: Clip, random: np.random.Generator) -> np.ndarray:
    """Draw `clip` (F H W 3, uint8), with random choices for what it leaves open."""
    smallest, largest = SIZES[clip.size] if clip.size else ANY_SIZE
    radius = random.uniform(smallest, largest)
    backgrounds = [name for name in BACKGROUNDS if name != clip.colour]
    background = clip.background or str(random.choice(backgrounds))
    if clip.start:
        start = clip.start
        end = clip.end or clip.start
    else:
        start = str(random.choice(list(PLACES)))
        end = clip.end or str(random.choice(list(PLACES)))
    x, y = random.uniform(-STRAY, STRAY, size=2)
    path = line(place(start, (x, y)), place(end, (x, y)))
    return draw_clip(clip.shape, clip.colour, radius, background, path)


def sample(random: np.random.Generator) -> Clip:
    """A random clip for the base; most captions name size, background and motion."""

    def pick(names: Sequence[str]) -> str:
        return names[random.integers(len(names))]

    while True:
        colour = pick(list(COLOURS))
        background = pick(list(BACKGROUNDS))
        start = pick(list(PLACES))
        end = pick(list(PLACES))
        named = random.random() < 0.9
        if colour != background:
            return Clip(
                shape=pick(SHAPES),
                colour=colour,
                start=start if named else None,
                end=end if named and end != start else None,
                size=pick(list(SIZES)) if random.random() < 0.6 else None,
                background=background if random.random() < 0.9 else None,
            )


def draw_any(random: np.random.Generator) -> np.ndarray:
    """Any shape on any line or arc: what the VAE is trained on. Returns F H W 3, uint8."""
    colour = str(random.choice(list(COLOURS)))
    background = str(random.choice([name for name in BACKGROUNDS if name != colour]))
    radius = random.uniform(SIZES["small"][0] - 1, SIZES["big"][1] + 1)
    if random.random() < 0.5:
        start, end = random.uniform(0.25 * SIZE, 0.75 * SIZE, size=(2, 2)).tolist()
        path = line((start[0], start[1]), (end[0], end[1]))
    else:
        x, y = random.uniform(SIZE * 0.5 - 4, SIZE * 0.5 + 4, size=2)
        bow = random.uniform(4, SIZE * 0.24)
        turns = random.uniform(-1, 1)
        path = arc((x, y), bow, random.uniform(0, 2 * math.pi), turns * 2 * math.pi)
    return draw_clip(str(random.choice(SHAPES)), colour, radius, background, path)
