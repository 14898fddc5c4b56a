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
from simpletuner.data.dataset import Dataset
from simpletuner.data.entries import DataContext
from simpletuner.data.files import LeftOutError
from simpletuner.data.sample import Sample
from simpletuner.errors import Problem, Problems
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE, KANDINSKY5_VIDEO
from tests.tools import pictures
from tests.tools.clips import (
    BROKEN,
    INTERLACED,
    SHOWN_OTHERWISE,
    write_clip,
    write_interlaced,
    write_plain,
)


@pytest.fixture
def context(tmp_path: Path) -> DataContext:
    defaults = DatasetDefaults(resolution=64)
    rate = KANDINSKY5_VIDEO.frame_rate
    return DataContext(
        defaults, KANDINSKY5_VIDEO, "t2v", tmp_path / "latents", tmp_path / "texts", frame_rate=rate
    )


def rules_of(
    context: DataContext, video: dict[str, Any], dataset_type: str = "video"
) -> tuple[ClipRules | None, list[Problem]]:
    problems = Problems()
    config = DatasetConfig(id="films", dataset_type=dataset_type, video=VideoConfig(**video))
    with problems.within(config.id) as of_dataset:
        rules = build_clip_rules(config, context, of_dataset)
    return rules, problems


def build(
    context: DataContext, root: Path, video: dict[str, Any] | None = None, **more: Any
) -> tuple[Dataset, list[Problem]]:
    """The first dataset of one entry."""
    problems = Problems()
    entry = {
        "id": "films",
        "dataset_type": "video",
        "instance_data_dir": str(root),
        "caption_strategy": "filename",
    }
    datasets = build_datasets(
        [DatasetConfig(**{**entry, **more}, video=VideoConfig(**video or {}))], context, problems
    )
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


def test_defaults_are_five_seconds_of_the_models_rate(context: DataContext) -> None:
    rules, problems = rules_of(context, {})
    assert rules == ClipRules(VideoConfig(), rate=24, stride=4, num_frames=121, minimum=121)
    assert not problems
    rules, _ = rules_of(replace(context, frame_rate=16), {})
    assert rules is not None
    assert (rules.rate, rules.num_frames) == (16, 81)


def test_48_frames_become_45_with_a_warning(context: DataContext) -> None:
    rules, (problem,) = rules_of(context, {"num_frames": 48})
    assert rules is not None
    assert (rules.num_frames, rules.minimum) == (45, 45)
    assert (problem.where, problem.fatal) == ("films.video.num_frames", False)
    assert "48" in problem.message
    assert "45" in problem.message
    rules, problems = rules_of(context, {"num_frames": 48, "min_frames": 48})
    assert [problem.fatal for problem in problems] == [False]


@pytest.mark.parametrize(
    ("video", "where", "words"),
    [
        ({"num_frames": 81, "min_frames": 49}, "min_frames", "49 is below num_frames 81"),
        ({"min_frames": 49}, "min_frames", "49 is below num_frames 121 (the default of 5 seconds)"),
        ({"num_frames": 81, "max_frames": 61}, "max_frames", "61 is below the 81"),
        ({"num_frames": 61, "is_i2v": True}, "is_i2v", "use i2v-lite-5s, i2v-pro-sft-5s"),
    ],
)
def test_contradictions(
    context: DataContext, video: dict[str, Any], where: str, words: str
) -> None:
    _, problems = rules_of(context, video)
    found = {problem.where: problem.message for problem in problems if problem.fatal}
    assert words in found[f"films.video.{where}"]


@pytest.mark.parametrize(
    ("video", "where", "words"),
    [
        (
            {"num_frames": 61, "frame_interval": 12},
            "frame_interval",
            "without bucket_strategy resolution_frames",
        ),
        (
            {"num_frames": 61, "frame_interval": 12, "bucket_strategy": "resolution_frames"},
            "frame_interval",
            "num_frames 61 gives every clip the same length",
        ),
    ],
)
def test_keys_without_effect(
    context: DataContext, video: dict[str, Any], where: str, words: str
) -> None:
    rules, (problem,) = rules_of(context, video)
    assert rules is not None
    assert rules.num_frames == 61
    assert (problem.where, problem.fatal) == (f"films.video.{where}", False)
    assert words in problem.message


def test_pictures_have_no_clip_rules(context: DataContext) -> None:
    assert (
        rules_of(context, {}, "image")
        == rules_of(context, {"is_i2v": False}, "image")
        == (None, [])
    )
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


