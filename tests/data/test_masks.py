"""Masks: where they are white after crop and bucket, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.video.frame import VideoFrame
from PIL import Image

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import DatasetDefaults
from simpletuner.data import masks
from simpletuner.data.build import build_datasets
from simpletuner.data.dataset import Dataset
from simpletuner.data.entries import DataContext
from simpletuner.data.masks import latent_mask
from simpletuner.data.pictures import decode, fit
from simpletuner.data.sample import Sample
from simpletuner.errors import Problem, Problems
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE, KANDINSKY5_VIDEO
from simpletuner.models.spec import Task
from tests.tools.clips import write_clip
from tests.tools.pictures import BROKEN

SIZE = (96, 64)
SQUARE = (37, 18, 61, 42)  # left, top, right, bottom
RED = (200, 0, 0)
CORNER = {"crop": True, "crop_style": "corner"}  # 64x64 of the file's own pixels
CLIP_RULES = {"num_frames": 5, "min_frames": 5, "frame_rate": 8}


def paint(
    path: Path, box: Sequence[int] = SQUARE, *, size: tuple[int, int] = SIZE, colour: Any = "white"
) -> None:
    """A black picture with a coloured box."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size)
    picture.paste(colour, tuple(box))
    picture.save(path)


def film(path: Path, shares: Sequence[float], rate: int = 8) -> None:
    """A clip without loss, each frame white from the left up to a share of its width."""
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = SIZE
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width = width
        stream.height = height
        stream.pix_fmt = "bgr0"
        for share in shares:
            pixels = np.zeros((height, width, 3), dtype=np.uint8)
            pixels[:, : round(share * width)] = 255
            frame = VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="bgr0")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def build(
    folder: Path, kind: str = "mask", task: Task = "t2i", *more: dict[str, Any], **keys: Any
) -> tuple[list[Dataset], list[Problem]]:
    """The dataset below `files`, with further keys, the masks below `masks`, and more entries."""
    spec = KANDINSKY5_IMAGE if task == "t2i" else KANDINSKY5_VIDEO
    files = {
        "id": "files",
        "instance_data_dir": str(folder / "files"),
        "caption_strategy": "filename",
        **keys,
    }
    if spec.media == "video":
        files |= {"dataset_type": "video", "video": CLIP_RULES}
    masks = {
        "id": "masks",
        "instance_data_dir": str(folder / "masks"),
        "dataset_type": "conditioning",
        "conditioning_type": kind,
        "source_dataset_id": "files",
    }
    context = DataContext(
        defaults=DatasetDefaults(resolution=64),
        spec=spec,
        task=task,
        latent_root=folder / "caches",
        text_root=folder / "caches" / "text",
        frame_rate=8 if spec.media == "video" else None,
    )
    problems = Problems()
    configs = [DatasetConfig(**entry) for entry in (files, masks, *more)]
    return build_datasets(configs, context, problems), problems


def fatal(problems: list[Problem]) -> list[str]:
    """The messages of errors."""
    return [problem.message for problem in problems if problem.fatal]


