"""A folder becomes a dataset: every file is used, or is listed with its reason."""

from __future__ import annotations

import json
import os
import shutil
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
    """Six photographs of three shapes, two captions each, in two folders."""
    root = tmp_path / "photos"
    shapes = [(90, 60), (64, 64), (60, 90)]
    for number in range(6):
        path = root / f"sub {number % 2}" / f"photo_{number}.png"
        pictures.photograph(path, shapes[number % 3], seed=number)
        captions = f"photo number {number}\nanother caption"
        path.with_suffix(".txt").write_text(captions, encoding="utf-8")
    return root


def build(
    context: DataContext, *entries: dict[str, Any], **changes: Any
) -> tuple[list[Dataset], list[Problem]]:
    """Datasets and problems of entries; `changes` are for the run's defaults or its context."""
    is_default = DatasetDefaults.model_fields.__contains__
    defaults = {key: value for key, value in changes.items() if is_default(key)}
    settings = {key: value for key, value in changes.items() if not is_default(key)}
    context = replace(context, defaults=context.defaults.model_copy(update=defaults), **settings)
    problems = Problems()
    configs = [
        DatasetConfig(**{"id": f"set{number}", **entry}) for number, entry in enumerate(entries)
    ]
    return build_datasets(configs, context, problems), problems


