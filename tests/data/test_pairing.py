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
    own: dict[str, Any] | None = None,
    **partner: Any,
) -> tuple[list[Dataset], list[Problem]]:
    """An edit dataset, its partners (`partner` are further keys of theirs) and more entries."""
    after, before = roots
    caches = after.parent / "caches"
    context = DataContext(
        DatasetDefaults(resolution=64), KANDINSKY5_IMAGE, task, caches, caches / "text"
    )
    entries = [
        {
            "id": "after",
            "instance_data_dir": str(after),
            "caption_strategy": "filename",
            "conditioning_data": "before",
        }
        | (own or {}),
        {"id": "before", "instance_data_dir": str(before), "dataset_type": "conditioning"}
        | {"conditioning_type": "reference_strict", **partner},
        *more,
    ]
    problems = Problems()
    datasets = build_datasets([DatasetConfig(**entry) for entry in entries], context, problems)
    return datasets, problems


def test_partners_are_found_by_path_and_stem(roots: tuple[Path, Path]) -> None:
    (after, before), problems = build(roots)
    assert not problems
    for sample in after.samples:
        assert sample.partner is not None
        assert sample.partner.dataset_id == "before"
        expected = unicodedata.normalize("NFD", sample.name).replace(".png", ".jpg")
        assert sample.partner.name == expected
        assert sample.partner.path.is_file()
        assert sample.partner.content != sample.content
    assert [sample.name for sample in before.samples] == sorted(before.facts)
    assert (before.config.is_trained, before.id) == (False, "before")


def test_strict_partners_take_over_size_crop_and_bucket(roots: tuple[Path, Path]) -> None:
    (after, _), problems = build(roots, own={"crop": True})
    assert not problems
    for epoch in (1, 2):
        for sample in after.at_epoch(epoch).samples:
            assert sample.partner is not None
            assert sample.partner.geometry == sample.geometry
            assert sample.partner.original_size == (240, 160)


def test_loose_partners_have_the_size_but_their_own_crop(roots: tuple[Path, Path]) -> None:
    (after, _), problems = build(roots, conditioning_type="reference_loose", own={"crop": True})
    assert not problems
    partners = [sample.partner for sample in after.samples]
    assert {partner.geometry.size for partner in partners if partner} == {(64, 64)}
    assert {partner.geometry.crop for partner in partners if partner} == {(16, 0)}


def test_strict_partners_of_another_shape_are_mentioned(roots: tuple[Path, Path]) -> None:
    pictures.photograph(roots[1] / "a.jpg", (100, 100))
    _, problems = build(roots)
    assert [problem.fatal for problem in problems] == [False]
    assert (
        "another ratio than their partners', so stretched: 1 picture of before;"
        in problems[0].message
    )
    _, problems = build(roots, conditioning_type="reference_loose")
    assert not problems


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
    assert after.samples[0].partner is not None
    assert after.samples[0].partner.name == partner


@pytest.mark.parametrize("kind", ["reference_strict", "reference_loose", "mask"])
@pytest.mark.parametrize("names", [["a.bmp", "a.jpg"], ["a.png.bmp", "a.png.jpg"]])
def test_several_partners_of_one_file_are_refused(
    names: list[str], kind: str, roots: tuple[Path, Path]
) -> None:
    for name in names:
        pictures.photograph(roots[1] / name, (240, 160))

    _, problems = build(roots, task="t2i" if kind == "mask" else "i2i", conditioning_type=kind)

    (problem,) = [problem for problem in problems if problem.fatal]
    assert problem.where == "before"
    assert (
        f"more than one partner for 1 file of after: a.png ({', '.join(names)})." in problem.message
    )


def test_a_broken_partner_leaves_the_pair_out(roots: tuple[Path, Path]) -> None:
    (roots[1] / "a.jpg").write_text("broken")
    (after, before), problems = build(roots)
    assert [problem.fatal for problem in problems] == [False]
    assert after.counts() == {"partner unusable": 1}
    assert "its partner a.jpg is not a picture" in after.rejected[0].detail
    assert before.counts() == {"damaged": 1}


def test_partners_without_a_picture_are_listed(roots: tuple[Path, Path]) -> None:
    pictures.photograph(roots[1] / "extra.png", (64, 64))
    (_, before), _ = build(roots)
    assert before.counts() == {"no source picture": 1}


def test_a_partner_may_name_its_source_instead(roots: tuple[Path, Path]) -> None:
    (after, _), problems = build(roots, own={"conditioning_data": None}, source_dataset_id="after")
    assert not problems
    assert all(sample.partner for sample in after.samples)


def test_of_several_partners_one_is_chosen_per_sample(
    roots: tuple[Path, Path], tmp_path: Path
) -> None:
    entry = {
        "id": "other",
        "instance_data_dir": str(roots[1]),
        "conditioning_type": "reference_strict",
    }
    own = {"conditioning_data": ["before", "other"]}
    datasets, problems = build(roots, entry, own=own)
    assert not problems
    assert {sample.partner.dataset_id for sample in datasets[0].samples if sample.partner} == {
        "before",
        "other",
    }


def test_editing_needs_reference_pictures(roots: tuple[Path, Path]) -> None:
    for own, partner in (
        ({"conditioning_data": None}, {}),
        ({}, {"conditioning_type": "controlnet"}),
    ):
        _, problems = build(roots, own=own, **partner)
        (problem,) = [problem for problem in problems if problem.fatal]
        assert problem.where == "after.conditioning_data"
        assert "reference_strict" in problem.message


def test_other_flavours_do_not_use_them(roots: tuple[Path, Path]) -> None:
    datasets, problems = build(roots, task="t2i")
    assert [dataset.id for dataset in datasets] == ["after"]
    assert all(sample.partner is None for sample in datasets[0].samples)
    assert [problem.fatal for problem in problems] == [False]
    assert "cannot use" in problems[0].message


def test_a_conditioning_type_is_required(roots: tuple[Path, Path]) -> None:
    _, problems = build(roots, conditioning_type=None, task="t2i")
    assert any(
        "is required" in problem.message and "conditioning_type" in problem.where
        for problem in problems
    )


def test_a_missing_partner_folder_is_said_once(roots: tuple[Path, Path]) -> None:
    _, problems = build((roots[0], roots[1] / "nowhere"))
    assert [problem.where for problem in problems if problem.fatal] == ["instance_data_dir"]


def test_damage_found_by_decoding_takes_the_pair_out(roots: tuple[Path, Path]) -> None:
    datasets, _ = build(roots)
    failure = ("damaged", "is damaged")
    after, before = without_failures(
        datasets, {("before", "a.jpg"): failure, ("after", "sub/b.png"): failure}
    )
    assert len(after.samples) == 2
    assert after.counts() == {"damaged": 1, "partner unusable": 1}
    assert before.counts() == {"damaged": 1}
