"""The picture world of the demo: a coloured shape on a plain background, with its caption.

Everything that the base checkpoint can draw is drawn here. Purple stars are left out, so that the
demo has something to teach: "a glimmer", a purple star with a yellow rim. A caption always names
the colour and the shape, and mostly the size, the rim, the place and the background; what it leaves
out is drawn at random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIZE = 96
"""Edge of every picture, pixels."""

OVERSAMPLING = 4
"""Pictures are drawn this many times larger and averaged down, which gives smooth edges."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (222, 45, 52),
    "orange": (245, 140, 35),
    "yellow": (252, 210, 45),
    "green": (44, 162, 84),
    "blue": (40, 98, 220),
    "purple": (132, 56, 192),
    "pink": (244, 126, 180),
    "black": (28, 28, 34),
    "white": (252, 252, 252),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (252, 252, 252),
    "gray": (178, 182, 188),
    "cream": (250, 238, 212),
    "mint": (196, 234, 214),
    "sky": (186, 220, 246),
    "navy": (28, 40, 84),
}
SHAPES = ("circle", "square", "triangle", "star", "diamond")
SIZES: dict[str, tuple[float, float]] = {"small": (16.0, 19.0), "big": (27.0, 31.0)}
"""Radius of the circle around the shape in pixels, from and to."""
ANY_SIZE = (16.0, 31.0)
PLACES: dict[str, tuple[float, float]] = {
    "in the middle": (0.5, 0.5),
    "on the left": (0.36, 0.5),
    "on the right": (0.64, 0.5),
    "at the top": (0.5, 0.36),
    "at the bottom": (0.5, 0.64),
}
"""Centre of the shape as a share of width and height."""
RIM = 0.24
"""Width of a rim as a share of the radius."""


@dataclass(frozen=True)
class Picture:
    """The content of a picture; the caption does not name what is `None`."""

    shape: str
    colour: str
    rim: str | None = None
    size: str | None = None
    place: str | None = None
    background: str | None = None

    def caption(self) -> str:
        """Such as "a big red star with a white rim on the left on a sky background"."""
        words = ["a", self.size, self.colour, self.shape]
        if self.rim:
            words.append(f"with a {self.rim} rim")
        words.append(self.place)
        if self.background:
            words.append(f"on a {self.background} background")
        return " ".join(word for word in words if word)

    @property
    def held_out(self) -> bool:
        """Whether the base must never see this picture: purple stars, whatever their rim."""
        return self.shape == "star" and self.colour == "purple"


def outline(shape: str, radius: float) -> list[tuple[float, float]]:
    """Corner points of `shape` around the origin, in pixels; y points down."""
    if shape == "square":
        corners = 4
        turn = math.pi / 4
        radii = (radius,)
    elif shape == "diamond":
        half = (0.72 * radius, 1.08 * radius)
        return [(0.0, -half[1]), (half[0], 0.0), (0.0, half[1]), (-half[0], 0.0)]
    elif shape == "triangle":
        corners = 3
        turn = -math.pi / 2
        radii = (1.1 * radius,)
    elif shape == "star":
        corners = 10
        turn = -math.pi / 2
        radii = (1.1 * radius, 0.53 * radius)
    else:
        corners = 72
        turn = 0.0
        radii = (0.9 * radius,)
    # The bounding box of a triangle is not centred on its circle: move it to the middle.
    drop = 0.2 * radius if shape == "triangle" else 0.0
    points = []
    for corner in range(corners):
        angle = turn + 2 * math.pi * corner / corners
        corner_radius = radii[corner % len(radii)]
        points.append((corner_radius * math.cos(angle), corner_radius * math.sin(angle) + drop))
    return points


def inset_scale(shape: str) -> float:
    """Scale of the inner outline for which the rim looks equally wide on every shape."""
    sharpness = {"star": 1.4, "triangle": 1.7, "diamond": 1.35, "square": 1.15, "circle": 1.0}
    return 1.0 - RIM * sharpness[shape]


def draw_shape(
    shape: str,
    radius: float,
    centre: tuple[float, float],
    fill: tuple[int, int, int],
    rim: tuple[int, int, int] | None,
    background: tuple[int, int, int],
    size: int = SIZE,
) -> np.ndarray:
    """Draw one shape with smooth edges.

    `radius` and `centre` are in pixels of the finished picture. Returns H W 3, uint8.
    """
    k = OVERSAMPLING
    picture = Image.new("RGB", (size * k, size * k), background)
    pen = ImageDraw.Draw(picture)
    points = outline(shape, radius)

    def paint(scale: float, colour: tuple[int, int, int]) -> None:
        # A triangle shrinks towards its centroid, which `outline` has moved down.
        sink = 0.2 * radius if shape == "triangle" else 0.0
        corners = [
            ((centre[0] + x * scale) * k, (centre[1] + sink + (y - sink) * scale) * k)
            for x, y in points
        ]
        pen.polygon(corners, fill=colour)

    paint(1.0, rim or fill)
    if rim:
        paint(inset_scale(shape), fill)
    return np.asarray(picture.resize((size, size), Image.Resampling.BOX))


def draw(picture: Picture, random: np.random.Generator) -> np.ndarray:
    """Draw `picture` (H W 3, uint8), with random choices for what it leaves open."""
    smallest, largest = SIZES[picture.size] if picture.size else ANY_SIZE
    radius = random.uniform(smallest, largest)
    if picture.place:
        centre = tuple(share * SIZE + random.uniform(-2.0, 2.0) for share in PLACES[picture.place])
    else:
        margin = radius * 1.1 + 1
        centre = tuple(random.uniform(margin, SIZE - margin) for _ in range(2))
    # A shape is invisible on a background of the same colour.
    backgrounds = [name for name in BACKGROUNDS if name not in (picture.colour, picture.rim)]
    background = picture.background or backgrounds[random.integers(len(backgrounds))]
    rim = COLOURS[picture.rim] if picture.rim else None
    return draw_shape(
        picture.shape,
        radius,
        (centre[0], centre[1]),
        COLOURS[picture.colour],
        rim,
        BACKGROUNDS[background],
    )


def sample(random: np.random.Generator, *, held_out: bool = False) -> Picture:
    """A random picture: one that the base may see, or with `held_out` one that it must not.

    Half of the pictures have a rim; size, place and background are each named in most captions.
    """

    def pick(names: tuple[str, ...] | list[str]) -> str:
        return names[random.integers(len(names))]

    while True:
        shape, colour = ("star", "purple") if held_out else (pick(SHAPES), pick(list(COLOURS)))
        background = pick(list(BACKGROUNDS))
        rims = [name for name in COLOURS if name != colour]
        picture = Picture(
            shape=shape,
            colour=colour,
            rim=pick(rims) if random.random() < 0.5 else None,
            size=pick(list(SIZES)) if random.random() < 0.6 else None,
            place=pick(list(PLACES)) if random.random() < 0.7 else None,
            background=background if random.random() < 0.9 else None,
        )
        if picture.held_out == held_out and background not in (colour, picture.rim):
            return picture