def fatal(problems: list[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.fatal]


def folder(root: Path, **keys: Any) -> dict[str, Any]:
    """An entry for a folder with caption files, and more keys."""
    return {"instance_data_dir": str(root), "caption_strategy": "textfile", **keys}


def test_a_folder_becomes_samples(context: DataContext, photos: Path) -> None:
    (dataset,), problems = build(context, folder(photos))

    assert not problems

    names = [sample.name for sample in dataset.samples]
    assert names[:2] == ["sub 0/photo_0.png", "sub 0/photo_2.png"]

    sample = dataset.samples[0]
    assert sample.full_name == "set0/sub 0/photo_0.png"
    assert sample.captions == ("photo number 0", "another caption")
    assert sample.original_size == (90, 60)
    assert sample.geometry.bucket == "1.5"
    assert sample.geometry.size == (80, 48)
    assert len(sample.content) == 64  # SHA-256 in hex

    counts = {label: len(samples) for label, samples in dataset.buckets.items()}
    assert counts == {"0.67": 2, "1.0": 2, "1.5": 2}


def test_unset_keys_have_the_defaults_of_the_run(context: DataContext, photos: Path) -> None:
    (dataset,), _ = build(context, folder(photos))

    assert dataset.latent_dir == context.latent_root / "set0"
    assert dataset.batch_size == 1
    assert dataset.repeats == 0
    assert dataset.config.crop_style == "random"


def test_every_file_is_used_or_listed_with_its_reason(context: DataContext, photos: Path) -> None:
    pictures.write_all(photos / "broken", pictures.BROKEN)
    (photos / "notes.md").write_text("x")
    (photos / "sub 0" / "photo_0.txt").unlink()
    pictures.photograph(photos / "long.png", (3000, 20))
    (photos / "long.txt").write_text("long")
    files = {path.relative_to(photos).as_posix() for path in photos.rglob("*") if path.is_file()}

    (dataset,), problems = build(context, folder(photos, maximum_aspect_ratio=10))

    ledger = dataset.ledger()
    assert [line.name for line in ledger] == sorted(
        name for name in files if not name.endswith(".txt")
    )

    uses = {line.name: line.use for line in ledger}
    assert uses["sub 0/photo_0.png"] == "has no caption file 'photo_0.txt' beside it"
    assert uses["broken/empty.png"] == "is empty"
    assert "maximum_aspect_ratio" in uses["long.png"]
    assert all(bool(line.use) == (line.geometry is None) for line in ledger)
    assert dataset.sizes() == Counter(line.trained_size for line in ledger if line.geometry)
    assert dataset.counts()["damaged"] == len(pictures.BROKEN)
    assert not fatal(problems)
    assert "14 files are left out" in str(problems[0])
    assert problems[0].kind == "captions"


def test_a_short_ledger_has_the_unused_files_first(context: DataContext, photos: Path) -> None:
    (photos / "notes.md").write_text("x")
    (photos / "sub 0" / "photo_0.txt").unlink()

    (dataset,), _ = build(context, folder(photos))

    lines = ledger_rows([dataset], 3)
    assert [line.name for line in lines] == ["notes.md", "sub 0/photo_0.png", "sub 0/photo_2.png"]
    assert [bool(line.use) for line in lines] == [True, True, False]


def test_unused_caption_files_are_mentioned_with_the_key_that_reads_them(
    context: DataContext, photos: Path
) -> None:
    (dataset,), problems = build(context, {"instance_data_dir": str(photos)})

    assert dataset.samples[0].captions == ("photo 0",)  # of the file name
    assert "caption_strategy to textfile" in str(problems[0])
    assert dataset.counts() == {"unused caption": 6}


def test_unread_formats_give_one_warning_with_a_remedy(context: DataContext, photos: Path) -> None:
    unread = ["one.jxl", "two.CR3", "three.mxf"]
    clip = "four.mp4"
    # Raw files and live photos beside a picture are not a loss.
    beside_pictures = ["sub 0/photo_0.dng", "sub 1/photo_1.mov"]
    for name in (*unread, clip, *beside_pictures):
        (photos / name).write_bytes(b"")

    (dataset,), (problem,) = build(context, folder(photos))

    assert len(dataset.samples) == 6
    assert problem.message.startswith(
        "4 files are left out: 1 clip among pictures (four.mp4); 3 unread format ("
    )
    assert "Save such pictures as .png or .jpg, and such clips as .mp4." in problem.message
    assert "Clips are trained by a video model" in problem.message


def test_a_folder_of_unread_formats_is_refused_with_a_remedy(
    context: DataContext, tmp_path: Path
) -> None:
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
def test_a_bad_entry_is_reported_under_its_key(
    context: DataContext, photos: Path, entry: dict[str, Any], where: str, words: str
) -> None:
    _, problems = build(context, folder(photos, id="a.b"), folder(photos, **entry))

    messages = {problem.where: problem.message for problem in fatal(problems)}
    assert words in messages[f"set1.{where}"]


def test_an_environment_variable_lifts_the_check_of_units(
    context: DataContext, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMPLETUNER_MAXIMUM_IMAGE_SIZE_OVERRIDE", "1")
    keys = {"maximum_image_size": 40, "target_downsample_size": 32, "resolution_type": "pixel"}

    (dataset,), problems = build(context, folder(photos, crop=True, **keys))

    assert not problems
    assert dataset.samples[0].geometry.resized == (96, 64)


def test_missing_folders_are_one_problem(context: DataContext, photos: Path) -> None:
    here = folder(photos)
    missing = folder(photos / "x")
    missing_too = folder(photos / "y", id="other")

    _, problems = build(context, here, missing, missing_too)

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

    by_key = {problem.where: problem for problem in fatal(problems)}
    assert by_key.keys() == {"set0", "set1", "instance_data_dir", "set3.crop_style"}
    assert by_key["set0"].kind == "captions"
    assert by_key["set0"].message.startswith("no samples detected in dataset set0")
    assert "6 no caption" in by_key["set0"].message
    assert "the folder is empty" in by_key["set1"].message


def test_latent_folders_belong_to_one_dataset(
    context: DataContext, photos: Path, tmp_path: Path
) -> None:
    shared = str(tmp_path / "cache")
    same = f"{shared}/../cache"
    text = {"dataset_type": "text_embeds", "cache_dir": shared, "default": True}

    _, problems = build(
        context, folder(photos, cache_dir_vae=shared), folder(photos, cache_dir_vae=same), text
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
    folder_of_latents = tmp_path / "my latents"
    cache = {"id": "cache", "dataset_type": "image_embeds", "cache_dir": str(folder_of_latents)}

    (dataset,), problems = build(context, folder(photos, image_embeds="cache"), cache)

    assert not problems
    assert dataset.latent_dir == folder_of_latents


@pytest.mark.parametrize(
    ("entry", "changes", "repeats"),
    [
        ({}, {"train_batch_size": 7}, 1),  # 6 samples x 2 = 12
        ({"repeats": 1}, {"train_batch_size": 13}, 2),  # x 3 = 18
        # A step takes 2 x 2 x 4 = 16.
        ({}, {"train_batch_size": 2, "gradient_accumulation_steps": 2, "num_processes": 4}, 2),
        ({"train_batch_size": 19}, {}, 3),  # x 4 = 24
    ],
)
def test_too_few_samples_are_refused_with_the_repeats_that_work(
    context: DataContext, photos: Path, entry: dict[str, Any], changes: dict[str, int], repeats: int
) -> None:
    _, problems = build(context, folder(photos, **entry), **changes)
    _, problems_with_repeats = build(
        context, folder(photos, **{**entry, "repeats": repeats}), **changes
    )

    (problem,) = fatal(problems)
    assert "no samples detected in dataset set0" in problem.message
    assert problem.message.endswith(f"repeats {repeats} would work.")
    assert not fatal(problems_with_repeats)


def test_oversubscription_raises_repeats_that_are_not_set(
    context: DataContext, photos: Path
) -> None:
    allowed = {"train_batch_size": 7, "allow_dataset_oversubscription": True}

    (dataset,), problems = build(context, folder(photos), **allowed)

    assert dataset.repeats == 1
    assert not fatal(problems)


def test_oversubscription_keeps_repeats_that_are_set(context: DataContext, photos: Path) -> None:
    allowed = {"train_batch_size": 7, "allow_dataset_oversubscription": True}

    _, problems = build(context, folder(photos, repeats=0), **allowed)

    assert fatal(problems)


@pytest.mark.parametrize(("batch", "processes", "repeats"), [(3, 1, 1), (1, 5, 2)])
def test_small_buckets_are_filled_with_a_warning(
    context: DataContext, photos: Path, batch: int, processes: int, repeats: int
) -> None:
    counts = {"train_batch_size": batch, "num_processes": processes}

    _, problems = build(context, folder(photos), **counts)
    _, problems_with_repeats = build(context, folder(photos, repeats=repeats), **counts)

    assert not fatal(problems)
    assert f"0.67 (2), 1.0 (2), 1.5 (2). repeats {repeats} would fill them." in str(problems[0])
    assert "filled" not in "".join(map(str, problems_with_repeats))


def test_too_few_samples_are_accepted_if_buckets_are_not_pruned(
    context: DataContext, photos: Path
) -> None:
    _, problems = build(context, folder(photos), train_batch_size=7, disable_bucket_pruning=True)

    assert not fatal(problems)


def test_a_dataset_must_take_part_at_the_start(context: DataContext, photos: Path) -> None:
    late_epoch = folder(photos, start_epoch=2)
    late_step = folder(photos, start_step=5)

    _, problems = build(context, late_epoch, late_step)
    _, problems_with_an_early_one = build(context, late_epoch, folder(photos))

    assert "no dataset takes part at the start" in str(fatal(problems)[0])
    assert not problems_with_an_early_one


def test_a_dataset_must_have_a_probability(context: DataContext, photos: Path) -> None:
    _, problems = build(context, folder(photos, probability=0))

    assert "nothing would be trained on" in str(fatal(problems)[0])


def test_files_are_left_out_by_a_list_in_their_folder(context: DataContext, photos: Path) -> None:
    name = "sub 0/photo_0.png"
    (photos / "exclude.json").write_text(json.dumps([name]))

    (dataset,), problems = build(context, folder(photos))

    assert not problems, "the user asked for it"
    assert len(dataset.samples) == 5
    assert name not in dataset.facts

    uses = {line.name: line.use for line in dataset.ledger()}
    assert uses[name] == "is left out by exclude.json"


def test_an_empty_list_leaves_no_file_out(context: DataContext, photos: Path) -> None:
    (photos / "exclude.json").write_text("[]")

    (dataset,), _ = build(context, folder(photos))

    assert len(dataset.samples) == 6


def test_a_listed_name_that_is_not_in_the_folder_is_a_warning(
    context: DataContext, photos: Path
) -> None:
    (photos / "mine.json").write_text(json.dumps(["sub 1/photo_9.png"]))

    (dataset,), (problem,) = build(context, folder(photos, exclude_files="mine.json"))

    assert len(dataset.samples) == 6
    assert problem.where == "set0.exclude_files"
    assert not problem.fatal
    assert "not in the folder: sub 1/photo_9.png. Did you mean 'sub 1/photo_" in problem.message


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "a JSON list of file names"), ("{}", "a JSON list"), ("[", "not valid JSON")],
)
def test_a_list_of_excluded_files_must_be_a_json_list_of_names(
    content: str, message: str, context: DataContext, photos: Path
) -> None:
    (photos / "exclude.json").write_text(content)

    _, problems = build(context, folder(photos))

    (problem,) = fatal(problems)
    assert problem.where == "set0.exclude_files"
    assert message in problem.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 300, "cannot be read: File name too long"),
        ("a\0b", "cannot be read: its name contains a null character"),
        ("none.json", "none.json"),
        ("../exclude.json", "must be the name of a file"),
    ],
)
def test_a_list_of_excluded_files_must_be_in_the_folder_if_it_is_named(
    name: str, message: str, context: DataContext, photos: Path
) -> None:
    _, problems = build(context, folder(photos, exclude_files=name))

    (problem,) = fatal(problems)
    assert message in problem.message


