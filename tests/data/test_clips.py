"""Clips of every kind: each reader shows the right frames, by their times, or refuses the clip."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from simpletuner.config.types import Size
from simpletuner.data import clip_frames, clips
from simpletuner.data.buckets import Geometry
from simpletuner.data.clip_decord import read_with_decord
from simpletuner.data.clip_frames import read_with_av
from simpletuner.data.clips import (
    ClipFacts,
    ColorMatrix,
    choose_frames,
    fit_clip,
    frames_of,
    moments_of,
    probe_clip,
)
from simpletuner.data.files import MediaError, UnsuitableError
from tests.tools.cases import first_of
from tests.tools.clips import (
    BROKEN,
    HEIGHT,
    SECONDS,
    SHOWN_OTHERWISE,
    WHOLE,
    WIDTH,
    filmed,
    read_clip,
    time_in,
    write_clip,
    write_plain,
    write_with_colours,
)
from tests.tools.pictures import BLUE, GREEN, RED, WHITE, corners

# What decord cannot read, or would read wrongly; PyAV reads all of them.
NOT_FOR_DECORD = {
    "h264.avi",
    "old.mpg",
    "old.mpeg",
    "av1.mp4",
    "live.mkv",
    "live.webm",
    "no-index.avi",
    "broken-index.avi",
    "edited.mp4",
    "stream.ts",
    "camera.m2ts",
    "animated.gif",
}
# How long a frame is shown, where that is more than 1/24 s.
LONGEST_FRAME = {"uneven.mp4": 0.1, "uneven.mkv": 0.1, "slow.mp4": 1 / 12, "animated.gif": 1 / 20}
COLOUR_ERROR = 0.03


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every clip, written once."""
    root = tmp_path_factory.mktemp("clips")
    for name, write in {**WHOLE, **BROKEN}.items():
        write(root / name)
    return root


@pytest.mark.skipif(not hasattr(os, "sched_getscheduler"), reason="Linux only")
def test_no_encoder_changes_the_priority_of_the_tests(tmp_path: Path) -> None:
    before = os.sched_getscheduler(0)
    WHOLE["av1.mp4"](tmp_path / "av1.mp4")

    assert os.sched_getscheduler(0) == before


READERS = {"av": read_with_av, "decord": read_with_decord}
# Frames as the clip has them, then repeated, then skipped.
MOMENTS = [index / 24 for index in range(18)] + [0.75 + index / 30 for index in range(15)]
MOMENTS += [1.25 + index / 7 for index in range(5)]


def check_frames(name: str, moments: Sequence[float], frames: Sequence[NDArray[np.uint8]]) -> None:
    """What each frame shows is upright, in colour and of its time."""
    duration = LONGEST_FRAME.get(name, 1 / 23.9)
    for moment, frame in zip(moments, frames, strict=True):
        assert frame.shape == (HEIGHT, WIDTH, 3)
        assert moment - duration - COLOUR_ERROR < time_in(frame) < moment + COLOUR_ERROR
    first = corners(Image.fromarray(frames[0]))
    for colour, expected in zip(first, [RED, GREEN, BLUE, WHITE], strict=True):
        assert np.abs(np.subtract(colour, expected)).max() <= 12, (colour, expected)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_shows_the_frames_of_their_times_or_refuses(
    reader: str, name: str, folder: Path
) -> None:
    if reader == "decord":
        pytest.importorskip("decord")
    frames = READERS[reader](folder / name, MOMENTS)

    if reader == "decord" and name in NOT_FOR_DECORD:
        with pytest.raises(UnsuitableError):
            list(frames)
    else:
        check_frames(name, MOMENTS, [np.asarray(frame) for frame in frames])


RATES = {"slow.mp4": 12, "fast.mp4": 60, "uneven.mp4": 20.5, "uneven.mkv": 20.5, "animated.gif": 20}


@pytest.mark.parametrize("name", WHOLE)
def test_every_clip_is_probed(name: str, folder: Path) -> None:
    facts = probe_clip(folder / name)

    assert (facts.width, facts.height) == (WIDTH, HEIGHT)
    assert facts.seconds == pytest.approx(SECONDS, abs=0.07)
    assert facts.source_rate == pytest.approx(RATES.get(name, 24), rel=0.01)
    if not name.startswith("uneven"):
        assert [facts.frames_at(rate) for rate in (24, 12, 1)] == [48, 24, 2]


