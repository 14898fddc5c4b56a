"""Aspect buckets: the training size and crop of a picture, and the checks of the keys that set
them.

The arithmetic is documented in the section *Sizes* of the dataset reference. a is
`aspect_bucket_alignment`, R rounds half to even to a multiple of a (at least a), ar is width /
height rounded to `aspect_bucket_rounding` decimals:

    pixel_area  E = R(resolution)                       W = R(E sqrt(ar))   H = R(E / sqrt(ar))
    area        E = R(floor(sqrt(resolution 10^6)))     the same
    pixel       short edge R(resolution), long edge R(floor(resolution ar)) or R(floor(resolution /
    ar)) square      W = H = E, with E = R(resolution) for pixel
"""

from __future__ import annotations

import math
import os
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Literal

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.types import FALSE_WORDS, Size
from simpletuner.data.chance import fraction
from simpletuner.data.files import LeftOutError
from simpletuner.errors import Problems
from simpletuner.models.spec import FamilySpec

ResolutionType = Literal["pixel", "area", "pixel_area"]
UNITS: Mapping[ResolutionType, str] = {
    "area": "megapixels",
    "pixel": "pixels",
    "pixel_area": "pixels",
}
UNIT_CHECK_OVERRIDE = "SIMPLETUNER_MAXIMUM_IMAGE_SIZE_OVERRIDE"
# A maximum of this many megapixels or more, or an edge of this few pixels or fewer, is probably in
# the wrong unit.
SUSPICIOUS_AREA = 20
SUSPICIOUS_EDGE = 512

CHOSEN = ("closest", "random")  # values of `crop_aspect` that choose from a list
outside_limits = partial(LeftOutError, "outside the limits")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Resize and crop of a picture to its training size.

    Attributes:
        bucket: label; all samples of a dataset with the same label have the same size.
        size: width and height of the training picture in pixels.
        resized: width and height of the whole picture before cropping; at least `size`.
        crop: left and top of the crop in the resized picture.
    """

    bucket: str
    size: Size
    resized: Size
    crop: tuple[int, int]


@dataclass(frozen=True)
class PixelGrid:
    """What `resolution` means: an edge or an area, and the multiple that both sides are rounded
    to.
    """

    resolution: float
    resolution_type: ResolutionType
    alignment: int
    rounding: int = 2

    def snap(self, length: float) -> int:
        """The nearest multiple of the alignment (half to even), at least one."""
        return max(1, round(length / self.alignment)) * self.alignment

    def rounded(self, ratio: float) -> float:
        """The ratio as bucket labels show it; never 0, however narrow the picture."""
        return max(round(ratio, self.rounding), 10.0**-self.rounding)

    def ratio(self, size: Size) -> float:
        """Width / height, rounded."""
        return self.rounded(size[0] / size[1])

    def area(self, length: float) -> float:
        """Converts a size in the unit of the resolution to a number of pixels (`area` and
        `pixel_area`).
        """
        return length * 1e6 if self.resolution_type == "area" else length**2

    @property
    def square(self) -> int:
        """Edge E of the square."""
        if self.resolution_type == "area":
            # Rounded first: a product just below a square number would lose a whole pixel to the
            # floor.
            return self.snap(math.isqrt(round(self.resolution * 1e6)))
        return self.snap(self.resolution)

    def size(self, ratio: float) -> Size:
        """Width and height of the bucket for a ratio."""
        if self.resolution_type == "pixel":
            short = self.square
            if ratio >= 1:
                return Size(self.snap(math.floor(self.resolution * ratio)), short)
            return Size(short, self.snap(math.floor(self.resolution / ratio)))
        root = math.sqrt(ratio)
        return Size(self.snap(self.square * root), self.snap(self.square / root))


@dataclass(frozen=True)
class Aspect:
    """One of the buckets that `crop_aspect` closest and random choose from."""

    bucket: str
    size: Size
    weight: float = 1.0

    def enlargement(self, picture: Size) -> float:
        """Relative enlargement of a picture that covers this bucket; negative if the picture
        shrinks.
        """
        return max(self.size[0] / picture[0], self.size[1] / picture[1]) - 1


def listed_aspects(grid: PixelGrid, ratios: Sequence[tuple[float, float]]) -> list[Aspect]:
    """Aspects of a user's list of (ratio, weight)."""
    rounded = [(grid.rounded(ratio), weight) for ratio, weight in ratios]
    return [Aspect(str(ratio), grid.size(ratio), weight) for ratio, weight in rounded]