def test_max_num_samples_is_a_fixed_subset(context: DataContext, photos: Path) -> None:
    (dataset,), problems = build(context, folder(photos, max_num_samples=4))
    (smaller,), _ = build(context, folder(photos, max_num_samples=3))

    assert not problems

    names = [sample.name for sample in dataset.samples]
    assert len(names) == 4
    assert names == sorted(names)
    assert dataset.counts()["not chosen"] == 2
    assert {sample.name for sample in smaller.samples} < set(names)


def test_held_out_samples_become_an_eval_set(context: DataContext, photos: Path) -> None:
    (dataset, held_out), problems = build(context, folder(photos, hold_out=2))

    assert not fatal(problems)
    assert len(dataset.samples) == 4
    assert dataset.counts()["held out"] == 2
    assert held_out.id == f"{dataset.id}-held-out"
    assert not held_out.config.is_trained
    assert held_out.batch_size == 1
    assert held_out.latent_dir != dataset.latent_dir
    assert {sample.dataset_id for sample in held_out.samples} == {held_out.id}
    assert not names_of(dataset) & names_of(held_out)


def test_a_short_ledger_has_held_out_files_once(context: DataContext, photos: Path) -> None:
    datasets, _ = build(context, folder(photos, hold_out=2))

    lines = ledger_rows(datasets, 100)

    assert len({line.name for line in lines}) == len(lines) == 6
    assert not any(line.use for line in lines)


