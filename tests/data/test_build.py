from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageFile

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import DatasetDefaults
from simpletuner.data.build import build_datasets
from simpletuner.data.dataset import Dataset, ledger_rows, without_failures
from simpletuner.data.entries import DataContext
from simpletuner.data.file_index import INDEX_NAME
from simpletuner.errors import Problem, Problems
from simpletuner.models.spec import Task
from tests.tools import pictures

Build = Callable[..., tuple[list[Dataset], list[Problem]]]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six photographs of three shapes with captions."""
    root = tmp_path / "photos"
    for number in range(6):
        path = root / f"sub {number % 2}" / f"photo_{number}.png"
        pictures.photograph(path, [(90, 60), (64, 64), (60, 90)][number % 3], seed=number)
        path.with_suffix(".txt").write_text(
            f"photo number {number}\nanother caption", encoding="utf-8"
        )
    return root


def build(
    context: DataContext, *entries: dict[str, Any], **changes: Any
) -> tuple[list[Dataset], list[Problem]]:
    """Datasets and problems of entries; `changes` are for the run-wide defaults or for the
    context.
    """
    defaults = {key: value for key, value in changes.items() if key in DatasetDefaults.model_fields}
    others = {key: value for key, value in changes.items() if key not in defaults}
    context = replace(context, defaults=context.defaults.model_copy(update=defaults), **others)
    problems = Problems()
    configs = [
        DatasetConfig(**{"id": f"set{number}", **entry}) for number, entry in enumerate(entries)
    ]
    return build_datasets(configs, context, problems), problems


def fatal(problems: list[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.fatal]


def folder(root: Path, **more: Any) -> dict[str, Any]:
    return {"instance_data_dir": str(root), "caption_strategy": "textfile", **more}


def test_a_folder_becomes_samples(context: DataContext, photos: Path) -> None:
    (dataset,), problems = build(context, folder(photos))
    assert not problems
    assert [sample.name for sample in dataset.samples][:2] == [
        "sub 0/photo_0.png",
        "sub 0/photo_2.png",
    ]
    sample = dataset.samples[0]
    assert sample.full_name == "set0/sub 0/photo_0.png"
    assert sample.captions == ("photo number 0", "another caption")
    assert (sample.original_size, sample.geometry.bucket, sample.geometry.size) == (
        (90, 60),
        "1.5",
        (80, 48),
    )
    assert len(sample.content) == 64
    assert {label: len(samples) for label, samples in dataset.buckets.items()} == {
        "0.67": 2,
        "1.0": 2,
        "1.5": 2,
    }
    assert dataset.latent_dir == context.latent_root / "set0"
    assert (dataset.batch_size, dataset.repeats, dataset.config.crop_style) == (1, 0, "random")


def test_every_file_is_used_or_listed_with_its_reason(context: DataContext, photos: Path) -> None:
    pictures.write_all(photos / "broken", pictures.BROKEN)
    (photos / "notes.md").write_text("x")
    (photos / "sub 0" / "photo_0.txt").unlink()
    pictures.photograph(photos / "long.png", (3000, 20))
    (photos / "long.txt").write_text("long")
    (dataset,), problems = build(context, folder(photos, maximum_aspect_ratio=10))
    ledger = dataset.ledger()
    files = sorted(
        path.relative_to(photos).as_posix() for path in photos.rglob("*") if path.is_file()
    )
    captions = [name for name in files if name.endswith(".txt")]
    assert sorted(entry.name for entry in ledger) == sorted(set(files) - set(captions))
    uses = {entry.name: entry.use for entry in ledger}
    assert uses["sub 0/photo_0.png"] == "has no caption file 'photo_0.txt' beside it"
    assert uses["broken/empty.png"] == "is empty"
    assert "maximum_aspect_ratio" in uses["long.png"]
    assert all(bool(entry.use) == (entry.geometry is None) for entry in ledger)
    assert dataset.sizes() == Counter(entry.trained_size for entry in ledger if entry.geometry)
    unused_first = sorted(ledger, key=lambda entry: not entry.use)
    assert ledger_rows([dataset], 16) == unused_first[:16]
    assert not any(entry.use for entry in unused_first[-2:])
    assert dataset.counts()["damaged"] == len(pictures.BROKEN)
    assert not fatal(problems)
    assert "14 files are left out" in str(problems[0])
    assert problems[0].kind == "captions"


def test_captions_beside_pictures_that_nobody_asked_for_are_mentioned(
    context: DataContext, photos: Path
) -> None:
    (dataset,), problems = build(context, {"instance_data_dir": str(photos)})
    assert dataset.samples[0].captions == ("photo 0",)
    assert "caption_strategy to textfile" in str(problems[0])
    assert dataset.counts() == {"unused caption": 6}


def test_unread_formats_give_one_warning_with_a_remedy(context: DataContext, photos: Path) -> None:
    for name in (
        "one.jxl",
        "two.CR3",
        "three.mxf",
        "four.mp4",
        "sub 0/photo_0.dng",
        "sub 1/photo_1.mov",
    ):
        (photos / name).write_bytes(b"")

    (dataset,), (problem,) = build(context, folder(photos))

    assert len(dataset.samples) == 6
    assert problem.message.startswith(
        "4 files are left out: 1 clip among pictures (four.mp4); 3 unread format ("
    )
    assert "Save such pictures as .png or .jpg, and such clips as .mp4." in problem.message
    assert "Clips are trained by a video model" in problem.message


def test_a_folder_of_unread_formats_says_what_to_do(context: DataContext, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.cr2").write_bytes(b"")

    _, problems = build(context, folder(tmp_path / "raw"))

    (problem,) = fatal(problems)
    assert (
        "a.cr2 is a picture in a format that is not read (.cr2); save it as .png or .jpg"
        in problem.message
    )


@pytest.mark.parametrize(("suffix", "kind"), [(".jfif", "JPEG"), (".jpe", "JPEG"), (".mpo", "MPO")])
def test_other_names_of_jpeg_files_are_read(
    suffix: str, kind: str, context: DataContext, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    views = [Image.new("RGB", (64, 48), colour) for colour in ("red", "blue")]
    more = {"save_all": True, "append_images": views[1:]} if kind == "MPO" else {}
    views[0].save(tmp_path / "photos" / f"a{suffix}", kind, **more)

    (dataset,), problems = build(context, {"instance_data_dir": str(tmp_path / "photos")})

    assert not problems
    red, green, blue = next(dataset.samples[0].images()).getpixel((32, 24))
    assert red > 200 > 100 > max(green, blue)


@pytest.mark.parametrize(
    ("entry", "where", "words"),
    [
        (
            {"dataset_type": "video"},
            "dataset_type",
            "set model_family kandinsky5-video or sanavideo",
        ),
        ({"instance_data_dir": None}, "instance_data_dir", "required"),
        ({"caption_strategy": "instanceprompt"}, "caption_strategy", "needs instance_prompt"),
        ({"prepend_instance_prompt": True}, "prepend_instance_prompt", "needs instance_prompt"),
        ({"only_instance_prompt": True}, "only_instance_prompt", "needs instance_prompt"),
        ({"caption_strategy": "parquet"}, "caption_strategy", "metadata_backend parquet"),
        ({"caption_strategy": "csv"}, "caption_strategy", "type csv"),
        ({"caption_strategy": "metadata"}, "caption_strategy", "contains neither"),
        (
            {"caption_strategy": "instanceprompt", "instance_prompt": " "},
            "caption_strategy",
            "needs instance_prompt",
        ),
        (
            {"only_instance_prompt": True, "instance_prompt": ["zkt", ""]},
            "instance_prompt",
            "text 2 of 2 is blank",
        ),
        (
            {"prepend_instance_prompt": True, "instance_prompt": ["\t", "a"]},
            "instance_prompt",
            "text 1 of 2 is blank",
        ),
        ({"metadata_backend": "parquet"}, "metadata_backend", "the object parquet"),
        ({"crop_style": "face"}, "crop_style", "face detector"),
        ({"crop": True, "crop_aspect": "random"}, "crop_aspect_buckets", "needs a list"),
        (
            {
                "crop": True,
                "crop_aspect": "closest",
                "resolution": 1024,
                "crop_aspect_buckets": [9],
            },
            "crop_aspect_buckets",
            "is 2048 pixels per side",
        ),
        ({"resolution": 4096}, "resolution", "2048"),
        ({"resolution": 1024, "resolution_type": "area"}, "resolution", "megapixels"),
        ({"aspect_bucket_alignment": "8"}, "aspect_bucket_alignment", "16 pixels"),
        ({"maximum_image_size": 1024}, "maximum_image_size", "target_downsample_size"),
        (
            {
                "maximum_image_size": 25,
                "target_downsample_size": 1,
                "resolution_type": "area",
                "resolution": 0.1,
            },
            "maximum_image_size",
            "wrong unit",
        ),
        (
            {"maximum_image_size": 4, "target_downsample_size": 2, "resolution_type": "pixel"},
            "maximum_image_size",
            "wrong unit",
        ),
        (
            {"minimum_aspect_ratio": 2, "maximum_aspect_ratio": 1},
            "minimum_aspect_ratio",
            "no picture fits",
        ),
        ({"end_epoch": 2, "start_epoch": 3}, "end_epoch", "before"),
        ({"end_step": 2, "start_step": 3}, "end_step", "before"),
        ({"conditioning": {"type": "canny"}}, "conditioning", "not available yet"),
        ({"caption_filter_list": ["x"]}, "caption_filter_list", "text_embeds"),
        ({"skip_file_discovery": ["everything"]}, "skip_file_discovery", "vae"),
    ],
)
def test_bad_entries(
    context: DataContext, photos: Path, entry: dict[str, Any], where: str, words: str
) -> None:
    _, problems = build(context, folder(photos, id="a.b"), folder(photos, **entry))
    found = {problem.where: problem.message for problem in fatal(problems)}
    assert words in found[f"set1.{where}"]


def test_the_unit_check_can_be_lifted(
    context: DataContext, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMPLETUNER_MAXIMUM_IMAGE_SIZE_OVERRIDE", "1")
    entry = folder(
        photos, maximum_image_size=40, target_downsample_size=32, resolution_type="pixel", crop=True
    )
    (dataset,), problems = build(context, entry)
    assert not problems
    assert dataset.samples[0].geometry.resized == (96, 64)


def test_missing_folders_are_one_problem(context: DataContext, photos: Path) -> None:
    _, problems = build(
        context, folder(photos), folder(photos / "x"), folder(photos / "y", id="other")
    )
    (problem,) = fatal(problems)
    assert "set1: " in problem.message
    assert "other: " in problem.message
    assert problem.to_json()["entries"] == ["set1", "other"]


def test_problems_of_several_entries_come_together(
    context: DataContext, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for path in photos.rglob("*.txt"):
        path.unlink()
    _, problems = build(
        context,
        folder(photos),
        folder(tmp_path / "empty"),
        folder(tmp_path / "gone"),
        folder(photos, crop_style="face"),
    )
    assert {problem.where for problem in fatal(problems)} == {
        "set0",
        "set1",
        "instance_data_dir",
        "set3.crop_style",
    }
    assert {problem.where: problem.kind for problem in fatal(problems)}["set0"] == "captions"
    messages = {problem.where: problem.message for problem in problems}
    assert messages["set0"].startswith("no samples detected in dataset set0")
    assert "6 no caption" in messages["set0"]
    assert "the folder is empty" in messages["set1"]


def test_latent_folders_belong_to_one_dataset(
    context: DataContext, photos: Path, tmp_path: Path
) -> None:
    shared = str(tmp_path / "cache")
    text = {"dataset_type": "text_embeds", "cache_dir": shared, "default": True}
    _, problems = build(
        context,
        folder(photos, cache_dir_vae=shared),
        folder(photos, cache_dir_vae=shared + "/../cache"),
        text,
    )
    messages = " ".join(problem.message for problem in fatal(problems))
    assert "several datasets: set0, set1" in messages
    assert "is a text cache" in messages


def test_ids_stay_inside_the_cache_folder(context: DataContext, photos: Path) -> None:
    (dataset,), _ = build(context, folder(photos, id="../../x"))
    assert dataset.latent_dir.parent == context.latent_root


def test_image_embeds_name_the_latent_folder(
    context: DataContext, photos: Path, tmp_path: Path
) -> None:
    cache = {"id": "cache", "dataset_type": "image_embeds", "cache_dir": str(tmp_path / "mine")}
    (dataset,), problems = build(context, folder(photos, image_embeds="cache"), cache)
    assert not problems
    assert dataset.latent_dir == tmp_path / "mine"


@pytest.mark.parametrize(
    ("entry", "changes", "repeats"),
    [
        ({}, {"train_batch_size": 7}, 1),
        ({"repeats": 1}, {"train_batch_size": 13}, 2),
        ({}, {"train_batch_size": 2, "gradient_accumulation_steps": 2, "num_processes": 4}, 2),
        ({"train_batch_size": 19}, {}, 3),
    ],
)
def test_too_few_samples_say_which_repeats_would_do(
    context: DataContext, photos: Path, entry: dict[str, Any], changes: dict[str, int], repeats: int
) -> None:
    _, problems = build(context, folder(photos, **entry), **changes)
    (problem,) = fatal(problems)
    assert "no samples detected in dataset set0" in problem.message
    assert problem.message.endswith(f"repeats {repeats} would work.")
    _, problems = build(context, folder(photos, **{**entry, "repeats": repeats}), **changes)
    assert not fatal(problems)


def test_oversubscription_raises_only_repeats_that_were_left_open(
    context: DataContext, photos: Path
) -> None:
    allowed = {"train_batch_size": 7, "allow_dataset_oversubscription": True}
    (dataset,), problems = build(context, folder(photos), **allowed)
    assert dataset.repeats == 1
    assert not fatal(problems)
    _, problems = build(context, folder(photos, repeats=0), **allowed)
    assert fatal(problems)


@pytest.mark.parametrize(("batch", "processes", "repeats"), [(3, 1, 1), (1, 5, 2)])
def test_small_buckets_are_filled_with_a_warning(
    context: DataContext, photos: Path, batch: int, processes: int, repeats: int
) -> None:
    counts = {"train_batch_size": batch, "num_processes": processes}
    _, problems = build(context, folder(photos), **counts)
    assert not fatal(problems)
    assert f"0.67 (2), 1.0 (2), 1.5 (2). repeats {repeats} would fill them." in str(problems[0])
    _, problems = build(context, folder(photos, repeats=repeats), **counts)
    assert "filled" not in "".join(map(str, problems))
    _, problems = build(context, folder(photos), train_batch_size=7, disable_bucket_pruning=True)
    assert not fatal(problems)


def test_start_and_probability(context: DataContext, photos: Path) -> None:
    _, problems = build(context, folder(photos, start_epoch=2), folder(photos, start_step=5))
    assert "no dataset takes part at the start" in str(fatal(problems)[0])
    _, problems = build(context, folder(photos, probability=0))
    assert "nothing would be trained on" in str(fatal(problems)[0])
    _, problems = build(context, folder(photos, start_epoch=2), folder(photos))
    assert not problems


def test_files_are_left_out_by_a_list_in_their_folder(context: DataContext, photos: Path) -> None:
    name = "sub 0/photo_0.png"
    (photos / "exclude.json").write_text(json.dumps([name]))
    (dataset,), problems = build(context, folder(photos))
    assert not problems, "that was asked for"
    assert (len(dataset.samples), name in dataset.facts) == (5, False)
    assert {entry.use for entry in dataset.ledger() if entry.name == name} == {
        "is left out by exclude.json"
    }
    (photos / "mine.json").write_text(json.dumps(["sub 1/photo_9.png"]))
    (dataset,), (problem,) = build(context, folder(photos, exclude_files="mine.json"))
    assert len(dataset.samples) == 6
    assert (problem.where, problem.fatal) == ("set0.exclude_files", False)
    assert "not in the folder: sub 1/photo_9.png. Did you mean 'sub 1/photo_" in problem.message
    (photos / "exclude.json").write_text("[]")  # all were taken back
    assert len(build(context, folder(photos))[0][0].samples) == 6


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "a JSON list of file names"), ("{}", "a JSON list"), ("[", "not valid JSON")],
)
def test_a_list_that_cannot_be_used_is_an_error(
    content: str, message: str, context: DataContext, photos: Path
) -> None:
    (photos / "exclude.json").write_text(content)
    _, problems = build(context, folder(photos))
    assert [(problem.where, message in problem.message) for problem in fatal(problems)] == [
        ("set0.exclude_files", True)
    ]
    _, problems = build(context, folder(photos, exclude_files="x" * 300))
    assert "cannot be read: File name too long" in problems[0].message
    _, problems = build(context, folder(photos, exclude_files="a\0b"))
    assert "cannot be read: embedded null byte" in problems[0].message
    _, problems = build(context, folder(photos, exclude_files="none.json"))
    assert ["none.json" in problem.message for problem in fatal(problems)] == [True], (
        "a list that was named must exist"
    )
    _, problems = build(context, folder(photos, exclude_files="../exclude.json"))
    assert ["must be the name of a file" in problem.message for problem in fatal(problems)] == [
        True
    ]


def test_max_num_samples_is_a_fixed_subset(context: DataContext, photos: Path) -> None:
    (dataset,), problems = build(context, folder(photos, max_num_samples=4))
    names = [sample.name for sample in dataset.samples]
    assert (len(names), names) == (4, sorted(names))
    assert not problems
    assert dataset.counts()["not chosen"] == 2
    (fewer,), _ = build(context, folder(photos, max_num_samples=3))
    assert {sample.name for sample in fewer.samples} < set(names)


def test_held_out_samples_become_an_eval_set(context: DataContext, photos: Path) -> None:
    (dataset, held), problems = build(context, folder(photos, hold_out=2))
    assert not fatal(problems)
    assert (len(dataset.samples), dataset.counts()["held out"]) == (4, 2)
    assert (held.id, held.config.is_trained, held.batch_size) == (
        f"{dataset.id}-held-out",
        False,
        1,
    )
    names = [{sample.name for sample in each.samples} for each in (dataset, held)]
    assert not set.intersection(*names)
    assert held.latent_dir != dataset.latent_dir
    assert {sample.dataset_id for sample in held.samples} == {held.id}
    # The same ones every time, and one more keeps those that were held out.
    (_, again), _ = build(context, folder(photos, hold_out=3))
    assert names[1] < {sample.name for sample in again.samples}
    _, problems = build(context, folder(photos, hold_out=6))
    assert "hold_out: 6 of 6 samples would leave nothing to train on." in str(fatal(problems)[0])
    _, problems = build(context, folder(photos), folder(photos, dataset_type="eval", hold_out=1))
    assert "hold_out: needs a dataset that is trained." in str(fatal(problems)[0])


@pytest.fixture
def twins(tmp_path: Path) -> Path:
    """Three pictures in two formats each, as phones store them, and two in one."""
    root = tmp_path / "phone"
    for number in range(5):
        path = root / f"{number}.png"
        pictures.photograph(path, (64, 64), seed=number)
        path.with_suffix(".txt").write_text("a photo")
        if number < 3:
            Image.open(path).save(path.with_suffix(".JPG"))
    return root


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_a_picture_in_two_formats_is_never_both_held_out_and_trained(
    count: int, context: DataContext, twins: Path
) -> None:
    (dataset, held), problems = build(context, folder(twins, hold_out=count))

    assert not fatal(problems)
    trained_stems, held_stems = (
        {Path(sample.name).stem for sample in each.samples} for each in (dataset, held)
    )
    assert not trained_stems & held_stems
    assert len(held.samples) in (count, count + 1)


def test_a_single_picture_in_two_formats_cannot_be_held_out(
    context: DataContext, twins: Path
) -> None:
    for path in twins.glob("[1-4].*"):
        path.unlink()
    _, problems = build(context, folder(twins, hold_out=1))
    assert "hold_out: files of the same name are held out together" in str(fatal(problems)[0])


def test_pictures_in_two_formats_are_named(context: DataContext, twins: Path) -> None:
    pictures.photograph(twins / "4.webp", (90, 64))  # another picture, as its shape shows
    _, (problem,) = build(context, folder(twins))
    pairs = ", ".join(f"{number}.JPG and {number}.png" for number in range(3))
    assert str(problem).endswith(
        f"files that differ only in their extension: {pairs}. "
        "If they show the same, it is trained twice as often: list one of each in exclude.json."
    )
    Path(twins / "exclude.json").write_text(json.dumps([f"{number}.JPG" for number in range(3)]))
    assert not build(context, folder(twins))[1]


def test_a_dataset_without_usable_files_says_why_for_the_commonest_reason(
    context: DataContext, photos: Path
) -> None:
    pictures.write_all(photos / "a broken one", {"cut.png": pictures.BROKEN["cut.png"]})
    for path in photos.rglob("*.txt"):
        path.unlink()
    _, problems = build(context, folder(photos))
    assert "For instance sub 0/photo_0.png has no caption file" in fatal(problems)[0].message


def test_eval_sets_have_batch_one_and_are_not_counted(context: DataContext, photos: Path) -> None:
    datasets, problems = build(
        context, folder(photos), folder(photos, dataset_type="eval"), train_batch_size=6
    )
    assert not fatal(problems)
    assert (datasets[1].batch_size, datasets[1].config.is_trained) == (1, False)


def test_only_pictures_to_evaluate_are_nothing_to_train(context: DataContext, photos: Path) -> None:
    _, problems = build(context, folder(photos, dataset_type="eval"))
    assert "no entry is a dataset to train on" in str(fatal(problems)[0])


def test_random_crops_move_each_epoch_and_only_then(context: DataContext, photos: Path) -> None:
    (moving,), _ = build(context, folder(photos, crop=True))
    (fixed,), _ = build(context, folder(photos, crop=True, vae_cache_clear_each_epoch=False))
    (centred,), _ = build(context, folder(photos, crop=True, crop_style="center"))
    assert moving.changes_each_epoch
    assert [sample.geometry for sample in moving.at_epoch(2).samples] != [
        s.geometry for s in moving.samples
    ]
    assert moving.at_epoch(2).at_epoch(1) == moving
    assert moving.at_epoch(2) == moving.at_epoch(3).at_epoch(2)
    for dataset in (fixed, centred):
        assert dataset.at_epoch(7) is dataset
    (seeded,), _ = build(context, folder(photos, crop=True), seed=5)
    assert seeded.samples != moving.samples


def test_random_aspects_change_buckets_each_epoch(context: DataContext, photos: Path) -> None:
    entry = folder(photos, crop=True, crop_aspect="random", crop_aspect_buckets=[0.5, 1.0, 2.0])
    (dataset,), problems = build(context, entry)
    assert not fatal(problems)
    assert {
        sample.geometry.bucket
        for epoch in range(1, 9)
        for sample in dataset.at_epoch(epoch).samples
    } == {
        "0.5",
        "1.0",
        "2.0",
    }


def test_captions_pass_through_filters_and_shuffling(context: DataContext, photos: Path) -> None:
    text = {
        "id": "text",
        "dataset_type": "text_embeds",
        "caption_filter_list": ["s/photo number/number/", "another"],
    }
    entry = folder(
        photos,
        caption_shuffle={
            "enable": True,
            "split_on": "space",
            "count": 1,
            "include_original": False,
        },
    )
    (dataset,), problems = build(context, entry, text)
    assert not problems
    assert sorted(dataset.samples[0].captions[0].split()) == ["0", "number"]
    assert dataset.samples[0].captions[1] == "caption"


def test_a_second_start_reads_no_file(
    context: DataContext, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "bad.png").write_text("bad")
    (first,), _ = build(context, folder(photos))
    assert not (first.latent_dir / INDEX_NAME).exists()
    first.save_index()
    (photos / "added.png").write_bytes((photos / "sub 0" / "photo_0.png").read_bytes())
    (photos / "added.txt").write_text("added")
    os.utime(photos / "sub 0" / "photo_2.png", ns=(1, 1))
    read: list[str] = []
    original = Path.open

    def spy(self: Path, *args: Any, **kwargs: Any) -> Any:
        read.append(self.name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", spy)
    (second,), _ = build(context, folder(photos))
    assert {name for name in read if name.endswith(".png")} == {"added.png", "photo_2.png"}
    assert set(first.samples) < set(second.samples)
    assert second.counts()["damaged"] == 1


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1, "root": "/", "files": {"a": {}}}']
)
def test_a_damaged_index_is_ignored(context: DataContext, photos: Path, content: str) -> None:
    (first,), _ = build(context, folder(photos))
    first.latent_dir.mkdir(parents=True)
    (first.latent_dir / INDEX_NAME).write_text(content)
    (second,), problems = build(context, folder(photos))
    assert second.samples == first.samples
    assert not problems


def test_files_that_went_are_listed_or_used_from_the_caches(
    context: DataContext, photos: Path
) -> None:
    (first,), _ = build(context, folder(photos))
    first.save_index()
    gone = photos / "sub 0" / "photo_0.png"
    gone.unlink()
    gone.with_suffix(".txt").unlink()
    (second,), problems = build(context, folder(photos))
    assert second.counts() == {"gone": 1}
    assert "1 gone" in str(problems[0])
    (third,), problems = build(context, folder(photos), ignore_missing_files=True)
    assert third.samples == first.samples
    assert not problems
    for path in sorted(photos.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    photos.rmdir()
    (fourth,), problems = build(context, folder(photos), ignore_missing_files=True)
    assert fourth.samples == first.samples
    assert not problems


def test_a_kept_list_does_not_see_added_files(context: DataContext, photos: Path) -> None:
    (first,), _ = build(context, folder(photos))
    first.save_index()
    pictures.photograph(photos / "new.png", (64, 64))
    (photos / "new.txt").write_text("new")
    (kept,), problems = build(context, folder(photos, preserve_data_backend_cache=True))
    assert (kept.samples, problems) == (first.samples, [])
    assert kept.counts()["not chosen"] == 1


def test_damage_found_later_is_remembered(context: DataContext, photos: Path) -> None:
    (dataset,), _ = build(context, folder(photos))
    less = dataset.without({"sub 0/photo_0.png": "is damaged: broken data"})
    assert len(less.samples) == 5
    less.save_index()
    (again,), _ = build(context, folder(photos))
    assert again.samples == less.samples
    assert {file.detail for file in again.rejected} == {"is damaged: broken data"}


def test_a_held_out_file_that_turns_out_damaged_is_replaced(
    context: DataContext, photos: Path
) -> None:
    datasets, _ = build(context, folder(photos, hold_out=2))
    damaged = datasets[1].samples[0].name
    reduced = without_failures(
        datasets, {(datasets[1].id, damaged): ("damaged", "is damaged: broken data")}
    )
    assert [(len(each.samples), each.counts()["damaged"]) for each in reduced] == [(4, 0), (1, 1)]
    for each in reduced:
        each.save_index()
    (dataset, held), _ = build(context, folder(photos, hold_out=2))
    assert (len(dataset.samples), dataset.counts()["damaged"], len(held.samples)) == (3, 1, 2)
    assert damaged not in {sample.name for sample in (*dataset.samples, *held.samples)}


def test_unreadable_files_are_reported_and_tried_again(context: DataContext, photos: Path) -> None:
    (photos / "dangling.png").symlink_to(photos / "nowhere.png")
    (dataset,), problems = build(context, folder(photos))
    assert dataset.counts() == {"unreadable": 1}
    assert not fatal(problems)
    dataset.save_index()
    assert "dangling.png" not in json.loads((dataset.latent_dir / INDEX_NAME).read_text())["files"]


def test_a_table_decides_which_files_take_part(
    context: DataContext, photos: Path, tmp_path: Path
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "filename": ["photo_0.png", "photo_1.png", "lost.png"],
        "caption": ["zero", "one", "lost"],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    entry = {
        "instance_data_dir": str(photos),
        "metadata_backend": "parquet",
        "caption_strategy": "parquet",
        "parquet": {"path": str(tmp_path / "t.parquet")},
    }
    (dataset,), problems = build(context, entry)
    assert [sample.captions for sample in dataset.samples] == [("zero",), ("one",)]
    assert dataset.counts()["not in the table"] == 4
    assert any("lost.png" in problem.message for problem in problems)
    entry["parquet"] = {"path": str(tmp_path / "t.parquet"), "caption_column": "text"}
    _, problems = build(context, entry)
    assert [problem.where for problem in fatal(problems)] == ["set0.parquet.caption_column"]


def test_no_picture_is_decoded_for_the_plan(
    context: DataContext, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding takes most of the time that a picture takes."""
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda picture: pytest.fail(f"{picture} was decoded")
    )
    (dataset,), _ = build(
        context, {"instance_data_dir": str(photos), "caption_strategy": "filename"}
    )
    assert dataset.samples