def test_min_frames_is_the_interval_where_lengths_differ(context: DataContext) -> None:
    rules, _ = rules_of(context, {"frame_interval": 12, "bucket_strategy": "resolution_frames"})
    assert rules is not None
    assert (rules.num_frames, rules.minimum) == (None, 12)
    with pytest.raises(LeftOutError):
        rules.frames_of(ClipFacts(96, 64, 11 / 24, 24))


def test_i2v_is_the_rule_on_i2v_flavours_and_leaves_frames_to_train(context: DataContext) -> None:
    i2v = replace(context, task="i2v")
    for run, video, expected in (
        (i2v, {}, True),
        (i2v, {"is_i2v": False}, False),
        (context, {}, False),
    ):
        rules, problems = rules_of(run, video)
        assert rules is not None
        assert (rules.is_i2v, problems) == (expected, [])
    _, problems = rules_of(i2v, {"num_frames": 1})
    assert "not trained; the minimum is 5" in str(problems[0])


def test_clips_become_samples(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [17, 30])
    (root / "film_017.txt").write_text("a short film\nanother caption")
    (root / "film_030.txt").write_text("a long film")
    dataset, problems = build(context, root, {"num_frames": 17}, caption_strategy="textfile")
    assert not problems
    sample = dataset.samples[0]
    assert (sample.name, sample.original_size, sample.geometry.size) == (
        "film_017.mp4",
        (96, 64),
        (80, 48),
    )
    assert (sample.frames, sample.frame_rate, sample.is_i2v) == (17, 24, False)
    assert sample.captions == ("a short film", "another caption")
    assert lengths_of(dataset.samples) == [17, 17]
    assert list(dataset.buckets) == ["1.5"]
    assert dataset.ledger()[0].frames == 17


def test_lengths_count_after_resampling(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [60], rate=60)
    dataset, _ = build(context, root, {"num_frames": 21})
    assert lengths_of(dataset.samples) == [21]
    _, problems = build(context, root, {"num_frames": 29})
    assert "has 24 frames at 24 fps" in str(next(problem for problem in problems if problem.fatal))


def test_clips_outside_the_lengths_are_counted_with_what_would_do(
    context: DataContext, tmp_path: Path
) -> None:
    root = films(tmp_path / "films", [1, 16, 17, 30, 40])
    dataset, problems = build(
        context, root, {"num_frames": 17, "max_frames": 30}, delete_unwanted_images=True
    )
    assert lengths_of(dataset.samples) == [17, 17]
    assert dataset.counts() == {"too short": 2, "too long": 1}
    uses = {entry.name: entry.use for entry in dataset.ledger()}
    assert uses["film_016.mp4"] == (
        "has 16 frames at 24 fps, fewer than video.min_frames 17; num_frames and "
        "min_frames 13 would work"
    )
    assert uses["film_001.mp4"].startswith("has 1 frame at 24 fps, ")
    assert uses["film_040.mp4"].endswith("more than video.max_frames 30; 40 would work")
    (problem,) = problems
    assert (
        "3 files are left out: 2 too short (film_001.mp4, film_016.mp4); 1 too long"
        in problem.message
    )


def test_when_no_clip_is_long_enough_the_error_says_what_would_do(
    context: DataContext, tmp_path: Path
) -> None:
    _, problems = build(context, films(tmp_path / "films", [10]))
    (problem,) = (problem for problem in problems if problem.fatal)
    assert "no samples detected in dataset films" in problem.message
    assert "num_frames and min_frames 9 would work" in problem.message


def test_buckets_of_size_and_length(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [20, 24, 40, 50])
    films(root / "wide", [40], size=(96, 48))
    video = {"frame_interval": 12, "bucket_strategy": "resolution_frames"}
    dataset, problems = build(context, root, video)
    assert not problems
    groups = {
        label: [sample.name for sample in samples] for label, samples in dataset.buckets.items()
    }
    assert groups == {
        "80x48@9": ["film_020.mp4"],
        "80x48@21": ["film_024.mp4"],
        "80x48@33": ["film_040.mp4"],
        "80x48@45": ["film_050.mp4"],
        "96x48@33": ["wide/film_040.mp4"],
    }
    dataset, _ = build(context, root, {"num_frames": 17, "bucket_strategy": "resolution_frames"})
    assert list(dataset.buckets) == ["80x48@17", "96x48@17"]
    dataset, _ = build(context, root, {"num_frames": 17})
    assert list(dataset.buckets) == ["1.5", "2.0"]


