"""Aspect buckets: the training size and crop of a picture, and the checks of their keys.

The arithmetic is documented in the section *Sizes* of the dataset reference. a is
`aspect_bucket_alignment`, R rounds half to even to a multiple of a (at least a), ar is width /
height rounded to `aspect_bucket_rounding` decimals:

    pixel_area  E = R(resolution)                       W = R(E sqrt(ar))   H = R(E / sqrt(ar))
    area        E = R(floor(sqrt(resolution 10^6)))     the same
    pixel       short edge R(resolution)
                long edge R(floor(resolution ar)) if ar >= 1, else R(floor(resolution / ar))
    square      W = H = E, with E = R(resolution) for pixel
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
# A maximum of so many megapixels or more, or a side of fewer pixels, is probably in the wrong unit.
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
    """What `resolution` means: an edge or an area, and the multiple that both sides round to."""

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
        """Pixels of a size in the unit of the resolution, for `area` and `pixel_area`."""
        if self.resolution_type == "area":
            return length * 1e6
        return length**2

    @property
    def square(self) -> int:
        """Edge E of the square."""
        if self.resolution_type == "area":
            # Rounded first: a product just below a square number would lose a whole pixel.
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
        """Relative enlargement of a picture to cover this bucket; negative if it shrinks."""
        return max(self.size[0] / picture[0], self.size[1] / picture[1]) - 1


def listed_aspects(grid: PixelGrid, ratios: Sequence[tuple[float, float]]) -> list[Aspect]:
    """Aspects of a user's list of (ratio, weight)."""
    rounded = [(grid.rounded(ratio), weight) for ratio, weight in ratios]
    return [Aspect(str(ratio), grid.size(ratio), weight) for ratio, weight in rounded]


def native_aspects(grid: PixelGrid, native: Mapping[int, Sequence[Size]]) -> list[Aspect]:
    """The model's native sizes if the grid allows them, else their ratios on the dataset's grid."""
    if not native:
        return []
    edge = grid.resolution
    if grid.resolution_type == "area":
        edge = math.sqrt(grid.resolution * 1e6)
    nearest = min(native, key=lambda native_edge: abs(native_edge - edge))
    is_native = grid.resolution_type != "pixel" and math.isclose(nearest, edge)
    aspects: list[Aspect] = []
    for size in native[nearest]:
        is_on_grid = all(length % grid.alignment == 0 for length in size)
        ratio = grid.ratio(size)
        if not (is_native and is_on_grid):
            size = grid.size(ratio)
        aspects.append(Aspect(str(ratio), size))
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
        has_random_crops = "random" in (self.config.crop_aspect, self.config.crop_style)
        if self.config.crop and has_random_crops:
            return self._place(picture, token)
        if picture not in self._placed:  # pictures of one size share their geometry
            self._placed[picture] = self._place(picture, token)
        return self._placed[picture]

    def _place(self, picture: Size, token: tuple[object, ...]) -> Geometry:
        self._require_within_limits(picture)
        bucket, size = self._bucket(picture, token)
        if max(size) > self.largest_side:
            limit = f"{self.largest_side} pixels per side"
            raise outside_limits(f"needs {size}; the model's limit is {limit}")
        resized = self._resized(picture, size)
        return Geometry(bucket, size, resized, self._position(resized, size, token))

    def follow(self, picture: Size, source: Geometry, *token: object) -> Geometry:
        """Geometry of a partner with other content than its source: its size, cropped by itself."""
        resized = cover(picture, source.size)
        crop = self._position(resized, source.size, token)
        return Geometry(source.bucket, source.size, resized, crop)

    def _require_within_limits(self, picture: Size) -> None:
        smallest = self.config.minimum_image_size or 0
        if smallest and self._is_small(picture, smallest):
            raise outside_limits(f"{picture} is smaller than minimum_image_size {smallest:g}")
        ratio = self.grid.ratio(picture)
        low = self.config.minimum_aspect_ratio
        high = self.config.maximum_aspect_ratio
        limit = None
        if low and ratio < low:
            limit = "minimum_aspect_ratio"
        elif high and ratio > high:
            limit = "maximum_aspect_ratio"
        if limit is not None:
            raise outside_limits(f"{picture} has the ratio {ratio:g}, outside {limit}")

    def _is_small(self, picture: Size, smallest: float) -> bool:
        if self.grid.resolution_type == "pixel":
            return min(picture) < smallest
        least = self.grid.area(smallest)
        if picture.width * picture.height < least:
            return True
        # A square crop uses only the short side of a long picture, whatever the area.
        is_square = self.config.crop and self.config.crop_aspect == "square"
        return is_square and min(picture) < math.sqrt(least)

    def _bucket(self, picture: Size, token: tuple[object, ...]) -> tuple[str, Size]:
        if self.config.crop and self.config.crop_aspect == "square":
            return "1.0", Size(self.grid.square, self.grid.square)
        if self.config.crop and self.config.crop_aspect in CHOSEN:
            aspect = self._choose_aspect(picture, token)
            return aspect.bucket, aspect.size
        ratio = self.grid.ratio(picture)
        return str(ratio), self.grid.size(ratio)

    def _choose_aspect(self, picture: Size, token: tuple[object, ...]) -> Aspect:
        """The aspect of the list that is closest to the picture, or one drawn by weight."""
        most = self.config.max_upscale_threshold
        allowed = [
            aspect for aspect in self.aspects if most is None or aspect.enlargement(picture) <= most
        ]
        if not allowed:
            least = min(aspect.enlargement(picture) for aspect in self.aspects)
            message = f"would be enlarged by {least:.0%}, more than max_upscale_threshold {most:g}"
            raise outside_limits(f"{picture} {message}")
        if self.config.crop_aspect == "closest":
            return min(allowed, key=lambda aspect: _log_distance(aspect.size, picture))
        # A weighted draw. `min` guards against a product that rounds up to the sum of all weights.
        ends = list(accumulate(aspect.weight for aspect in allowed))
        index = bisect(ends, fraction(*token, "aspect") * ends[-1])
        return allowed[min(index, len(allowed) - 1)]

    def _resized(self, picture: Size, size: Size) -> Size:
        """The size that covers the bucket, or the target size of a picture above the maximum."""
        covering = cover(picture, size)
        largest = self.config.maximum_image_size or 0
        target = self.config.target_downsample_size or 0
        if not self.config.crop or not largest:
            return covering
        # In pixels, the maximum measures the long edge and the target the short one.
        if self.grid.resolution_type == "pixel":
            is_large = max(picture) > largest
            scale = target / min(picture)
        else:
            area = picture.width * picture.height
            is_large = area > self.grid.area(largest)
            scale = math.sqrt(self.grid.area(target) / area)
        smaller = Size(round(picture.width * scale), round(picture.height * scale))
        # A target too small to cover the bucket is ignored.
        covers = smaller.width >= covering.width and smaller.height >= covering.height
        if is_large and scale < 1 and covers:
            return smaller
        return covering

    def _position(self, resized: Size, size: Size, token: tuple[object, ...]) -> tuple[int, int]:
        """Left and top of the crop in the resized picture."""
        width, height = size
        spare_x = resized.width - width
        spare_y = resized.height - height
        style = self.config.crop_style if self.config.crop else "center"
        if style == "corner":
            return 0, 0
        if style == "random":
            # `+ 1` includes the position at the far edge.
            left = int(fraction(*token, "x") * (spare_x + 1))
            top = int(fraction(*token, "y") * (spare_y + 1))
            return left, top
        return spare_x // 2, spare_y // 2