def native_aspects(grid: PixelGrid, native: Mapping[int, Sequence[Size]]) -> list[Aspect]:
    """The model's native sizes if resolution and grid allow them, else their ratios on the
    dataset's grid.
    """
    if not native:
        return []
    edge = math.sqrt(grid.resolution * 1e6) if grid.resolution_type == "area" else grid.resolution
    nearest = min(native, key=lambda known: abs(known - edge))
    exact = grid.resolution_type != "pixel" and math.isclose(nearest, edge)
    aspects = []
    for size in native[nearest]:
        fits = exact and all(length % grid.alignment == 0 for length in size)
        ratio = grid.ratio(size)
        aspects.append(Aspect(str(ratio), size if fits else grid.size(ratio)))
    return aspects


@dataclass(frozen=True)
class BucketRules:
    """The rules of a dataset for sizes and crops.

    Attributes:
        grid: what the resolution means.
        largest_side: the model's limit per side in pixels.
        config: the entry with its defaults filled in; limits are in the unit of the resolution, and
            0 disables one.
        aspects: the buckets that `crop_aspect` closest and random choose from.
    """

    grid: PixelGrid
    largest_side: int
    config: DatasetConfig
    aspects: tuple[Aspect, ...] = ()
    _placed: dict[Size, Geometry] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def place(self, picture: Size, *token: object) -> Geometry:
        """Bucket, size and crop of a picture.

        Args:
            picture: its width and height after EXIF rotation.
            token: seed of the random choices; the same token gives the same crop.

        Raises:
            LeftOutError: the picture is outside the limits.
        """
        if self.config.crop and "random" in (self.config.crop_aspect, self.config.crop_style):
            return self._place(picture, token)
        if picture not in self._placed:  # pictures of one size share their geometry
            self._placed[picture] = self._place(picture, token)
        return self._placed[picture]

    def _place(self, picture: Size, token: tuple[object, ...]) -> Geometry:
        self._check_limits(picture)
        bucket, size = self._bucket(picture, token)
        if max(size) > self.largest_side:
            raise outside_limits(f"needs {size}; the model's limit is {self.largest_side} a side")
        resized = self._resized(picture, size)
        return Geometry(bucket, size, resized, self._position(resized, size, token))

    def follow(self, picture: Size, source: Geometry, *token: object) -> Geometry:
        """Geometry of a partner with other content than its source: the same size, with its own
        crop.
        """
        resized = cover(picture, source.size)
        return Geometry(
            source.bucket, source.size, resized, self._position(resized, source.size, token)
        )

    def _check_limits(self, picture: Size) -> None:
        smallest = self.config.minimum_image_size or 0
        if smallest and self._is_small(picture, smallest):
            raise outside_limits(f"{picture} is smaller than minimum_image_size {smallest:g}")
        ratio = self.grid.ratio(picture)
        low = self.config.minimum_aspect_ratio
        high = self.config.maximum_aspect_ratio
        if (low and ratio < low) or (high and ratio > high):
            limit = "minimum" if low and ratio < low else "maximum"
            raise outside_limits(f"{picture} has the ratio {ratio:g}, outside {limit}_aspect_ratio")

    def _is_small(self, picture: Size, smallest: float) -> bool:
        if self.grid.resolution_type == "pixel":
            return min(picture) < smallest
        least = self.grid.area(smallest)
        # A square crop uses only the short side of a long picture, whatever the area.
        square = self.config.crop and self.config.crop_aspect == "square"
        return picture[0] * picture[1] < least or (square and min(picture) < math.sqrt(least))

    def _bucket(self, picture: Size, token: tuple[object, ...]) -> tuple[str, Size]:
        if self.config.crop and self.config.crop_aspect == "square":
            return "1.0", Size(self.grid.square, self.grid.square)
        if self.config.crop and self.config.crop_aspect in CHOSEN:
            aspect = self._listed(picture, token)
            return aspect.bucket, aspect.size
        ratio = self.grid.ratio(picture)
        return str(ratio), self.grid.size(ratio)

    def _listed(self, picture: Size, token: tuple[object, ...]) -> Aspect:
        most = self.config.max_upscale_threshold
        allowed = [
            aspect for aspect in self.aspects if most is None or aspect.enlargement(picture) <= most
        ]
        if not allowed:
            least = min(aspect.enlargement(picture) for aspect in self.aspects)
            message = f"would be enlarged by {least:.0%}, more than max_upscale_threshold {most:g}"
            raise outside_limits(f"{picture} {message}")
        if self.config.crop_aspect == "closest":
            # Distance in log space treats wide and tall alike and crops the least.
            ratio = math.log(picture[0] / picture[1])
            return min(
                allowed, key=lambda aspect: abs(math.log(aspect.size[0] / aspect.size[1]) - ratio)
            )
        # A weighted draw. `min` guards against a product that rounds up to the sum of all weights.
        ends = [*accumulate(aspect.weight for aspect in allowed)]
        return allowed[min(bisect(ends, fraction(*token, "aspect") * ends[-1]), len(allowed) - 1)]

    def _resized(self, picture: Size, size: Size) -> Size:
        """The smallest size that covers the bucket, or the target size if the picture exceeds the
        maximum.
        """
        covering = cover(picture, size)
        area = picture[0] * picture[1]
        largest = self.config.maximum_image_size or 0
        target = self.config.target_downsample_size or 0
        if (
            self.grid.resolution_type == "pixel"
        ):  # the maximum measures the long edge, the target the short one
            is_large = max(picture) > largest
            scale = target / min(picture)
        else:
            is_large = area > self.grid.area(largest)
            scale = math.sqrt(self.grid.area(target) / area)
        smaller = Size(round(picture.width * scale), round(picture.height * scale))
        # A target too small to cover the bucket is ignored.
        fits = scale < 1 and smaller[0] >= covering[0] and smaller[1] >= covering[1]
        return smaller if self.config.crop and largest and is_large and fits else covering

    def _position(self, resized: Size, size: Size, token: tuple[object, ...]) -> tuple[int, int]:
        spare_x = resized[0] - size[0]
        spare_y = resized[1] - size[1]
        style = self.config.crop_style if self.config.crop else "center"
        if style == "corner":
            return 0, 0
        if style == "random":
            # `+ 1` includes the position at the far edge.
            return int(fraction(*token, "x") * (spare_x + 1)), int(
                fraction(*token, "y") * (spare_y + 1)
            )
        return spare_x // 2, spare_y // 2


