"""Buckets: sizes, crops and limits of pictures, and the checks of their keys."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.types import Size
from simpletuner.data.buckets import (
    Aspect,
    BucketRules,
    Geometry,
    PixelGrid,
    ResolutionType,
    cover,
    listed_aspects,
    native_aspects,
)
from simpletuner.data.files import LeftOutError
from simpletuner.models.kandinsky5.spec import IMAGE_SIZES

ALIGNMENTS = (16, 32, 64, 128)
# The table of the dataset reference: resolution, ratios, then one column per alignment.
TABLE = [
    (
        480,
        (1.0, 1.78, 0.56),
        "480×480 · 640×352 · 352×640",
        "480×480 · 640×352 · 352×640",
        "512×512 · 704×384 · 384×704",
        "512×512 · 640×384 · 384×640",
    ),
    (
        512,
        (1.0, 1.33, 1.78),
        "512×512 · 592×448 · 688×384",
        "512×512 · 576×448 · 672×384",
        "512×512 · 576×448 · 704×384",
        "512×512 · 640×384 · 640×384",
    ),
    (
        1024,
        (1.0, 1.5, 1.78),
        "1024×1024 · 1248×832 · 1360×768",
        "1024×1024 · 1248×832 · 1376×768",
        "1024×1024 · 1280×832 · 1344×768",
        "1024×1024 · 1280×896 · 1408×768",
    ),
]
# The same table for `pixel`: picture, then one column per alignment.
PIXEL_TABLE = [
    ((1920, 1080), "1824×1024", "1824×1024", "1792×1024", "1792×1024"),
    ((1080, 1920), "1024×1824", "1024×1824", "1024×1856", "1024×1792"),
]


def sizes(cell: str) -> list[tuple[int, ...]]:
    """The sizes in a cell of the table."""
    return [tuple(int(side) for side in size.split("×")) for size in cell.split(" · ")]


def make_rules(
    resolution: float = 1024, kind: ResolutionType = "pixel_area", alignment: int = 16, **keys: Any
) -> BucketRules:
    """Rules of an entry with more keys, and with `aspects`, which are not read from it."""
    aspects: Any = keys.pop("aspects", ())
    config = DatasetConfig(**{"id": "set", "crop_style": "center", **keys})
    return BucketRules(PixelGrid(resolution, kind, alignment), 2048, config, aspects)


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("column", range(4))
def test_sizes_by_area_are_those_of_the_reference(row: tuple, column: int) -> None:
    resolution, ratios, *cells = row
    grid = PixelGrid(resolution, "pixel_area", ALIGNMENTS[column])

    assert [grid.size(ratio) for ratio in ratios] == sizes(cells[column])


@pytest.mark.parametrize("row", PIXEL_TABLE)
@pytest.mark.parametrize("column", range(4))
def test_sizes_by_edge_are_those_of_the_reference(row: tuple, column: int) -> None:
    picture, *cells = row
    rules = make_rules(1024, "pixel", ALIGNMENTS[column])

    assert [rules.place(Size(*picture)).size] == sizes(cells[column])


def test_areas_are_megapixels() -> None:
    assert PixelGrid(1.048576, "area", 16).size(1.5) == PixelGrid(1024, "pixel_area", 16).size(1.5)
    assert PixelGrid(0.25, "area", 16).square == 496  # 500 / 16 = 31.25
    assert PixelGrid(1.0, "area", 16).square == 992  # 1000 / 16 = 62.5: half to even


def test_sides_are_rounded_half_to_even_and_to_at_least_one_step() -> None:
    grid = PixelGrid(1024, "pixel_area", 16)
    assert [grid.snap(length) for length in (8, 24, 40, 56, 0.1)] == [16, 32, 32, 64, 16]


def test_ratios_are_rounded_and_never_zero() -> None:
    grid = PixelGrid(1024, "pixel_area", 16)
    assert grid.ratio((1920, 1080)) == 1.78
    assert grid.ratio((1080, 1920)) == 0.56
    assert grid.ratio((1, 5000)) == 0.01
    assert PixelGrid(1024, "pixel_area", 16, rounding=1).ratio((1920, 1080)) == 1.8


@pytest.mark.parametrize("kind", ["pixel", "pixel_area"])
def test_a_square_crop_is_taken_from_the_centre(kind: ResolutionType) -> None:
    rules = make_rules(1000, kind, 64, crop=True)

    geometry = rules.place(Size(1920, 1080))

    # 1000 rounds to 1024 on the grid of 64; (1820 - 1024) / 2 = 398.
    assert geometry == Geometry("1.0", Size(1024, 1024), Size(1820, 1024), (398, 0))


def test_without_crop_the_overhang_is_trimmed_from_the_centre() -> None:
    geometry = make_rules(crop_style="corner").place(Size(451, 300))

    # 1.5 on the grid of 16 is 1248 x 832; 451 x 300 covers it at 1251 x 832.
    assert geometry == Geometry("1.5", Size(1248, 832), Size(1251, 832), (1, 0))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"crop": True},
        {"crop": True, "crop_aspect": "preserve", "crop_style": "random"},
        {"crop": True, "crop_aspect": "closest"},
    ],
)
def test_every_picture_covers_its_bucket(keys: dict[str, Any]) -> None:
    rules = make_rules(aspects=tuple(native_aspects(NATIVE_GRID, NATIVE)), **keys)
    for width, height in itertools.product(range(600, 2100, 171), range(600, 2100, 173)):
        geometry = rules.place(Size(width, height), "token", width, height)

        left, top = geometry.crop
        bucket_width, bucket_height = geometry.size
        resized_width, resized_height = geometry.resized
        assert bucket_width % 16 == 0
        assert bucket_height % 16 == 0
        assert 0 <= left <= resized_width - bucket_width
        assert 0 <= top <= resized_height - bucket_height
        assert bucket_width == resized_width or bucket_height == resized_height
        assert abs(resized_width / resized_height / (width / height) - 1) < 0.005


def test_a_covering_size_touches_one_side_of_its_bucket() -> None:
    assert cover((100, 50), (10, 10)) == (20, 10)
    assert cover((50, 100), (10, 10)) == (10, 20)
    assert cover((100, 100), (10, 10)) == (10, 10)
    assert cover((3, 1000), (16, 16)) == (16, 5333)


@pytest.mark.parametrize(("style", "crop"), [("center", (512, 0)), ("corner", (0, 0))])
def test_fixed_crops_are_where_their_style_says(style: str, crop: tuple[int, int]) -> None:
    rules = make_rules(crop=True, crop_style=style)
    assert rules.place(Size(2048, 1024), "name").crop == crop


def test_random_positions_depend_on_the_token_alone() -> None:
    rules = make_rules(crop=True, crop_style="random")

    def positions() -> list[int]:
        # 2048 - 1024 = 1024 is the last position.
        return [rules.place(Size(2048, 1024), "id", number).crop[0] for number in range(400)]

    drawn = positions()

    assert drawn == positions()
    assert len(set(drawn)) > 250
    assert abs(sum(drawn) / 400 - 512) < 60
    assert min(drawn) < 30
    assert max(drawn) > 994


NATIVE = {1024: IMAGE_SIZES}
NATIVE_GRID = PixelGrid(1024, "pixel_area", 16)


def test_closest_has_the_native_sizes_at_their_resolution() -> None:
    aspects = native_aspects(NATIVE_GRID, NATIVE)

    assert [aspect.size for aspect in aspects] == list(IMAGE_SIZES)
    assert [aspect.bucket for aspect in aspects[:4]] == ["1.0", "0.45", "2.2", "0.6"]


@pytest.mark.parametrize(
    ("picture", "size"),
    [
        ((1920, 1080), (1280, 768)),
        ((1000, 1001), (1024, 1024)),
        ((3000, 4000), (896, 1152)),
        ((5000, 1000), (1408, 640)),
    ],
)
def test_closest_crops_the_least(picture: tuple[int, int], size: tuple[int, int]) -> None:
    aspects = tuple(native_aspects(NATIVE_GRID, NATIVE))
    rules = make_rules(crop=True, crop_aspect="closest", aspects=aspects)

    assert rules.place(Size(*picture)).size == size


def test_native_ratios_are_placed_on_the_grid_at_other_resolutions() -> None:
    by_area = PixelGrid(512, "pixel_area", 16)
    by_edge = PixelGrid(1024, "pixel", 16)

    assert [aspect.size for aspect in native_aspects(by_area, NATIVE)][:2] == [
        (512, 512),
        by_area.size(0.45),
    ]
    assert native_aspects(by_edge, NATIVE)[1].size == by_edge.size(0.45)


def test_native_sizes_are_used_for_the_same_area_in_megapixels() -> None:
    # 1024 x 1024 = 1,048,576
    aspects = native_aspects(PixelGrid(1.048576, "area", 16), NATIVE)
    assert aspects[1].size == (640, 1408)


def test_native_sizes_are_those_of_the_nearest_resolution() -> None:
    native = {512: ((512, 512), (512, 768)), **NATIVE}
    aspects = native_aspects(PixelGrid(512, "pixel", 16), native)

    assert [aspect.size for aspect in aspects] == [(512, 512), (512, 768)]


def test_a_model_without_native_sizes_has_no_aspects() -> None:
    assert native_aspects(NATIVE_GRID, {}) == []


def test_random_aspects_follow_their_weights() -> None:
    aspects = listed_aspects(NATIVE_GRID, [(1.0, 0.7), (1.5, 0.3), (0.5, 0.0)])
    rules = make_rules(crop=True, crop_aspect="random", aspects=tuple(aspects))
    drawn = [rules.place(Size(1000, 1000), "id", number).bucket for number in range(1000)]

    assert set(drawn) == {"1.0", "1.5"}
    assert abs(drawn.count("1.0") / 1000 - 0.7) < 0.05


def test_max_upscale_leaves_large_buckets_out() -> None:
    aspects = (Aspect("1.0", (1024, 1024)), Aspect("0.5", (720, 1440)), Aspect("2.0", (1440, 720)))
    rules = make_rules(crop=True, crop_aspect="closest", aspects=aspects, max_upscale_threshold=0.1)

    assert rules.place(Size(1000, 1000)).bucket == "1.0"
    assert rules.place(Size(1400, 1100)).bucket == "1.0"
    with pytest.raises(LeftOutError, match="max_upscale_threshold"):
        rules.place(Size(500, 500))


@pytest.mark.parametrize(
    ("kind", "minimum", "crop", "kept", "left_out"),
    [
        ("pixel", 480, False, (480, 480), (480, 479)),
        ("pixel_area", 480, False, (960, 240), (960, 239)),
        ("pixel_area", 480, True, (480, 480), (960, 479)),
        ("area", 0.25, False, (1000, 250), (1000, 249)),
        ("area", 0.25, True, (500, 500), (1000, 499)),
        ("pixel_area", 0, True, (2, 2), None),
    ],
)
def test_pictures_below_the_minimum_size_are_left_out(
    kind: ResolutionType,
    minimum: float,
    crop: bool,
    kept: tuple[int, int],
    left_out: tuple[int, int] | None,
) -> None:
    resolution = 1 if kind == "area" else 512
    rules = make_rules(resolution, kind, crop=crop, minimum_image_size=minimum)

    rules.place(Size(*kept))
    if left_out:
        with pytest.raises(LeftOutError, match="minimum_image_size"):
            rules.place(Size(*left_out))


def test_pictures_outside_the_limits_of_ratios_are_left_out() -> None:
    rules = make_rules(minimum_aspect_ratio=0.56, maximum_aspect_ratio=1.78)

    rules.place(Size(1920, 1080))
    rules.place(Size(1080, 1920))

    for picture in ((2000, 1000), (1000, 2000)):
        with pytest.raises(LeftOutError, match="aspect_ratio"):
            rules.place(Size(*picture))


def test_a_side_beyond_the_model_is_left_out() -> None:
    with pytest.raises(LeftOutError, match="2048"):
        make_rules().place(Size(5000, 1000))


@pytest.mark.parametrize(
    ("kind", "resolution", "maximum", "target", "picture", "resized"),
    [
        ("pixel", 512, 2048, 768, (4096, 3072), (1024, 768)),
        ("pixel", 512, 2048, 768, (2048, 1536), (683, 512)),  # not above the maximum: just covers
        ("pixel_area", 512, 1024, 768, (2000, 2000), (768, 768)),
        ("area", 0.262144, 1.0, 0.589824, (2000, 2000), (768, 768)),
        # A target below the bucket still covers it.
        ("pixel_area", 512, 1024, 256, (2000, 2000), (512, 512)),
    ],
)
def test_larger_pictures_are_resized_to_the_target_first(
    kind: ResolutionType,
    resolution: float,
    maximum: float,
    target: float,
    picture: tuple[int, int],
    resized: tuple[int, int],
) -> None:
    keys = {"maximum_image_size": maximum, "target_downsample_size": target}

    cropped = make_rules(resolution, kind, crop=True, **keys).place(Size(*picture))
    uncropped = make_rules(resolution, kind, crop=False, **keys).place(Size(*picture))

    assert cropped.size == (512, 512)
    assert cropped.resized == resized
    assert uncropped.resized == cover(Size(*picture), uncropped.size)


def test_partners_that_follow_have_the_size_of_their_source() -> None:
    source = make_rules(crop=True).place(Size(1000, 800))

    geometry = make_rules().follow(Size(300, 900), source)

    # 300 x 900 covers 1024 x 1024 at 1024 x 3072; (3072 - 1024) / 2 = 1024.
    assert geometry == Geometry("1.0", Size(1024, 1024), Size(1024, 3072), (0, 1024))


def test_limits_are_off_by_default() -> None:
    assert make_rules().place(Size(1, 1)).size == (1024, 1024)
    assert make_rules(crop=True).place(Size(9000, 1)).size == (1024, 1024)
