"""From the size and crop keys of a dataset to checked `BucketRules`."""

from __future__ import annotations

import math
import os

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.option import FALSE_WORDS
from simpletuner.data.buckets import Aspect, BucketRules, PixelGrid, listed_aspects, native_aspects
from simpletuner.errors import Problem
from simpletuner.models.spec import FamilySpec

UNIT_CHECK_OVERRIDE = "SIMPLETUNER_MAXIMUM_IMAGE_SIZE_OVERRIDE"
# A maximum this large in megapixels, or this small as an edge in pixels, was probably meant in the other unit.
SUSPICIOUS_AREA, SUSPICIOUS_EDGE = 20, 512


def build_rules(config: DatasetConfig, spec: FamilySpec, problems: list[Problem]) -> BucketRules | None:
    """The rules of a dataset, or None if its resolution is unusable.

    Args:
        config: the entry with its defaults filled in.
        spec: the model family, with the sizes it accepts.
        problems: receives all errors.
    """
    grid = _build_grid(config, spec, problems)
    if grid is None:
        return None
    _check_limits(config, problems)
    _check_crop(config, problems)
    return BucketRules(
        grid=grid,
        largest_side=spec.largest_side,
        crop=config.crop,
        crop_aspect=config.crop_aspect,
        crop_style=config.crop_style if config.crop_style in ("random", "corner") else "center",
        aspects=_build_aspects(config, grid, spec, problems),
        minimum_size=config.minimum_image_size or 0,
        maximum_size=config.maximum_image_size or 0,
        target_size=config.target_downsample_size or 0,
        minimum_ratio=config.minimum_aspect_ratio or 0,
        maximum_ratio=config.maximum_aspect_ratio or math.inf,
        max_upscale=math.inf if config.max_upscale_threshold is None else config.max_upscale_threshold,
    )


def _build_grid(config: DatasetConfig, spec: FamilySpec, problems: list[Problem]) -> PixelGrid | None:
    if config.resolution is None or config.resolution_type is None:
        problems.append(Problem(f"{config.id}.resolution", f"is not set, and {spec.name} has no default for it."))
        return None
    alignment = int(config.aspect_bucket_alignment or spec.size_multiple)
    if alignment % spec.size_multiple:
        message = f"{alignment} is not a multiple of {spec.size_multiple} pixels, which {spec.name} needs."
        problems.append(Problem(f"{config.id}.aspect_bucket_alignment", message))
    grid = PixelGrid(config.resolution, config.resolution_type, alignment, config.aspect_bucket_rounding or 2)
    if grid.square > spec.largest_side:
        unit = {"area": "megapixels", "pixel": "pixels", "pixel_area": "pixels"}[config.resolution_type]
        message = (
            f"{config.resolution:g} {unit} (resolution_type {config.resolution_type}) is above the limit of "
            f"{spec.name}, {spec.largest_side} pixels a side."
        )
        problems.append(Problem(f"{config.id}.resolution", message))
        return None
    return grid


def _check_limits(config: DatasetConfig, problems: list[Problem]) -> None:
    if config.maximum_image_size:
        _check_maximum(config, config.maximum_image_size, problems)
    low, high = config.minimum_aspect_ratio, config.maximum_aspect_ratio
    if low is not None and high is not None and low > high:
        message = f"{low:g} is above maximum_aspect_ratio {high:g}: no picture fits."
        problems.append(Problem(f"{config.id}.minimum_aspect_ratio", message))


def _check_maximum(config: DatasetConfig, maximum: float, problems: list[Problem]) -> None:
    where = f"{config.id}.maximum_image_size"
    if not config.target_downsample_size:
        message = f"{maximum:g} needs target_downsample_size, the size that larger pictures are resized to."
        problems.append(Problem(where, message))
    if os.environ.get(UNIT_CHECK_OVERRIDE, "0").lower() not in (*FALSE_WORDS, ""):
        return
    suspicious = {"area": maximum >= SUSPICIOUS_AREA, "pixel": maximum < SUSPICIOUS_EDGE, "pixel_area": False}
    if config.resolution_type is not None and suspicious[config.resolution_type]:
        unit = "megapixels" if config.resolution_type == "area" else "pixels (an edge)"
        message = (
            f"{maximum:g}: wrong unit? With resolution_type {config.resolution_type} it is in {unit}. "
            f"{UNIT_CHECK_OVERRIDE}=1 allows it."
        )
        problems.append(Problem(where, message))


def _check_crop(config: DatasetConfig, problems: list[Problem]) -> None:
    if config.crop_style == "face":
        message = "'face' needs a face detector, which simpletuner does not include; use center, random or corner."
        problems.append(Problem(f"{config.id}.crop_style", message))
    if not config.crop and config.crop_aspect != "square":
        message = f"{config.crop_aspect!r} has no effect while crop is false."
        problems.append(Problem(f"{config.id}.crop_aspect", message, fatal=False))


def _build_aspects(
    config: DatasetConfig, grid: PixelGrid, spec: FamilySpec, problems: list[Problem]
) -> tuple[Aspect, ...]:
    """The aspects for closest and random; never empty for them unless a problem was added."""
    where = f"{config.id}.crop_aspect_buckets"
    if not config.crop or config.crop_aspect not in ("closest", "random"):
        return ()
    aspects = listed_aspects(grid, config.crop_aspect_buckets or ())
    if not aspects and config.crop_aspect_buckets is None and config.crop_aspect == "closest":
        aspects = native_aspects(grid, spec.native_sizes)
    if not aspects and config.crop_aspect_buckets is None:
        problems.append(Problem(where, f"crop_aspect {config.crop_aspect!r} needs a list of ratios here."))
    for aspect in aspects:
        if max(aspect.size) > spec.largest_side:
            width, height = aspect.size
            message = f"{aspect.bucket} means {width}x{height}; the limit of {spec.name} is {spec.largest_side} a side."
            problems.append(Problem(where, message))
    return tuple(aspects)