def cover(picture: Size, size: Size) -> Size:
    """The smallest size with the picture's ratio that covers `size`."""
    width, height = picture
    wanted_width, wanted_height = size
    # Integers are exact; a division could round either way if both ratios are equal.
    if wanted_width * height >= wanted_height * width:
        return Size(wanted_width, max(wanted_height, round(height * wanted_width / width)))
    return Size(max(wanted_width, round(width * wanted_height / height)), wanted_height)


def build_rules(config: DatasetConfig, spec: FamilySpec, report: Problems) -> BucketRules | None:
    """The rules of a dataset, or None if its resolution is unusable.

    Args:
        config: the entry with its defaults filled in.
        spec: the model family, with the sizes it accepts.
    """
    if config.resolution is None or config.resolution_type is None:
        report.error("resolution", f"is not set, and {spec.name} has no default for it.")
        return None
    alignment = int(config.aspect_bucket_alignment or spec.size_multiple)
    grid = PixelGrid(
        config.resolution, config.resolution_type, alignment, config.aspect_bucket_rounding or 2
    )
    _check_grid(grid, spec, report)
    # Every bucket has a side at least as long as the square's, so no picture could be placed.
    if grid.square > spec.largest_side:
        return None
    aspects: list[Aspect] = []
    if config.crop and config.crop_aspect in CHOSEN:
        if config.crop_aspect_buckets is not None:
            aspects = listed_aspects(grid, config.crop_aspect_buckets)
        elif config.crop_aspect == "closest":
            aspects = native_aspects(grid, spec.native_sizes)
    _check_limits(config, grid, report)
    _check_crop(config, aspects, spec, report)
    return BucketRules(grid, spec.largest_side, config, tuple(aspects))