@pytest.mark.parametrize("task", ["t2i", "i2i"])
def test_the_guides_entry_works(context: DataContext, photos: Path, task: Task) -> None:
    entry = folder(
        photos, resolution=1024, crop=True, crop_aspect="square", repeats=10, id="my-image-dataset"
    )
    text = {
        "id": "text-embeds",
        "dataset_type": "text_embeds",
        "default": True,
        "cache_dir": "cache/text/kandinsky5",
    }
    (dataset,), problems = build(context, entry, text, task=task)
    missing = [] if task == "t2i" else ["my-image-dataset.conditioning_data"]
    assert [problem.where for problem in problems if problem.fatal] == missing
    assert {sample.geometry.size for sample in dataset.samples} == {(1024, 1024)}


def test_real_photographs_are_all_usable(context: DataContext) -> None:
    skimage = pytest.importorskip("skimage")
    root = Path(skimage.__file__).parent / "data"
    (dataset,), problems = build(
        context,
        {"instance_data_dir": str(root), "caption_strategy": "filename", "resolution": 1024},
    )
    assert not fatal(problems)
    assert len(dataset.samples) >= 20
    for sample in dataset.samples:
        with Image.open(sample.path) as picture:
            assert picture.size == sample.original_size


def test_the_data_room_needs_no_torch() -> None:
    modules = "build, buckets, captions, dataset, discovery, files, masks, pictures, sampler"
    code = f"import sys; from simpletuner.data import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_output_folder_inside_a_dataset_is_refused(context: DataContext, photos: Path) -> None:
    _, problems = build(context, folder(photos), output_dir=photos / "runs" / "output")
    assert [problem.where for problem in fatal(problems)] == ["set0.instance_data_dir"]
    assert "previews would be trained" in fatal(problems)[0].message