def test_holding_out_more_samples_keeps_those_that_were_held_out(
    context: DataContext, photos: Path
) -> None:
    (_, two), _ = build(context, folder(photos, hold_out=2))
    (_, three), _ = build(context, folder(photos, hold_out=3))

    assert names_of(two) < names_of(three)


def test_holding_out_all_samples_is_refused(context: DataContext, photos: Path) -> None:
    _, problems = build(context, folder(photos, hold_out=6))

    assert "hold_out: 6 of 6 samples would leave nothing to train on." in str(fatal(problems)[0])


def test_only_trained_datasets_hold_samples_out(context: DataContext, photos: Path) -> None:
    _, problems = build(context, folder(photos), folder(photos, dataset_type="eval", hold_out=1))

    assert "hold_out: needs a dataset that is trained." in str(fatal(problems)[0])


def names_of(dataset: Dataset) -> set[str]:
    return {sample.name for sample in dataset.samples}


@pytest.fixture
def twins(tmp_path: Path) -> Path:
    """Three pictures in two formats each, as phones store them, and two in one format."""
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
    (dataset, held_out), problems = build(context, folder(twins, hold_out=count))

    assert not fatal(problems)

    trained_stems = {Path(name).stem for name in names_of(dataset)}
    held_out_stems = {Path(name).stem for name in names_of(held_out)}

    assert not trained_stems & held_out_stems
    assert len(held_out.samples) in (count, count + 1)


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

    pairs = "0.JPG and 0.png, 1.JPG and 1.png, 2.JPG and 2.png"
    assert str(problem).endswith(
        f"files that differ only in their extension: {pairs}. "
        "If they show the same, it is trained twice as often: list one of each in exclude.json."
    )


