"""Pairs of pictures: which partner belongs to a file, and what is wrong with it."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import DatasetDefaults
from simpletuner.data.build import build_datasets
from simpletuner.data.dataset import Dataset, without_failures
from simpletuner.data.entries import DataContext
from simpletuner.data.sample import Sample
from simpletuner.errors import Problem, Problems
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.spec import Task
from tests.tools import pictures

NAMES = ("a", "sub/b", "लाल घर", "café")


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Pictures, and their sources of another type, another size and in another Unicode form."""
    for number, name in enumerate(NAMES):
        pictures.photograph(tmp_path / "after" / f"{name}.png", (120, 80), seed=number)
        partner = unicodedata.normalize("NFD", name)
        pictures.photograph(tmp_path / "before" / f"{partner}.jpg", (240, 160), seed=number)
    return tmp_path / "after", tmp_path / "before"


def build(
    roots: tuple[Path, Path],
    *more: dict[str, Any],
    task: Task = "i2i",
    keys: dict[str, Any] | None = None,
    **partner_keys: Any,
) -> tuple[list[Dataset], list[Problem]]:
    """An edit dataset with further keys, its partners with further keys, and more entries."""
    after_root, before_root = roots
    caches = after_root.parent / "caches"
    context = DataContext(
        defaults=DatasetDefaults(resolution=64),
        spec=KANDINSKY5_IMAGE,
        task=task,
        latent_root=caches,
        text_root=caches / "text",
    )
    after = {
        "id": "after",
        "instance_data_dir": str(after_root),
        "caption_strategy": "filename",
        "conditioning_data": "before",
        **(keys or {}),
    }
    before = {
        "id": "before",
        "instance_data_dir": str(before_root),
        "dataset_type": "conditioning",
        "conditioning_type": "reference_strict",
        **partner_keys,
    }
    problems = Problems()
    configs = [DatasetConfig(**entry) for entry in (after, before, *more)]
    return build_datasets(configs, context, problems), problems


def partners_of(dataset: Dataset) -> list[Sample]:
    """The partner of every sample."""
    partners = [sample.partner for sample in dataset.samples if sample.partner]
    assert len(partners) == len(dataset.samples)
    return partners


def test_partners_are_found_by_path_and_stem(roots: tuple[Path, Path]) -> None:
    (after, before), problems = build(roots)

    assert not problems
    for sample, partner in zip(after.samples, partners_of(after), strict=True):
        assert partner.dataset_id == "before"
        assert partner.name == unicodedata.normalize("NFD", sample.name).replace(".png", ".jpg")
        assert partner.path.is_file()
        assert partner.content != sample.content
    assert before.id == "before"
    assert not before.config.is_trained
    assert [sample.name for sample in before.samples] == sorted(before.facts)


@pytest.mark.parametrize("epoch", [1, 2])
def test_strict_partners_take_over_size_crop_and_bucket(
    epoch: int, roots: tuple[Path, Path]
) -> None:
    (dataset, _), problems = build(roots, keys={"crop": True})

    assert not problems

    dataset = dataset.at_epoch(epoch)
    for sample, partner in zip(dataset.samples, partners_of(dataset), strict=True):
        assert partner.geometry == sample.geometry
        assert partner.original_size == (240, 160)


def test_loose_partners_have_the_size_of_their_source_and_another_crop(
    roots: tuple[Path, Path],
) -> None:
    (after, _), problems = build(roots, conditioning_type="reference_loose", keys={"crop": True})

    assert not problems

    geometries = [partner.geometry for partner in partners_of(after)]
    assert {geometry.size for geometry in geometries} == {(64, 64)}
    # 240 x 160 covers 64 x 64 at 96 x 64; (96 - 64) / 2 = 16.
    assert {geometry.crop for geometry in geometries} == {(16, 0)}


def test_strict_partners_of_another_ratio_are_a_warning(roots: tuple[Path, Path]) -> None:
    pictures.photograph(roots[1] / "a.jpg", (100, 100))

    _, (problem,) = build(roots)
    _, problems_of_loose_ones = build(roots, conditioning_type="reference_loose")

    assert not problem.fatal

    message = "another ratio than their partners', so stretched: 1 picture of before;"
    assert message in problem.message
    assert not problems_of_loose_ones


def test_missing_partners_are_one_problem_with_their_names(roots: tuple[Path, Path]) -> None:
    for number in range(14):
        pictures.photograph(roots[0] / f"lonely_{number:02}.png", (120, 80))

    _, problems = build(roots)

    (problem,) = [problem for problem in problems if problem.fatal]

    assert problem.where == "after"
    assert "for 14 of 18 pictures: " in problem.message
    assert "lonely_00.png" in problem.message
    assert "and 4 more" in problem.message