def test_enlarged_pictures_are_counted_with_the_key_that_changes_it(
    context: DataContext, tmp_path: Path
) -> None:
    for number, size in enumerate([(300, 200), (600, 400), (1500, 1000)]):
        pictures.photograph(tmp_path / "p" / f"{number}.png", size)
    _, problems = build(
        context, folder(tmp_path / "p", caption_strategy="filename"), resolution=1024
    )
    (told,) = [problem for problem in problems if problem.where == "set0.resolution"]
    assert not told.fatal
    assert "2 of 3 files enlarged" in told.message
    assert "0.png the most, from 300x200 to 12" in told.message
    assert "minimum_image_size" in told.message


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_end|>", "<eos>", "<start_of_turn>"])
def test_control_tokens_in_captions_are_refused_by_file(
    context: DataContext, photos: Path, token: str
) -> None:
    (photos / "sub 0" / "photo_0.txt").write_text(f"a photo {token} of a cat")
    (dataset,), problems = build(context, folder(photos))
    (left_out,) = dataset.rejected
    assert (left_out.name, left_out.reason) == ("sub 0/photo_0.png", "no caption")
    assert token in left_out.detail
    assert any("photo_0.png" in problem.message for problem in problems)


def test_angle_brackets_are_text(context: DataContext, photos: Path) -> None:
    (photos / "sub 0" / "photo_0.txt").write_text("a <red> square | <lora> a < b > c")
    (dataset,), _ = build(context, folder(photos))
    assert not dataset.rejected


def test_without_their_annex_remote_datasets_are_refused(context: DataContext) -> None:
    _, problems = build(context, {"type": "huggingface", "dataset_name": "owner/pictures"})
    assert "set0.type" in [problem.where for problem in fatal(problems)]