def test_the_guides_size_and_label(tmp_path: Path, context: DataContext) -> None:
    root = films(tmp_path / "films", [5], size=(1280, 720))
    context = replace(context, defaults=DatasetDefaults(resolution=480))
    video = {"num_frames": 5, "bucket_strategy": "resolution_frames"}
    dataset, _ = build(context, root, video, resolution_type="pixel", aspect_bucket_alignment="16")
    assert list(dataset.buckets) == ["848x480@5"]
    dataset, _ = build(context, root, {"num_frames": 5})
    assert list(dataset.buckets) == ["1.78"]


def test_one_warning_for_speed_with_the_factors(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [24, 36], rate=12)
    _, problems = build(context, root, {"num_frames": 17, "frame_rate": 30})
    (problem,) = problems
    assert problem.where == "films.video.frame_rate"
    assert "taken at 30 fps and the model plays 24" in problem.message
    assert "0.80 times as fast" in problem.message
    assert (
        "fewer than the 30 frames per second that are taken, in 2 of 2 clips (" in problem.message
    )
    assert "film_024.mp4 has 12): frames are seen up to 2.50 times" in problem.message
    _, problems = build(
        context, films(tmp_path / "usual", [24], rate=24000 / 1001), {"num_frames": 17}
    )
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
    root = films(tmp_path / "films", [17])
    for name, write in BROKEN.items():
        write(root / name)
    SHOWN_OTHERWISE["pq.mp4"][0](root / "pq.mp4")
    pictures.photograph(root / "still.png", (96, 64))
    pictures.photograph(root / "moving.webp", (96, 64))
    (root / "notes.md").write_text("x")
    (root / "lost.txt").write_text("x")
    dataset, problems = build(context, root, {"num_frames": 17})
    uses = {entry.name: entry.use for entry in dataset.ledger()}
    assert sorted(uses) == sorted(path.name for path in root.iterdir())
    unsuitable = [
        "page.webm",
        "picture.mov",
        "playlist.mp4",
        "pq.mp4",
        "text.mp4",
        "voice.avi",
        "voice.mp4",
    ]
    counts = {
        "damaged": len(BROKEN) - 6,
        "unsuitable": 7,
        "not a clip": 1,
        "caption without a file": 1,
    }
    counts["picture among clips"] = 2
    assert dataset.counts() == counts
    assert (
        sorted(file.name for file in dataset.rejected if file.reason == "unsuitable") == unsuitable
    )
    # The index keeps the reasons; those that one of an earlier version lacks are found again.
    for index in (
        dataset.facts,
        {name: replace(fact, reason="") for name, fact in dataset.facts.items()},
    ):
        file_index.save_index(dataset.latent_dir, root, index)
        again, _ = build(context, root, {"num_frames": 17})
        assert again.counts() == counts
    assert "separate dataset" in uses["still.png"]
    assert "convert an animation to .mp4 or .gif" in uses["moving.webp"]
    assert not [problem for problem in problems if problem.fatal]


@pytest.mark.parametrize(
    ("video", "said"),
    [
        ({}, "interlaced: 1 of 2 clips (interlaced.mkv); two fields become one frame (bwdif)."),
        (
            {"reader": "decord"},
            "interlaced: 1 of 2 clips (interlaced.mkv); decord does not deinterlace",
        ),
    ],
)
def test_interlaced_clips_are_announced(
    video: dict[str, Any], said: str, context: DataContext, tmp_path: Path
) -> None:
    pytest.importorskip("decord")
    root = films(tmp_path / "films", [17])
    codec, options = INTERLACED["interlaced.mkv"]
    write_interlaced(root / "interlaced.mkv", codec, **options)
    dataset, problems = build(context, root, {"num_frames": 17, **video})
    assert said in problems[0].message
    notes = {entry.name: entry.note for entry in dataset.ledger()}
    assert notes["interlaced.mkv"].endswith("decoded by decord" if video else "deinterlaced")