@pytest.mark.parametrize(
    ("names", "partner"),
    [
        (["a.bmp", "a.png"], "a.png"),  # the same name
        (["a.bmp", "a.png.jpg"], "a.png.jpg"),  # the whole name, and an extension
        (["a.png", "a.png.bmp"], "a.png"),
        (["a.bmp"], "a.bmp"),
    ],
)
def test_the_exact_name_wins_over_another_extension(
    names: list[str], partner: str, roots: tuple[Path, Path], tmp_path: Path
) -> None:
    (roots[1] / "a.jpg").unlink()
    for name in names:
        pictures.photograph(roots[1] / name, (240, 160))

    (after, _), problems = build(roots)

    assert not problems
    assert partners_of(after)[0].name == partner


@pytest.mark.parametrize("kind", ["reference_strict", "reference_loose", "mask"])
@pytest.mark.parametrize("names", [["a.bmp", "a.jpg"], ["a.png.bmp", "a.png.jpg"]])
def test_several_partners_of_one_file_are_refused(
    names: list[str], kind: str, roots: tuple[Path, Path]
) -> None:
    for name in names:
        pictures.photograph(roots[1] / name, (240, 160))

    task: Task = "t2i" if kind == "mask" else "i2i"
    _, problems = build(roots, task=task, conditioning_type=kind)

    (problem,) = [problem for problem in problems if problem.fatal]
    candidates = ", ".join(names)

    assert problem.where == "before"
    assert f"more than one partner for 1 file of after: a.png ({candidates})." in problem.message


def test_a_broken_partner_leaves_the_pair_out(roots: tuple[Path, Path]) -> None:
    (roots[1] / "a.jpg").write_text("broken")

    (after, before), (problem,) = build(roots)

    assert not problem.fatal
    assert after.counts() == {"partner unusable": 1}
    assert "its partner a.jpg is not a picture" in after.rejected[0].detail
    assert before.counts() == {"damaged": 1}


def test_partners_without_a_picture_are_listed(roots: tuple[Path, Path]) -> None:
    pictures.photograph(roots[1] / "extra.png", (64, 64))

    (_, before), _ = build(roots)

    assert before.counts() == {"no source picture": 1}


def test_a_partner_may_name_its_source_instead(roots: tuple[Path, Path]) -> None:
    keys = {"conditioning_data": None}

    (after, _), problems = build(roots, keys=keys, source_dataset_id="after")

    assert not problems
    assert partners_of(after)


def test_each_sample_has_a_partner_of_one_of_several_datasets(roots: tuple[Path, Path]) -> None:
    second = {
        "id": "second",
        "instance_data_dir": str(roots[1]),
        "conditioning_type": "reference_strict",
    }

    datasets, problems = build(roots, second, keys={"conditioning_data": ["before", "second"]})

    assert not problems
    assert {partner.dataset_id for partner in partners_of(datasets[0])} == {"before", "second"}


@pytest.mark.parametrize(
    ("keys", "partner_keys"),
    [({"conditioning_data": None}, {}), ({}, {"conditioning_type": "controlnet"})],
)
def test_editing_needs_reference_pictures(
    keys: dict[str, Any], partner_keys: dict[str, Any], roots: tuple[Path, Path]
) -> None:
    _, problems = build(roots, keys=keys, **partner_keys)

    (problem,) = [problem for problem in problems if problem.fatal]
    assert problem.where == "after.conditioning_data"
    assert "reference_strict" in problem.message


def test_flavours_without_references_leave_them_out_with_a_warning(
    roots: tuple[Path, Path],
) -> None:
    (dataset,), (problem,) = build(roots, task="t2i")

    assert dataset.id == "after"
    assert all(sample.partner is None for sample in dataset.samples)
    assert not problem.fatal
    assert "cannot use" in problem.message


def test_a_conditioning_type_is_required(roots: tuple[Path, Path]) -> None:
    _, problems = build(roots, conditioning_type=None, task="t2i")

    messages = {problem.where: problem.message for problem in problems}
    assert "is required" in messages["before.conditioning_type"]


def test_a_missing_folder_of_partners_is_reported_once(roots: tuple[Path, Path]) -> None:
    _, problems = build((roots[0], roots[1] / "nowhere"))

    assert [problem.where for problem in problems if problem.fatal] == ["instance_data_dir"]


def test_damage_found_by_decoding_takes_the_pair_out(roots: tuple[Path, Path]) -> None:
    datasets, _ = build(roots)
    failure = ("damaged", "is damaged")
    failures = {("before", "a.jpg"): failure, ("after", "sub/b.png"): failure}

    after, before = without_failures(datasets, failures)

    assert len(after.samples) == 2
    assert after.counts() == {"damaged": 1, "partner unusable": 1}
    assert before.counts() == {"damaged": 1}