@pytest.mark.parametrize("name", WHOLE)
def test_every_clip_is_read_by_the_reader_of_its_facts(name: str, folder: Path) -> None:
    facts = probe_clip(folder / name)
    frames = [np.asarray(frame) for frame in frames_of(folder / name, 32, 16, facts)]
    check_frames(name, moments_of(32, 16), frames)


@pytest.mark.parametrize("rate", [16, 24, 25, 30, 60, 24000 / 1001])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_a_clip_gives_all_its_frames_at_its_own_rate(
    suffix: str, rate: float, tmp_path: Path
) -> None:
    path = tmp_path / f"clip{suffix}"
    options = {"preset": "ultrafast"}
    for frames in (1, 5, 121):
        write_clip(path, rate=rate, seconds=frames / rate, size=(32, 32), codec_options=options)
        assert probe_clip(path).frames_at(rate) == frames


def test_other_rates_take_other_frames_of_the_source(folder: Path) -> None:
    path = folder / "h264.mp4"
    source = read_clip(path, 48, 24)

    slower = read_clip(path, 32, 16)
    faster = read_clip(path, 96, 48)

    assert np.array_equal(slower, source[[index * 3 // 2 for index in range(32)]])
    assert np.array_equal(faster, source[[index // 2 for index in range(96)]])


@pytest.mark.parametrize(
    ("moments", "frames"),
    [
        ([0, 1 / 24, 2 / 24, 0.11, 3 / 24, 9], [0, 1, 2, 2, 3, 3]),
        ([0.038, 0.078], [0, 1]),  # the next frame is not shown yet
        ([0.042, 0.078], [1, 2]),  # the next frame is taken early, rather than this one twice
    ],
)
def test_each_moment_has_the_frame_that_is_shown(moments: list[float], frames: list[int]) -> None:
    starts = [0, 0.042, 0.083, 0.125]
    assert list(choose_frames(enumerate(starts), moments)) == frames


@pytest.mark.parametrize("name", SHOWN_OTHERWISE)
def test_clips_that_a_player_shows_otherwise_are_refused(name: str, tmp_path: Path) -> None:
    write, reason = SHOWN_OTHERWISE[name]
    write(tmp_path / name)

    with pytest.raises(MediaError, match=re.escape(reason)):
        probe_clip(tmp_path / name)


def test_ordinary_colours_are_read(tmp_path: Path) -> None:
    """BT.709 says so in every file of a camera."""
    write_with_colours(1, 1)(tmp_path / "camera.mp4")
    assert probe_clip(tmp_path / "camera.mp4").frames_at(24) == 5


@pytest.mark.parametrize("name", BROKEN)
def test_broken_clips_are_found_without_decoding_them(name: str, folder: Path) -> None:
    with pytest.raises(MediaError) as probed:
        probe_clip(folder / name)

    message = str(probed.value)
    for start, words in BROKEN_WORDS.items():
        if name.startswith(start):
            assert words in message
    assert ("truncated" in message) == (name.startswith("cut") and name != "cut.mp4")


# What is said about broken clips whose names begin so.
BROKEN_WORDS = {
    "empty": "is empty",
    "picture": "is a picture",
    "voice": "only sound",
    "text": "holds text",
}


def test_a_playlist_does_not_open_its_neighbours(folder: Path) -> None:
    playlist = folder / "list.mp4"
    playlist.write_text("ffconcat version 1.0\nfile h264.mp4\n")

    with pytest.raises(MediaError, match="is named like a clip, but holds text"):
        probe_clip(playlist)


@pytest.mark.parametrize(
    "name", [name for name in BROKEN if not name.startswith(("cut", "picture"))]
)
def test_broken_clips_give_no_frames(name: str, folder: Path) -> None:
    with pytest.raises(MediaError):
        read_clip(folder / name, 2, 24)


def test_more_frames_than_a_clip_has_are_an_error(folder: Path) -> None:
    with pytest.raises(MediaError, match=r"ends after 2\.00 seconds"):
        read_clip(folder / "h264.mp4", 80, 24)


def test_tags_may_be_in_any_encoding(folder: Path, tmp_path: Path) -> None:
    """PyAV 17 and 18 raise unless an option makes them skip such tags, which 19 does not have."""
    content = (folder / "h264.mp4").read_bytes()
    assert b"Lavf" in content

    path = tmp_path / "latin-1.mp4"
    path.write_bytes(content.replace(b"Lavf", "Läv-".encode("latin-1")))

    frame = next(read_with_av(path, [0.5]))

    assert frame == next(read_with_av(folder / "h264.mp4", [0.5]))


def test_a_missing_clip_is_a_media_error(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="cannot be read"):
        probe_clip(tmp_path / "gone.mp4")


@pytest.mark.parametrize("suffix", first_of([".mp4", ".mkv", ".webm", ".avi"]))
def test_random_damage_never_escapes_as_another_error(suffix: str, tmp_path: Path) -> None:
    numbers = random.Random(0)
    path = tmp_path / f"clip{suffix}"
    write_clip(path, seconds=0.5)
    content = path.read_bytes()
    for _ in range(25):
        damaged = bytearray(content)
        for _ in range(numbers.choice((1, 8, 64))):
            position = numbers.randrange(min(len(damaged), numbers.choice((64, 4096))))
            damaged[position] = numbers.randrange(256)
        path.write_bytes(bytes(damaged))
        with suppress(MediaError):
            facts = probe_clip(path)
            if facts.frames_at(24) <= 24:
                read_clip(path, facts.frames_at(24), 24)


@pytest.mark.parametrize("size", [(97, 65), (33, 50)])
def test_clips_of_odd_sizes_lose_no_pixel(size: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "odd.mkv"
    write_clip(path, size=size, pixel_format="yuv444p", seconds=0.25)
    facts = probe_clip(path)

    assert (facts.width, facts.height) == size
    assert read_clip(path, 6, 24).shape == (6, size[1], size[0], 3)


def test_a_clip_of_one_frame_has_no_rate(tmp_path: Path) -> None:
    write_clip(tmp_path / "one.mp4", times=[0.0])

    facts = probe_clip(tmp_path / "one.mp4")

    assert facts.source_rate == 0
    assert facts.frames_at(24) == 1
    assert read_clip(tmp_path / "one.mp4", 1, 24).shape == (1, HEIGHT, WIDTH, 3)


def test_pixels_that_are_not_square_are_measured_as_they_are_shown(tmp_path: Path) -> None:
    write_clip(tmp_path / "wide.mp4", aspect=Fraction(4, 3), seconds=0.25)
    facts = probe_clip(tmp_path / "wide.mp4")

    assert (facts.width, facts.height) == (WIDTH * 4 // 3, HEIGHT)


@pytest.mark.slow(1)
def test_memory_is_never_blamed_on_a_clip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(clip_frames.PictureConverter, "_convert", fail)
    with pytest.raises(MemoryError):
        read_clip(folder / "h264.mp4", 2, 24)


def test_every_frame_is_fitted_alike() -> None:
    frames = [Image.fromarray(filmed(index / 24)) for index in range(5)]
    geometry = Geometry("1.0", Size(32, 32), Size(48, 32), (8, 0))

    fitted = fit_clip(frames, geometry)

    assert fitted.shape == (5, 32, 32, 3)

    for frame, pixels in zip(frames, fitted, strict=True):
        resized = np.asarray(frame.resize((48, 32), Image.Resampling.LANCZOS))
        assert np.abs(pixels.astype(int) - resized[:, 8:40]).max() <= 1


def test_suffixes_are_those_of_the_specification() -> None:
    kinds = ["mp4", "mov", "avi", "mkv", "webm", "flv", "wmv", "m4v", "mpeg", "mpg", "3gp", "ogv"]
    kinds += ["gif", "ts", "mts", "m2ts"]

    assert {f".{kind}" for kind in kinds} == clips.CLIP_SUFFIXES


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("simpletuner.data.build", {"torch", "av", "decord"}),
        ("simpletuner.data.clip_facts, simpletuner.data.clip_writer", {"torch"}),
    ],
)
def test_planning_needs_no_torch_and_pictures_need_no_readers(
    modules: str, heavy: set[str]
) -> None:
    code = f"import {modules}, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def rounded(frames: int, rate: float, unit: Fraction | None) -> tuple[list[float], ClipFacts]:
    """When frames begin in a container with such units of time, and the facts of the clip."""
    times = [index / rate for index in range(frames)]
    if unit is not None:
        times = [float(round(time / unit) * unit) for time in times]
    facts = ClipFacts(
        width=64,
        height=64,
        seconds=times[-1] + 1 / rate,
        source_rate=(frames - 1) / times[-1],
    )
    return times, facts


UNITS = (None, Fraction(1, 1000), Fraction(1, 600), Fraction(1, 90000))
# (frames per second, frames)
TARGETS = ((16, 81), (24, 121), (24, 241), (15, 81), (30, 121), (23.976, 121))
TELEVISION_RATES = [whole * 1000 / 1001 for whole in (24, 30, 48, 60, 120)]


@pytest.mark.parametrize("source", [*TELEVISION_RATES, 24, 25, 30, 50, 60, 24.04, 29.9, 31.7])
def test_no_frame_is_taken_twice_and_speed_is_exact(source: float) -> None:
    """Television rates count as the whole ones, so that every step is the same as theirs."""
    whole_source = round(source)
    is_television = abs(source / whole_source - 1) <= 0.002 and float(whole_source) != source
    for unit, (target, length) in product(UNITS, TARGETS):
        if source < target * 0.998:
            continue
        times, clip = rounded(round(length * source / target) + 20, source, unit)
        is_same_rate = abs(source / target - 1) <= 0.002

        taken = list(choose_frames(enumerate(times), clip.moments(length, target)))

        steps = np.diff(taken)
        assert steps.min() >= 1, (unit, target, taken)
        if is_same_rate:
            assert steps.max() == 1, (unit, target)
        assert clip.slowed(target if is_same_rate else 1000.0) == pytest.approx(1, abs=0.0021)
        if is_television:
            expected = [index * whole_source / round(target) for index in range(length)]
            assert np.abs(np.subtract(taken, expected)).max() <= 1.0, (unit, target)
        assert clip.frames_at(target) >= length, (unit, target)


@pytest.mark.parametrize(
    ("source", "target"), [(24000 / 1001, 24), (30000 / 1001, 15), (60000 / 1001, 24)]
)
def test_clips_of_television_rates_are_sampled_as_those_of_whole_rates(
    source: float, target: float, tmp_path: Path
) -> None:
    path = tmp_path / "tv.mp4"
    length = 121
    seconds = length / target * 1.001
    options = {"preset": "ultrafast"}
    write_clip(path, rate=source, seconds=seconds, size=(32, 32), codec_options=options)

    clip = probe_clip(path)

    assert clip.frames_at(target) == length

    # The brightness in the middle grows by 80 levels a second.
    times = [int(index * round(source) / target) / source for index in range(length)]
    expected = [min(255.0, 50 + round(time * 80)) for time in times]
    for frames in (
        read_with_av(path, clip.moments(length, target)),
        read_clip(path, length, target),
    ):
        brightness = [float(np.asarray(frame)[14:18, 14:18].mean()) for frame in frames]
        assert np.abs(np.subtract(brightness, expected)).max() < 3


COLOUR = (200, 40, 90)


def colour_error(frame: object) -> int:
    """Largest difference from `COLOUR` in the corner of a plain frame."""
    return int(np.abs(np.asarray(frame)[8, 8].astype(int) - COLOUR).max())


@pytest.mark.parametrize(
    ("size", "guessed"), [((1280, 64), "bt709"), ((64, 720), "bt709"), ((96, 64), "bt601")]
)
def test_untagged_clips_are_read_with_the_colours_of_players(
    size: tuple[int, int], guessed: ColorMatrix, tmp_path: Path
) -> None:
    path = tmp_path / "red.mp4"
    write_plain(path, size, COLOUR, guessed, tagged=False)

    clip = probe_clip(path)

    assert clip.matrix == guessed
    assert colour_error(next(frames_of(path, 1, 24, clip))) <= 2

    # The dataset's key overrides the guess, which is right here.
    wrong = replace(clip, matrix="bt601" if guessed == "bt709" else "bt709")
    assert colour_error(next(frames_of(path, 1, 24, wrong))) >= 10


@pytest.mark.parametrize("size", [(1280, 64), (64, 720), (96, 64)])
def test_tagged_clips_are_read_with_the_colours_of_their_tag(
    size: tuple[int, int], tmp_path: Path
) -> None:
    path = tmp_path / "red.mp4"
    write_plain(path, size, COLOUR, "bt709", tagged=True)

    clip = probe_clip(path)

    assert clip.matrix is None
    assert colour_error(next(frames_of(path, 1, 24, clip))) <= 2


@pytest.mark.parametrize(
    "results", [[1], [MediaError("Input/output error"), 1], [MediaError("one"), MediaError("two")]]
)
def test_a_clip_is_damaged_only_when_it_cannot_be_decoded_twice(
    results: list[Exception | int],
) -> None:
    """FFmpeg has one name for a failing device and for damaged data."""
    remaining = list(results)

    def attempt() -> int:
        result = remaining.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    if results[-1] == 1:
        assert clips.retry_once(attempt) == 1
    else:
        with pytest.raises(MediaError, match="two"):
            clips.retry_once(attempt)
    assert not remaining