def test_pictures_in_two_formats_are_not_named_if_one_is_excluded(
    context: DataContext, twins: Path
) -> None:
    (twins / "exclude.json").write_text(json.dumps(["0.JPG", "1.JPG", "2.JPG"]))

    _, problems = build(context, folder(twins))

    assert not problems


def test_a_dataset_without_usable_files_is_refused_with_the_commonest_reason(
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


def test_a_dataset_file_of_eval_sets_alone_is_refused(context: DataContext, photos: Path) -> None:
    _, problems = build(context, folder(photos, dataset_type="eval"))
    assert "no entry is a dataset to train on" in str(fatal(problems)[0])


def test_random_crops_move_each_epoch(context: DataContext, photos: Path) -> None:
    (dataset,), _ = build(context, folder(photos, crop=True))

    assert dataset.changes_each_epoch

    crops = [sample.geometry for sample in dataset.samples]
    assert [sample.geometry for sample in dataset.at_epoch(2).samples] != crops
    assert dataset.at_epoch(2).at_epoch(1) == dataset
    assert dataset.at_epoch(3).at_epoch(2) == dataset.at_epoch(2)


@pytest.mark.parametrize("keys", [{"vae_cache_clear_each_epoch": False}, {"crop_style": "center"}])
def test_fixed_crops_stay_in_place(
    keys: dict[str, Any], context: DataContext, photos: Path
) -> None:
    (dataset,), _ = build(context, folder(photos, crop=True, **keys))

    assert dataset.at_epoch(7) is dataset


def test_random_crops_depend_on_the_seed(context: DataContext, photos: Path) -> None:
    (unseeded,), _ = build(context, folder(photos, crop=True))
    (seeded,), _ = build(context, folder(photos, crop=True), seed=5)

    assert seeded.samples != unseeded.samples


def test_random_aspects_change_buckets_each_epoch(context: DataContext, photos: Path) -> None:
    keys = {"crop": True, "crop_aspect": "random", "crop_aspect_buckets": [0.5, 1.0, 2.0]}

    (dataset,), problems = build(context, folder(photos, **keys))

    assert not fatal(problems)

    buckets: set[str] = set()
    for epoch in range(1, 9):
        buckets |= dataset.at_epoch(epoch).buckets.keys()

    assert buckets == {"0.5", "1.0", "2.0"}


def test_captions_pass_through_filters_and_shuffling(context: DataContext, photos: Path) -> None:
    text = {
        "id": "text",
        "dataset_type": "text_embeds",
        "caption_filter_list": ["s/photo number/number/", "another"],
    }
    shuffle = {"enable": True, "split_on": "space", "count": 1, "include_original": False}

    (dataset,), problems = build(context, folder(photos, caption_shuffle=shuffle), text)

    assert not problems

    shuffled, filtered = dataset.samples[0].captions
    assert sorted(shuffled.split()) == ["0", "number"]
    assert filtered == "caption"


def test_a_second_start_reads_only_new_and_changed_files(
    context: DataContext, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (photos / "bad.png").write_text("bad")
    (first,), _ = build(context, folder(photos))
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


def test_planning_writes_no_index(context: DataContext, photos: Path) -> None:
    (dataset,), _ = build(context, folder(photos))

    assert not (dataset.latent_dir / INDEX_NAME).exists()


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


def test_missing_files_are_listed(context: DataContext, photos: Path) -> None:
    (before,), _ = build(context, folder(photos))
    before.save_index()
    (photos / "sub 0" / "photo_0.png").unlink()
    (photos / "sub 0" / "photo_0.txt").unlink()

    (after,), problems = build(context, folder(photos))

    assert after.counts() == {"gone": 1}
    assert "1 gone" in str(problems[0])


@pytest.mark.parametrize("is_folder_missing", [False, True])
def test_missing_files_are_trained_from_the_caches_if_that_is_allowed(
    is_folder_missing: bool, context: DataContext, photos: Path
) -> None:
    (before,), _ = build(context, folder(photos))
    before.save_index()
    if is_folder_missing:
        shutil.rmtree(photos)
    else:
        (photos / "sub 0" / "photo_0.png").unlink()
        (photos / "sub 0" / "photo_0.txt").unlink()

    (after,), problems = build(context, folder(photos), ignore_missing_files=True)

    assert after.samples == before.samples
    assert not problems


def test_files_added_after_a_kept_list_are_left_out(context: DataContext, photos: Path) -> None:
    (first,), _ = build(context, folder(photos))
    first.save_index()
    pictures.photograph(photos / "new.png", (64, 64))
    (photos / "new.txt").write_text("new")

    (second,), problems = build(context, folder(photos, preserve_data_backend_cache=True))

    assert not problems
    assert second.samples == first.samples
    assert second.counts()["not chosen"] == 1


def test_damage_that_decoding_shows_is_remembered(context: DataContext, photos: Path) -> None:
    (dataset,), _ = build(context, folder(photos))
    reduced = dataset.without({"sub 0/photo_0.png": "is damaged: broken data"})
    reduced.save_index()

    (rebuilt,), _ = build(context, folder(photos))

    assert len(rebuilt.samples) == 5
    assert rebuilt.samples == reduced.samples
    assert {file.detail for file in rebuilt.rejected} == {"is damaged: broken data"}


def test_a_held_out_file_that_turns_out_damaged_is_replaced(
    context: DataContext, photos: Path
) -> None:
    (trained, held_out), _ = build(context, folder(photos, hold_out=2))
    damaged = held_out.samples[0].name
    failures = {(held_out.id, damaged): ("damaged", "is damaged: broken data")}

    reduced_trained, reduced_held_out = without_failures([trained, held_out], failures)
    reduced_trained.save_index()
    reduced_held_out.save_index()
    (rebuilt_trained, rebuilt_held_out), _ = build(context, folder(photos, hold_out=2))

    assert len(reduced_trained.samples) == 4
    assert reduced_trained.counts()["damaged"] == 0
    assert len(reduced_held_out.samples) == 1
    assert reduced_held_out.counts()["damaged"] == 1
    assert len(rebuilt_trained.samples) == 3
    assert rebuilt_trained.counts()["damaged"] == 1
    assert len(rebuilt_held_out.samples) == 2
    assert damaged not in names_of(rebuilt_trained) | names_of(rebuilt_held_out)


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
    write_table(
        tmp_path / "t.parquet",
        filename=["photo_0.png", "photo_1.png", "lost.png"],
        caption=["zero", "one", "lost"],
    )
    table = {"path": str(tmp_path / "t.parquet")}

    (dataset,), problems = build(context, table_entry(photos, table))

    assert [sample.captions for sample in dataset.samples] == [("zero",), ("one",)]
    assert dataset.counts()["not in the table"] == 4
    assert any("lost.png" in problem.message for problem in problems)


def test_a_column_that_the_table_lacks_is_reported_under_its_key(
    context: DataContext, photos: Path, tmp_path: Path
) -> None:
    write_table(tmp_path / "t.parquet", filename=["photo_0.png"], caption=["zero"])
    table = {"path": str(tmp_path / "t.parquet"), "caption_column": "text"}

    _, problems = build(context, table_entry(photos, table))

    assert [problem.where for problem in fatal(problems)] == ["set0.parquet.caption_column"]


def write_table(path: Path, **columns: list[str]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)


def table_entry(root: Path, table: dict[str, str]) -> dict[str, Any]:
    return {
        "instance_data_dir": str(root),
        "metadata_backend": "parquet",
        "caption_strategy": "parquet",
        "parquet": table,
    }


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
def test_the_entry_of_the_guides_is_accepted(
    context: DataContext, photos: Path, task: Task
) -> None:
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
    assert [problem.where for problem in fatal(problems)] == missing
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


def test_enlarged_pictures_are_counted_under_the_key_that_decides_it(
    context: DataContext, tmp_path: Path
) -> None:
    for number, size in enumerate([(300, 200), (600, 400), (1500, 1000)]):
        pictures.photograph(tmp_path / "p" / f"{number}.png", size)
    entry = folder(tmp_path / "p", caption_strategy="filename")

    _, problems = build(context, entry, resolution=1024)

    (problem,) = [problem for problem in problems if problem.where == "set0.resolution"]
    assert not problem.fatal
    assert "2 of 3 files enlarged" in problem.message
    assert "0.png the most, from 300x200 to 12" in problem.message
    assert "minimum_image_size" in problem.message


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