def _log_distance(size: Size, picture: Size) -> float:
    """Distance of two ratios in log space, which treats wide and tall alike and crops the least."""
    width, height = size
    return abs(math.log(width / height) - math.log(picture.width / picture.height))


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
        resolution=config.resolution,
        resolution_type=config.resolution_type,
        alignment=alignment,
        rounding=config.aspect_bucket_rounding or 2,
    )
    _check_grid(grid, spec, report)
    # Every bucket has a side at least as long as the square's, so no picture could be placed.
    if grid.square > spec.largest_side:
        return None
    aspects = _aspects_of(config, grid, spec)
    _check_limit_keys(config, grid, report)
    _check_crop(config, aspects, spec, report)
    return BucketRules(grid, spec.largest_side, config, tuple(aspects))


def _aspects_of(config: DatasetConfig, grid: PixelGrid, spec: FamilySpec) -> list[Aspect]:
    """The aspects that an entry chooses from: those of its list, or the model's own."""
    if not config.crop or config.crop_aspect not in CHOSEN:
        return []
    if config.crop_aspect_buckets is not None:
        return listed_aspects(grid, config.crop_aspect_buckets)
    if config.crop_aspect == "closest":
        return native_aspects(grid, spec.native_sizes)
    return []


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
        limit = f"the limit of {spec.name}, {spec.largest_side} pixels per side"
        report.error("resolution", f"{given} is above {limit}.")


def _check_limit_keys(config: DatasetConfig, grid: PixelGrid, report: Problems) -> None:
    if config.maximum_image_size:
        _check_maximum(config.maximum_image_size, config, grid, report)
    low = config.minimum_aspect_ratio
    high = config.maximum_aspect_ratio
    if low is not None and high is not None and low > high:
        message = f"{low:g} is above maximum_aspect_ratio {high:g}: no picture fits."
        report.error("minimum_aspect_ratio", message)


def _check_maximum(
    maximum: float, config: DatasetConfig, grid: PixelGrid, report: Problems
) -> None:
    """A maximum needs a target, and a number that is plausible in the unit of the resolution."""
    key = "maximum_image_size"
    if not config.target_downsample_size:
        message = "needs target_downsample_size, the size that larger pictures are resized to."
        report.error(key, f"{maximum:g} {message}")
    unit = grid.resolution_type
    is_suspicious = (unit == "area" and maximum >= SUSPICIOUS_AREA) or (
        unit == "pixel" and maximum < SUSPICIOUS_EDGE
    )
    is_allowed = os.environ.get(UNIT_CHECK_OVERRIDE, "").lower() not in (*FALSE_WORDS, "")
    if is_suspicious and not is_allowed:
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
                f"{spec.largest_side} pixels per side."
            )
            report.error(where, message)
