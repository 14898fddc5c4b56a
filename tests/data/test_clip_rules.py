"""Datasets of clips: lengths, rates, buckets, and why a clip is left out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.datasets import DatasetConfig, VideoConfig, read_datasets
from simpletuner.config.schema import DatasetDefaults
from simpletuner.data import file_index
from simpletuner.data.build import build_datasets
from simpletuner.data.clips import ClipFacts, ClipRules, build_clip_rules, fitting_frames
from simpletuner.data.dataset import Dataset, DatasetFile
from simpletuner.data.entries import DataContext
from simpletuner.data.files import LeftOutError
from simpletuner.data.sample import Sample
from simpletuner.errors import Problem, Problems
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE, KANDINSKY5_VIDEO
from simpletuner.models.spec import Task
from tests.tools import pictures
from tests.tools.clips import (
    BROKEN,
    INTERLACED,
    SHOWN_OTHERWISE,
    write_clip,
    write_interlaced,
    write_plain,
)
from tests.tools.reports import read_by


@pytest.fixture
def context(tmp_path: Path) -> DataContext:
    return DataContext(
        defaults=DatasetDefaults(resolution=64),
        spec=KANDINSKY5_VIDEO,
        task="t2v",
        latent_root=tmp_path / "latents",
        text_root=tmp_path / "texts",
        frame_rate=KANDINSKY5_VIDEO.frame_rate,
    )


def rules_of(
    context: DataContext, video: dict[str, Any], dataset_type: str = "video"
) -> tuple[ClipRules | None, list[Problem]]:
    """The rules of an entry with these keys for clips, and their problems."""
    problems = Problems()
    config = DatasetConfig(id="films", dataset_type=dataset_type, video=VideoConfig(**video))
    with problems.within(config.id) as dataset_report:
        rules = build_clip_rules(config, context, dataset_report)
    return rules, problems


def build(
    context: DataContext, root: Path, video: dict[str, Any] | None = None, **keys: Any
) -> tuple[Dataset, list[Problem]]:
    """The first dataset of one entry."""
    problems = Problems()
    entry = {
        "id": "films",
        "dataset_type": "video",
        "instance_data_dir": str(root),
        "caption_strategy": "filename",
        "video": VideoConfig(**video or {}),
    }
    datasets = build_datasets([DatasetConfig(**{**entry, **keys})], context, problems)
    return datasets[0], problems


def films(
    root: Path, lengths: Sequence[int], rate: float = 24, size: tuple[int, int] = (96, 64)
) -> Path:
    """A clip of each length in frames."""
    for length in lengths:
        write_clip(root / f"film_{length:03}.mp4", seconds=length / rate, rate=rate, size=size)
    return root


def lengths_of(samples: Sequence[Sample]) -> list[int]:
    return [sample.frames for sample in samples]


@pytest.mark.parametrize(
    ("frames", "fitting"),
    [(1, 1), (4, 1), (5, 5), (8, 5), (48, 45), (49, 49), (61, 61), (81, 81), (84, 81)],
)
def test_lengths_are_of_the_form_4k_plus_1(frames: int, fitting: int) -> None:
    assert fitting_frames(frames, 4) == fitting
    assert fitting_frames(frames, 1) == frames


@pytest.mark.parametrize(("rate", "num_frames"), [(24, 121), (16, 81)])
def test_clips_have_five_seconds_at_the_rate_of_the_model(
    rate: float, num_frames: int, context: DataContext
) -> None:
    rules, problems = rules_of(replace(context, frame_rate=rate), {})

    assert not problems
    assert rules == ClipRules(
        VideoConfig(), rate=rate, stride=4, num_frames=num_frames, minimum=num_frames
    )


@pytest.mark.parametrize("video", [{"num_frames": 48}, {"num_frames": 48, "min_frames": 48}])
def test_48_frames_become_45_with_a_warning(video: dict[str, int], context: DataContext) -> None:
    rules, (problem,) = rules_of(context, video)

    assert rules is not None
    assert rules.num_frames == 45  # 4 x 11 + 1
    assert rules.minimum == video.get("min_frames", 45)
    assert problem.where == "films.video.num_frames"
    assert not problem.fatal
    assert "48" in problem.message
    assert "45" in problem.message


@pytest.mark.parametrize(
    ("video", "where", "words"),
    [
        ({"num_frames": 81, "min_frames": 49}, "min_frames", "49 is below num_frames 81"),
        ({"min_frames": 49}, "min_frames", "49 is below num_frames 121 (the default of 5 seconds)"),
        ({"num_frames": 81, "max_frames": 61}, "max_frames", "61 is below the 81"),
        ({"num_frames": 61, "is_i2v": True}, "is_i2v", "use i2v-lite-5s, i2v-pro-sft-5s"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(
    context: DataContext, video: dict[str, Any], where: str, words: str
) -> None:
    _, problems = rules_of(context, video)

    messages = {problem.where: problem.message for problem in problems if problem.fatal}
    assert words in messages[f"films.video.{where}"]


@pytest.mark.parametrize(
    ("video", "words"),
    [
        ({}, "without bucket_strategy resolution_frames"),
        (
            {"bucket_strategy": "resolution_frames"},
            "num_frames 61 gives every clip the same length",
        ),
    ],
)
def test_an_interval_without_effect_is_a_warning(
    context: DataContext, video: dict[str, Any], words: str
) -> None:
    rules, (problem,) = rules_of(context, {"num_frames": 61, "frame_interval": 12, **video})

    assert rules is not None
    assert rules.num_frames == 61
    assert problem.where == "films.video.frame_interval"
    assert not problem.fatal
    assert words in problem.message


@pytest.mark.parametrize("video", [{}, {"is_i2v": False}])
def test_pictures_have_no_clip_rules(video: dict[str, Any], context: DataContext) -> None:
    assert rules_of(context, video, "image") == (None, [])


def test_keys_for_clips_are_a_warning_among_pictures(context: DataContext) -> None:
    rules, (problem,) = rules_of(context, {"num_frames": 61}, "image")

    assert rules is None
    assert not problem.fatal


@pytest.mark.parametrize(
    ("length", "trained"),
    [(24, 21), (30, 21), (36, 33), (47, 33), (48, 45), (12, 9), (11, 9), (7, 5)],
)
def test_frame_interval_rounds_down_then_fits(
    context: DataContext, length: int, trained: int
) -> None:
    video = {"frame_interval": 12, "bucket_strategy": "resolution_frames", "min_frames": 5}
    rules, problems = rules_of(context, video)

    assert rules is not None
    assert not problems
    assert rules.frames_of(ClipFacts(96, 64, length / 24, 24)) == trained


def test_clips_of_different_lengths_have_at_least_one_interval(context: DataContext) -> None:
    rules, _ = rules_of(context, {"frame_interval": 12, "bucket_strategy": "resolution_frames"})

    assert rules is not None
    assert rules.num_frames is None
    assert rules.minimum == 12
    with pytest.raises(LeftOutError):
        rules.frames_of(ClipFacts(96, 64, 11 / 24, 24))


@pytest.mark.parametrize(
    ("task", "video", "is_i2v"),
    [("i2v", {}, True), ("i2v", {"is_i2v": False}, False), ("t2v", {}, False)],
)
def test_clips_have_a_condition_on_i2v_flavours_unless_it_is_switched_off(
    task: Task, video: dict[str, Any], is_i2v: bool, context: DataContext
) -> None:
    rules, problems = rules_of(replace(context, task=task), video)

    assert not problems
    assert rules is not None
    assert rules.is_i2v == is_i2v


def test_i2v_needs_frames_besides_the_condition(context: DataContext) -> None:
    _, problems = rules_of(replace(context, task="i2v"), {"num_frames": 1})

    assert "not trained; the minimum is 5" in str(problems[0])


def test_clips_become_samples(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [17, 30])
    (root / "film_017.txt").write_text("a short film\nanother caption")
    (root / "film_030.txt").write_text("a long film")

    dataset, problems = build(context, root, {"num_frames": 17}, caption_strategy="textfile")

    assert not problems

    sample = dataset.samples[0]
    assert sample.name == "film_017.mp4"
    assert sample.original_size == (96, 64)
    assert sample.geometry.size == (80, 48)
    assert sample.frames == 17
    assert sample.frame_rate == 24
    assert not sample.is_i2v
    assert sample.captions == ("a short film", "another caption")
    assert lengths_of(dataset.samples) == [17, 17]
    assert list(dataset.buckets) == ["1.5"]
    assert dataset.ledger()[0].frames == 17


def test_lengths_count_after_resampling(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [60], rate=60)  # one second, 24 frames at 24 fps

    dataset, _ = build(context, root, {"num_frames": 21})
    _, problems = build(context, root, {"num_frames": 29})

    assert lengths_of(dataset.samples) == [21]

    (problem,) = [problem for problem in problems if problem.fatal]
    assert "has 24 frames at 24 fps" in problem.message


def test_clips_outside_the_lengths_are_left_out_with_the_keys_that_would_keep_them(
    context: DataContext, tmp_path: Path
) -> None:
    root = films(tmp_path / "films", [1, 16, 17, 30, 40])
    video = {"num_frames": 17, "max_frames": 30}

    dataset, (problem,) = build(context, root, video, delete_unwanted_images=True)

    assert lengths_of(dataset.samples) == [17, 17]
    assert dataset.counts() == {"too short": 2, "too long": 1}

    uses = {line.name: line.use for line in dataset.ledger()}
    assert uses["film_001.mp4"].startswith("has 1 frame at 24 fps, ")
    assert uses["film_016.mp4"] == (
        "has 16 frames at 24 fps, fewer than video.min_frames 17; num_frames and "
        "min_frames 13 would work"
    )
    assert uses["film_040.mp4"].endswith("more than video.max_frames 30; 40 would work")

    left_out = "3 files are left out: 2 too short (film_001.mp4, film_016.mp4); 1 too long"
    assert left_out in problem.message


def test_a_dataset_of_short_clips_is_refused_with_a_length_that_works(
    context: DataContext, tmp_path: Path
) -> None:
    _, problems = build(context, films(tmp_path / "films", [10]))

    (problem,) = [problem for problem in problems if problem.fatal]
    assert "no samples detected in dataset films" in problem.message
    assert "num_frames and min_frames 9 would work" in problem.message


def test_buckets_have_clips_of_one_size_and_length(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [20, 24, 40, 50])
    films(root / "wide", [40], size=(96, 48))
    video = {"frame_interval": 12, "bucket_strategy": "resolution_frames"}

    dataset, problems = build(context, root, video)

    assert not problems

    names = {
        label: [sample.name for sample in samples] for label, samples in dataset.buckets.items()
    }
    assert names == {
        "80x48@9": ["film_020.mp4"],
        "80x48@21": ["film_024.mp4"],
        "80x48@33": ["film_040.mp4"],
        "80x48@45": ["film_050.mp4"],
        "96x48@33": ["wide/film_040.mp4"],
    }


@pytest.mark.parametrize(
    ("video", "labels"),
    [
        ({"bucket_strategy": "resolution_frames"}, ["80x48@17", "96x48@17"]),
        ({}, ["1.5", "2.0"]),
    ],
)
def test_buckets_are_labelled_by_size_or_by_ratio(
    video: dict[str, Any], labels: list[str], context: DataContext, tmp_path: Path
) -> None:
    root = films(tmp_path / "films", [20])
    films(root / "wide", [20], size=(96, 48))

    dataset, _ = build(context, root, {"num_frames": 17, **video})

    assert list(dataset.buckets) == labels


def test_clips_have_the_size_of_the_guides(tmp_path: Path, context: DataContext) -> None:
    root = films(tmp_path / "films", [5], size=(1280, 720))
    context = replace(context, defaults=DatasetDefaults(resolution=480))
    video = {"num_frames": 5, "bucket_strategy": "resolution_frames"}

    dataset, _ = build(context, root, video, resolution_type="pixel", aspect_bucket_alignment="16")

    assert list(dataset.buckets) == ["848x480@5"]


def test_a_rate_other_than_the_models_is_a_warning_with_the_factors(
    context: DataContext, tmp_path: Path
) -> None:
    root = films(tmp_path / "films", [24, 36], rate=12)

    _, (problem,) = build(context, root, {"num_frames": 17, "frame_rate": 30})

    assert problem.where == "films.video.frame_rate"
    assert "taken at 30 fps and the model plays 24" in problem.message
    assert "0.80 times as fast" in problem.message
    assert "fewer than the 30 frames per second that are taken, in 2 of 2 clips" in problem.message
    assert "film_024.mp4 has 12): frames are seen up to 2.50 times" in problem.message


def test_a_rate_of_television_is_not_a_warning(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [24], rate=24000 / 1001)

    _, problems = build(context, root, {"num_frames": 17})

    assert not problems


def test_pictures_and_clips_of_one_folder_may_be_trained_by_two_datasets(
    context: DataContext, tmp_path: Path
) -> None:
    films(tmp_path / "mixed", [24])
    pictures.photograph(tmp_path / "mixed" / "still.png", (96, 64))
    shared = {"instance_data_dir": str(tmp_path / "mixed"), "caption_strategy": "filename"}
    clips = DatasetConfig(
        id="clips", dataset_type="video", video=VideoConfig(num_frames=21), **shared
    )
    stills = DatasetConfig(id="stills", **shared)

    alone = Problems()
    together = Problems()
    build_datasets([clips], context, alone)
    build_datasets([clips, stills], context, together)

    (problem,) = alone
    assert "1 picture among clips (still.png)" in problem.message
    assert not together


def test_everything_in_a_folder_is_used_or_listed(context: DataContext, tmp_path: Path) -> None:
    root = folder_of_everything(tmp_path / "films")

    dataset, problems = build(context, root, {"num_frames": 17})

    uses = {line.name: line.use for line in dataset.ledger()}
    assert uses.keys() == {path.name for path in root.iterdir()}
    assert "separate dataset" in uses["still.png"]
    assert "convert an animation to .mp4 or .gif" in uses["moving.webp"]
    assert dataset.counts() == REASONS

    unsuitable = [file.name for file in dataset.rejected if file.reason == "unsuitable"]
    assert sorted(unsuitable) == UNSUITABLE
    assert not [problem for problem in problems if problem.fatal]


@pytest.mark.parametrize("has_reasons", [True, False])
def test_the_index_keeps_reasons_and_those_it_lacks_are_read_again(
    has_reasons: bool, context: DataContext, tmp_path: Path
) -> None:
    """Indexes of earlier versions have problems without a reason."""
    root = folder_of_everything(tmp_path / "films")
    dataset, _ = build(context, root, {"num_frames": 17})
    facts = dict(dataset.facts)
    if not has_reasons:
        facts = {name: replace(fact, reason="") for name, fact in facts.items()}
    file_index.save_index(dataset.latent_dir, root, facts)

    rebuilt, _ = build(context, root, {"num_frames": 17})

    assert rebuilt.counts() == REASONS


UNSUITABLE = [
    "page.webm",
    "picture.mov",
    "playlist.mp4",
    "pq.mp4",
    "text.mp4",
    "voice.avi",
    "voice.mp4",
]
# Number of files in `folder_of_everything` that are left out, by reason.
REASONS = {
    "damaged": len(BROKEN) - 6,  # all of UNSUITABLE but pq.mp4 are among BROKEN
    "unsuitable": 7,
    "not a clip": 1,
    "caption without a file": 1,
    "picture among clips": 2,
}


def folder_of_everything(root: Path) -> Path:
    """A folder with one good clip, and every kind of file that is left out."""
    films(root, [17])
    for name, write in BROKEN.items():
        write(root / name)
    SHOWN_OTHERWISE["pq.mp4"][0](root / "pq.mp4")
    pictures.photograph(root / "still.png", (96, 64))
    pictures.photograph(root / "moving.webp", (96, 64))
    (root / "notes.md").write_text("x")
    (root / "lost.txt").write_text("x")
    return root


@pytest.mark.parametrize(
    ("video", "message", "note"),
    [
        ({}, "two fields become one frame (bwdif).", "deinterlaced"),
        ({"reader": "decord"}, "decord does not deinterlace", "decoded by decord"),
    ],
)
def test_interlaced_clips_are_announced(
    video: dict[str, Any], message: str, note: str, context: DataContext, tmp_path: Path
) -> None:
    pytest.importorskip("decord")
    root = films(tmp_path / "films", [17])
    codec, options = INTERLACED["interlaced.mkv"]
    write_interlaced(root / "interlaced.mkv", codec, **options)

    dataset, problems = build(context, root, {"num_frames": 17, **video})

    assert f"interlaced: 1 of 2 clips (interlaced.mkv); {message}" in problems[0].message

    notes = {line.name: line.note for line in dataset.ledger()}
    assert notes["interlaced.mkv"].endswith(note)


def test_clips_that_only_decord_reads_are_announced(
    context: DataContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = films(tmp_path / "films", [17])
    facts = ClipFacts(96, 64, 17 / 24, 24, reader="decord")
    monkeypatch.setattr(file_index, "probe_clip", lambda path: facts)

    dataset, problems = build(context, root, {"num_frames": 17})

    assert [sample.clip for sample in dataset.samples] == [facts]

    message = "PyAV cannot read 1 of 1 clip (film_017.mp4); decord reads them"
    assert problems[0].message.startswith(message)


def test_the_reader_decord_must_be_installed(
    context: DataContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    _, (problem,) = rules_of(context, {"reader": "decord"})
    _, problems_with_pyav = rules_of(context, {"reader": "pyav"})

    assert problem.where == "films.video.reader"
    assert problem.fatal
    assert not problems_with_pyav


def test_latents_of_clips_of_earlier_versions_are_named(
    context: DataContext, tmp_path: Path
) -> None:
    root = films(tmp_path / "films", [17])
    dataset, problems_before = build(context, root, {"num_frames": 17})
    dataset.save_index()
    _, problems_of_this_version = build(context, root, {"num_frames": 17})
    index = dataset.latent_dir / file_index.INDEX_NAME
    version = f'"version":{file_index.INDEX_VERSION}'
    index.write_text(index.read_text().replace(version, '"version":4'))

    _, (problem,) = build(context, root, {"num_frames": 17})

    assert not problems_before, "nothing has been cached"
    assert not problems_of_this_version
    assert not problem.fatal
    assert problem.message.startswith("the latents of 1 clip are made again")
    assert "cache gc --remove" in problem.message


def test_pictures_are_clips_of_one_frame_in_their_own_dataset(
    context: DataContext, tmp_path: Path
) -> None:
    pictures.photograph(tmp_path / "stills" / "a.png", (96, 64))
    films(tmp_path / "stills", [17])
    i2v = replace(context, task="i2v")

    dataset, (problem,) = build(i2v, tmp_path / "stills", dataset_type="image")

    assert not problem.fatal

    (sample,) = dataset.samples
    assert sample.frames == 1
    assert sample.frame_rate is None
    assert not sample.is_i2v
    assert dataset.counts() == {"clip among pictures": 1}


def test_families_of_pictures_refuse_clips(context: DataContext, tmp_path: Path) -> None:
    image = replace(context, spec=KANDINSKY5_IMAGE, task="t2i", frame_rate=None)
    _, problems = build(image, films(tmp_path / "films", [5]))

    assert [problem.where for problem in problems if problem.fatal] == ["films.dataset_type"]


def test_an_unchanged_clip_is_not_read_again(
    context: DataContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = films(tmp_path / "films", [17])
    first, _ = build(context, root, {"num_frames": 17})
    first.save_index()
    monkeypatch.setattr(file_index, "probe_clip", lambda path: pytest.fail("read again"))

    second, _ = build(context, root, {"num_frames": 13})

    assert second.facts["film_017.mp4"].clip == first.facts["film_017.mp4"].clip
    assert lengths_of(second.samples) == [13]


def test_a_missing_clip_is_trained_from_the_caches_if_that_is_allowed(
    context: DataContext, tmp_path: Path
) -> None:
    root = films(tmp_path / "films", [17])
    dataset, _ = build(context, root, {"num_frames": 17})
    dataset.save_index()
    shutil.rmtree(root)
    defaults = context.defaults.model_copy(update={"ignore_missing_files": True})

    dataset, _ = build(replace(context, defaults=defaults), root, {"num_frames": 13})

    assert lengths_of(dataset.samples) == [13]


def test_a_random_crop_keeps_the_length(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [17], size=(128, 64))
    video = {"num_frames": 17, "bucket_strategy": "resolution_frames"}

    dataset, _ = build(context, root, video, crop=True, crop_style="random")

    geometries = [dataset.at_epoch(epoch).samples[0].geometry for epoch in range(1, 9)]
    assert len({geometry.crop for geometry in geometries}) > 1
    assert {geometry.bucket for geometry in geometries} == {"64x64@17"}


def test_the_rate_may_be_given_under_both_names(tmp_path: Path) -> None:
    file = tmp_path / "datasets.json"
    file.write_text('[{"id": "films", "video": {"frame_rate": 24, "framerate": "24"}}]')

    (entry,), problems = read_by(read_datasets, file, placeholders={})

    assert not [problem for problem in problems if problem.fatal]
    assert entry.video.frame_rate == 24


def test_two_rates_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "datasets.json"
    file.write_text('[{"id": "films", "video": {"frame_rate": 24, "framerate": 30}}]')

    _, problems = read_by(read_datasets, file, placeholders={})

    (problem,) = [problem for problem in problems if problem.fatal]
    assert "given twice" in str(problem)


@pytest.mark.parametrize(
    ("color_matrix", "matrix", "note"),
    [(None, "bt709", "counts as BT.709"), ("bt601", "bt601", "")],
)
def test_the_ledger_notes_guessed_colours_and_a_key_overrides_them(
    color_matrix: str | None, matrix: str, note: str, context: DataContext, tmp_path: Path
) -> None:
    root = tmp_path / "films"
    write_plain(root / "1 untagged.mp4", (1280, 64), (200, 40, 90), "bt709", tagged=False)
    write_plain(root / "2 tagged.mp4", (1280, 64), (200, 40, 90), "bt709", tagged=True)

    dataset, _ = build(context, root, {"num_frames": 5, "color_matrix": color_matrix})

    assert [sample.clip and sample.clip.matrix for sample in dataset.samples] == [matrix, None]
    assert [line.note for line in dataset.ledger()] == [note, ""]


def test_the_length_of_a_clip_is_that_of_its_trained_frames(
    context: DataContext, tmp_path: Path
) -> None:
    root = films(tmp_path / "films", [9, 17, 48])

    fixed, _ = build(context, root, {"num_frames": 17})
    own, _ = build(context, root, {"bucket_strategy": "resolution_frames", "frame_interval": 4})

    def seconds(dataset: Dataset) -> list[float | None]:
        return [DatasetFile(dataset, f"film_{length:03}.mp4").seconds for length in (9, 17, 48)]

    assert seconds(fixed) == pytest.approx([9 / 24, 17 / 24, 17 / 24], abs=0.01)
    assert seconds(own) == pytest.approx([9 / 24, 17 / 24, 48 / 24], abs=0.01)