def _check_grid(grid: PixelGrid, spec: FamilySpec, report: Problems) -> None:
    if grid.alignment % spec.size_multiple != 0:
        message = (
            f"{grid.alignment} is not a multiple of {spec.size_multiple} pixels, which "
            f"{spec.name} needs."
        )
        report.error("aspect_bucket_alignment", message)
    if grid.square > spec.largest_side:
        given = (
            f"{grid.resolution:g} {UNITS[grid.resolution_type]} (resolution_type "
            f"{grid.resolution_type})"
        )
        limit = f"the limit of {spec.name}, {spec.largest_side} pixels a side"
        report.error("resolution", f"{given} is above {limit}.")


def _check_limits(config: DatasetConfig, grid: PixelGrid, report: Problems) -> None:
    if config.maximum_image_size:
        _check_maximum(config.maximum_image_size, config, grid, report)
    low = config.minimum_aspect_ratio
    high = config.maximum_aspect_ratio
    if low is not None and high is not None and low > high:
        report.error(
            "minimum_aspect_ratio",
            f"{low:g} is above maximum_aspect_ratio {high:g}: no picture fits.",
        )


def _check_maximum(
    maximum: float, config: DatasetConfig, grid: PixelGrid, report: Problems
) -> None:
    """A maximum needs a target, and a number that is plausible in the unit of the resolution."""
    key = "maximum_image_size"
    if not config.target_downsample_size:
        report.error(
            key,
            f"{maximum:g} needs target_downsample_size, the size that larger pictures are "
            "resized to.",
        )
    unit = grid.resolution_type
    in_megapixels = unit == "area" and maximum >= SUSPICIOUS_AREA
    on_an_edge = unit == "pixel" and maximum < SUSPICIOUS_EDGE
    is_allowed = os.environ.get(UNIT_CHECK_OVERRIDE, "").lower() not in (*FALSE_WORDS, "")
    if (in_megapixels or on_an_edge) and not is_allowed:
        message = f"{maximum:g}: wrong unit? With resolution_type {unit} it is in {UNITS[unit]}."
        report.error(key, f"{message} {UNIT_CHECK_OVERRIDE}=1 allows it.")


def _check_crop(
    config: DatasetConfig, aspects: Sequence[Aspect], spec: FamilySpec, report: Problems
) -> None:
    kind = config.crop_aspect
    where = "crop_aspect_buckets"
    if config.crop_style == "face":
        message = (
            "'face' needs a face detector, which is not included; use center, random or corner."
        )
        report.error("crop_style", message)
    if config.crop and kind in CHOSEN and not aspects and config.crop_aspect_buckets is None:
        report.error(where, f"crop_aspect {kind!r} needs a list of ratios here.")
    for aspect in aspects:
        if max(aspect.size) > spec.largest_side:
            message = (
                f"{aspect.bucket} means {aspect.size}; the limit of {spec.name} is "
                f"{spec.largest_side} a side."
            )
            report.error(where, message)