def weights_of(sample: Sample, frames: int = 1) -> np.ndarray:
    """The mask of a sample in latent positions, `F H W`."""
    assert sample.mask is not None
    width, height = sample.geometry.size
    return latent_mask(sample.mask, (frames, height // 8, width // 8))[0]


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("style", ["random", "center", "corner"])
def test_white_positions_cover_exactly_the_square(tmp_path: Path, style: str, scale: int) -> None:
    """Whatever the crop of the picture, in every epoch; the mask may have another resolution."""
    width, height = SIZE
    square = [scale * edge for edge in SQUARE]
    paint(tmp_path / "files" / "a.png", colour=RED)
    paint(tmp_path / "masks" / "a.png", square, size=(scale * width, scale * height))

    (files, _), problems = build(tmp_path, crop=True, crop_style=style)

    assert problems == []

    crops = set()
    for epoch in range(1, 6):
        (sample,) = files.at_epoch(epoch).samples
        assert sample.geometry.size == (64, 64)
        red = fit(decode(sample.path), sample.geometry)[..., 0] == RED[0]
        # 8 x 8 latent positions of 8 x 8 pixels.
        share_of_red = red.reshape(8, 8, 8, 8).mean(axis=(1, 3))
        assert np.array_equal(weights_of(sample)[0], share_of_red)
        crops.add(sample.geometry.crop)

    assert (len(crops) > 1) == (style == "random")


@pytest.mark.parametrize(("kind", "weight"), [("mask", 0.1), ("segmentation", 1.0)])
def test_grey_areas_are_learned_in_proportion_or_entirely_and_transparent_ones_not_at_all(
    kind: str, weight: float, tmp_path: Path
) -> None:
    paint(tmp_path / "files" / "a.png")
    mask = Image.new("RGBA", SIZE, (255, 255, 255, 0))
    # A grey of 51 / 255 = 0.2 in one half of the first latent position.
    mask.paste((51, 51, 51, 255), (0, 0, 4, 8))
    (tmp_path / "masks").mkdir()
    mask.save(tmp_path / "masks" / "a.png")

    (files, _), problems = build(tmp_path, kind, **CORNER)

    assert not fatal(problems)

    weights = weights_of(files.samples[0])
    assert weights[0, 0, 0] == pytest.approx(weight)
    assert weights.sum() == weights[0, 0, 0]


def test_masks_that_are_almost_black_are_a_warning(tmp_path: Path) -> None:
    paint(tmp_path / "files" / "a.png")
    paint(tmp_path / "masks" / "a.png", (0, 0, 2, 3))  # 6 of 64 x 64 pixels, 0.15 %

    _, (problem,) = build(tmp_path, **CORNER)

    assert not problem.fatal
    assert "only 0.15% of masks is white on average" in problem.message


def test_clips_are_averaged_over_the_frames_of_each_latent(tmp_path: Path) -> None:
    shares = [1.0, 0.0, 0.5, 0.5, 1.0]
    write_clip(tmp_path / "files" / "a.mp4", seconds=1, rate=8)
    film(tmp_path / "masks" / "a.mkv", [*shares, 0, 0, 0])

    (files, masks), problems = build(tmp_path, task="t2v", **CORNER)

    assert not fatal(problems)

    (weights,) = [weights_of(sample, frames=2) for sample in files.samples]
    assert weights.shape == (2, 8, 8)
    assert np.array_equal(weights[0], np.ones((8, 8)))
    # Frames 1 to 4: 3 of 4 are white up to 48 of the 64 pixels that are used, 1 of 4 beyond.
    assert np.array_equal(weights[1], np.repeat([[0.75] * 6 + [0.25] * 2], 8, axis=0))
    assert [(mask.name, mask.frames) for mask in masks.samples] == [("a.mkv", 5)]


def test_a_picture_masks_all_frames_of_a_clip(tmp_path: Path) -> None:
    write_clip(tmp_path / "files" / "b.mp4", seconds=1, rate=8)
    paint(tmp_path / "masks" / "b.png")

    (files, masks), problems = build(tmp_path, task="t2v", **CORNER)

    assert not fatal(problems)

    (weights,) = [weights_of(sample, frames=2) for sample in files.samples]
    assert np.array_equal(weights[0], weights[1])
    assert [(mask.name, mask.frames) for mask in masks.samples] == [("b.png", 1)]


def test_a_picture_may_have_a_source_and_a_mask(tmp_path: Path) -> None:
    for folder in ("files", "masks", "before"):
        paint(tmp_path / folder / "a.png")
    context = DataContext(
        defaults=DatasetDefaults(resolution=64),
        spec=KANDINSKY5_IMAGE,
        task="i2i",
        latent_root=tmp_path / "caches",
        text_root=tmp_path / "caches" / "text",
    )
    files = DatasetConfig(
        id="files",
        instance_data_dir=str(tmp_path / "files"),
        conditioning_data=["before", "masks"],
    )
    before = DatasetConfig(
        id="before",
        instance_data_dir=str(tmp_path / "before"),
        conditioning_type="reference_strict",
    )
    masks = DatasetConfig(
        id="masks", instance_data_dir=str(tmp_path / "masks"), conditioning_type="mask"
    )
    problems = Problems()

    dataset, *_ = build_datasets([files, before, masks], context, problems)

    assert not fatal(problems)

    (sample,) = dataset.samples
    assert sample.partner is not None
    assert sample.partner.dataset_id == "before"
    assert sample.mask is not None
    assert sample.mask.dataset_id == "masks"


def test_all_problems_of_masks_are_reported_at_once(tmp_path: Path) -> None:
    for name in ("fine", "lonely", "wide", "dark", "broken"):
        paint(tmp_path / "files" / f"{name}.png")
    for name in ("fine", "idle"):
        paint(tmp_path / "masks" / f"{name}.png")
    paint(tmp_path / "masks" / "wide.png", size=(96, 48))
    paint(tmp_path / "masks" / "dark.png", colour="black")
    BROKEN["damaged.png"](tmp_path / "masks" / "broken.png")

    _, problems = build(tmp_path)

    errors = " ".join(fatal(problems))
    assert "no partner of the same path and name in masks" in errors
    assert "wide.png is 96x48 and wide.png 96x64, another ratio" in errors
    assert "black wherever it is trained, so nothing is learned: 1 mask, dark.png" in errors

    warnings = " ".join(problem.message for problem in problems if not problem.fatal)
    assert "1 damaged (broken.png); 1 no source picture (idle.png)" in warnings


def test_masks_of_clips_have_their_length(tmp_path: Path) -> None:
    for name in ("long", "dark", "fine"):
        write_clip(tmp_path / "files" / f"{name}.mp4", seconds=1, rate=8)
    film(tmp_path / "masks" / "long.mkv", [1.0] * 9)
    film(tmp_path / "masks" / "dark.mkv", [1.0] + [0.0] * 7)
    film(tmp_path / "masks" / "fine.mkv", [1.0] * 4, rate=4)

    _, problems = build(tmp_path, task="i2v")

    black, misfit = sorted(fatal(problems), reverse=True)
    assert (
        "1 mask does not fit the files of files: long.mkv has 9 frames at 8 fps and long.mp4 8."
        in misfit
    )
    assert "black, frame 0 aside, wherever it is trained, so nothing is learned" in black
    assert "1 mask, dark.mkv" in black


def test_a_picture_is_not_masked_by_a_clip(tmp_path: Path) -> None:
    write_clip(tmp_path / "files" / "a.mp4", seconds=1, rate=8)
    paint(tmp_path / "pictures" / "b.png")
    film(tmp_path / "masks" / "b.mkv", [1.0] * 8)
    paint(tmp_path / "masks" / "a.png")
    pictures = {
        "id": "pictures",
        "instance_data_dir": str(tmp_path / "pictures"),
        "conditioning_data": "masks",
    }

    _, problems = build(tmp_path, "mask", "t2v", pictures)

    assert fatal(problems) == [
        "1 mask does not fit the files of pictures: b.mkv has 8 frames at 8 fps and b.png 1."
    ]


def test_a_picture_has_one_dataset_of_masks(tmp_path: Path) -> None:
    paint(tmp_path / "files" / "a.png")
    paint(tmp_path / "masks" / "a.png")
    second = {
        "id": "more",
        "instance_data_dir": str(tmp_path / "masks"),
        "conditioning_type": "mask",
        "source_dataset_id": "files",
    }

    _, problems = build(tmp_path, "mask", "t2i", second)

    assert "names several datasets of masks (masks, more)" in " ".join(fatal(problems))


def test_masks_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "files" / "a.png")
    paint(tmp_path / "masks" / "a.png", (0, 0, 48, 64))
    (files, measured), _ = build(tmp_path)
    measured.save_index()

    def refuse(*arguments: object) -> None:
        raise AssertionError("the mask is read again")

    monkeypatch.setattr(masks, "latent_mask", refuse)
    (rebuilt, _), _ = build(tmp_path)

    assert files.white_shares == {"a.png": 0.5}
    assert rebuilt.white_shares == {"a.png": 0.5}
    with pytest.raises(AssertionError, match="again"):
        build(tmp_path, crop=True)  # the share of another area


def test_only_masks_of_samples_have_a_white_share(tmp_path: Path) -> None:
    paint(tmp_path / "files" / "a.png")
    paint(tmp_path / "masks" / "a.png")
    (files, _), _ = build(tmp_path)

    assert replace(files, samples=()).white_shares == {}