def test_clips_that_only_decord_reads_are_announced(
    context: DataContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = films(tmp_path / "films", [17])
    facts = ClipFacts(96, 64, 17 / 24, 24, reader="decord")
    monkeypatch.setattr(file_index, "probe_clip", lambda path: facts)
    dataset, problems = build(context, root, {"num_frames": 17})
    assert [sample.clip for sample in dataset.samples] == [facts]
    assert problems[0].message.startswith(
        "PyAV cannot read 1 of 1 clip (film_017.mp4); decord reads them"
    )


def test_decord_is_asked_for_only_where_it_is_installed(
    context: DataContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, problems = rules_of(context, {"reader": "decord"})
    assert [(problem.where, problem.fatal) for problem in problems] == [
        ("films.video.reader", True)
    ]
    _, problems = rules_of(context, {"reader": "pyav"})
    assert not problems


def test_latents_of_clips_of_earlier_versions_are_named(
    context: DataContext, tmp_path: Path
) -> None:
    root = films(tmp_path / "films", [17])
    dataset, problems = build(context, root, {"num_frames": 17})
    assert not problems, "nothing has been cached"
    dataset.save_index()
    index = dataset.latent_dir / file_index.INDEX_NAME
    assert build(context, root, {"num_frames": 17})[1] == [], "cached by this version"
    version = f'"version":{file_index.INDEX_VERSION}'
    index.write_text(index.read_text().replace(version, '"version":4'))
    (problem,) = build(context, root, {"num_frames": 17})[1]
    assert not problem.fatal
    assert problem.message.startswith("the latents of 1 clip are made again")
    assert "cache gc --remove" in problem.message


def test_pictures_are_clips_of_one_frame_in_their_own_dataset(
    context: DataContext, tmp_path: Path
) -> None:
    pictures.photograph(tmp_path / "stills" / "a.png", (96, 64))
    films(tmp_path / "stills", [17])
    dataset, problems = build(
        replace(context, task="i2v"), tmp_path / "stills", dataset_type="image"
    )
    assert [problem.fatal for problem in problems] == [False]
    (sample,) = dataset.samples
    assert (sample.frames, sample.frame_rate, sample.is_i2v) == (1, None, False)
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
    shutil.rmtree(root)
    third, _ = build(
        replace(
            context, defaults=context.defaults.model_copy(update={"ignore_missing_files": True})
        ),
        root,
        {"num_frames": 13},
    )
    assert lengths_of(third.samples) == [13]


def test_a_random_crop_keeps_the_length(context: DataContext, tmp_path: Path) -> None:
    root = films(tmp_path / "films", [17], size=(128, 64))
    video = {"num_frames": 17, "bucket_strategy": "resolution_frames"}
    dataset, _ = build(context, root, video, crop=True, crop_style="random")
    places = {dataset.at_epoch(epoch).samples[0].geometry.crop for epoch in range(1, 9)}
    assert len(places) > 1
    assert {dataset.at_epoch(epoch).samples[0].geometry.bucket for epoch in range(1, 9)} == {
        "64x64@17"
    }


@pytest.mark.parametrize(("second", "fatal"), [("24", 0), (30, 1)])
def test_both_names_of_the_rate(second: object, fatal: int, tmp_path: Path) -> None:
    file = tmp_path / "datasets.json"
    value = f'"{second}"' if isinstance(second, str) else second
    file.write_text(f'[{{"id": "films", "video": {{"frame_rate": 24, "framerate": {value}}}}}]')
    problems = Problems()
    (entry,) = read_datasets(file, problems, placeholders={})
    assert entry.video.frame_rate == 24 or fatal
    assert len([problem for problem in problems if problem.fatal]) == fatal
    assert not fatal or "given twice" in str(problems[0])


@pytest.mark.parametrize(("written", "read"), [(None, "bt709"), ("bt601", "bt601")])
def test_the_ledger_says_how_colours_are_read_and_a_key_decides(
    context: DataContext, tmp_path: Path, written: str | None, read: str
) -> None:
    write_plain(tmp_path / "films" / "hd.mp4", (1280, 64), (200, 40, 90), "bt709", tagged=False)
    write_plain(tmp_path / "films" / "says.mp4", (1280, 64), (200, 40, 90), "bt709", tagged=True)
    dataset, _ = build(context, tmp_path / "films", {"num_frames": 5, "color_matrix": written})
    assert [sample.clip and sample.clip.matrix for sample in dataset.samples] == [read, None]
    notes = [entry.note for entry in dataset.ledger()]
    assert notes == ["counts as BT.709" if read == "bt709" else "", ""]
