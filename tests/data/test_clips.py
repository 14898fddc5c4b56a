"""Clips of every kind: each reader sees the right frames, by their times, or says that it
cannot.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
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
# How long a frame stays, where that is more than 1/24 s.
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
    stays = LONGEST_FRAME.get(name, 1 / 23.9)
    for moment, frame in zip(moments, frames, strict=True):
        assert frame.shape == (HEIGHT, WIDTH, 3)
        assert moment - stays - COLOUR_ERROR < time_in(frame) < moment + COLOUR_ERROR
    for seen, wanted in zip(
        corners(Image.fromarray(frames[0])), [RED, GREEN, BLUE, WHITE], strict=True
    ):
        assert np.abs(np.subtract(seen, wanted)).max() <= 12, (seen, wanted)


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


@pytest.mark.parametrize("name", WHOLE)
def test_facts_are_known_without_decoding_and_frames_come_from_the_reader_that_can(
    name: str, folder: Path
) -> None:
    facts = probe_clip(folder / name)
    assert (facts.width, facts.height) == (WIDTH, HEIGHT)
    assert facts.seconds == pytest.approx(SECONDS, abs=0.07)
    rates = {
        "slow.mp4": 12,
        "fast.mp4": 60,
        "uneven.mp4": 20.5,
        "uneven.mkv": 20.5,
        "animated.gif": 20,
    }
    assert facts.source_rate == pytest.approx(rates.get(name, 24), rel=0.01)
    if not name.startswith("uneven"):
        assert [facts.frames_at(rate) for rate in (24, 12, 1)] == [48, 24, 2]
    frames = [np.asarray(frame) for frame in frames_of(folder / name, 32, 16, facts)]
    check_frames(name, moments_of(32, 16), frames)


@pytest.mark.parametrize("rate", [16, 24, 25, 30, 60, 24000 / 1001])
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_a_clip_gives_all_its_frames_at_its_own_rate(
    suffix: str, rate: float, tmp_path: Path
) -> None:
    path = tmp_path / f"clip{suffix}"
    for frames in (1, 5, 121):
        write_clip(
            path,
            rate=rate,
            seconds=frames / rate,
            size=(32, 32),
            codec_options={"preset": "ultrafast"},
        )
        assert probe_clip(path).frames_at(rate) == frames


def test_other_rates_take_other_frames_of_the_source(folder: Path) -> None:
    own = read_clip(folder / "h264.mp4", 48, 24)
    assert np.array_equal(
        read_clip(folder / "h264.mp4", 32, 16), own[[k * 3 // 2 for k in range(32)]]
    )
    assert np.array_equal(read_clip(folder / "h264.mp4", 96, 48), own[[k // 2 for k in range(96)]])


def test_moments_find_the_frame_that_is_shown() -> None:
    times = [0, 0.042, 0.083, 0.125]
    assert list(choose_frames(enumerate(times), [0, 1 / 24, 2 / 24, 0.11, 3 / 24, 9])) == [
        0,
        1,
        2,
        2,
        3,
        3,
    ]
    assert list(choose_frames(enumerate(times), [0.038, 0.078])) == [0, 1], "not yet shown"
    assert list(choose_frames(enumerate(times), [0.042, 0.078])) == [1, 2], (
        "rather the next one than one twice"
    )


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
    expected = {
        "empty": "is empty",
        "picture": "is a picture",
        "voice": "only sound",
        "text": "holds text",
    }
    words = next((words for start, words in expected.items() if name.startswith(start)), "")
    assert words in str(probed.value)
    assert ("truncated" in str(probed.value)) == (name.startswith("cut") and name != "cut.mp4")


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


def test_more_frames_than_there_are_is_an_error(folder: Path) -> None:
    with pytest.raises(MediaError, match=r"ends after 2\.00 seconds"):
        read_clip(folder / "h264.mp4", 80, 24)


def test_tags_may_be_in_any_encoding(folder: Path, tmp_path: Path) -> None:
    """PyAV 17 and 18 raise unless they are told to skip such tags; 19 knows no such word."""
    content = (folder / "h264.mp4").read_bytes()
    assert b"Lavf" in content
    path = tmp_path / "latin-1.mp4"
    path.write_bytes(content.replace(b"Lavf", "Läv-".encode("latin-1")))
    assert next(read_with_av(path, [0.5])) == next(read_with_av(folder / "h264.mp4", [0.5]))


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
            damaged[numbers.randrange(min(len(damaged), numbers.choice((64, 4096))))] = (
                numbers.randrange(256)
            )
        path.write_bytes(bytes(damaged))
        try:
            facts = probe_clip(path)
            if facts.frames_at(24) <= 24:
                read_clip(path, facts.frames_at(24), 24)
        except MediaError:
            pass


@pytest.mark.parametrize("size", [(97, 65), (33, 50)])
def test_odd_sizes(size: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "odd.mkv"
    write_clip(path, size=size, pixel_format="yuv444p", seconds=0.25)
    facts = probe_clip(path)
    assert (facts.width, facts.height) == size
    assert read_clip(path, 6, 24).shape == (6, size[1], size[0], 3)


def test_one_frame(tmp_path: Path) -> None:
    write_clip(tmp_path / "one.mp4", times=[0.0])
    facts = probe_clip(tmp_path / "one.mp4")
    assert (facts.source_rate, facts.frames_at(24)) == (0, 1)
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
    frames = [filmed(index / 24) for index in range(5)]
    geometry = Geometry("1.0", Size(32, 32), Size(48, 32), (8, 0))
    fitted = fit_clip(map(Image.fromarray, frames), geometry)
    assert fitted.shape == (5, 32, 32, 3)
    singles = [
        np.asarray(Image.fromarray(frame).resize((48, 32), Image.Resampling.LANCZOS))
        for frame in frames
    ]
    assert np.abs(fitted.astype(int) - np.stack(singles)[:, :, 8:40]).max() <= 1


def test_suffixes_are_those_of_the_specification() -> None:
    kinds = ["mp4", "mov", "avi", "mkv", "webm", "flv", "wmv", "m4v", "mpeg", "mpg", "3gp", "ogv"]
    kinds += ["gif", "ts", "mts", "m2ts"]
    assert {f".{kind}" for kind in kinds} == clips.CLIP_SUFFIXES


def test_planning_needs_no_torch_and_pictures_need_no_readers() -> None:
    code = (
        "import simpletuner.data.build, sys; assert not {'torch', 'av', 'decord'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    code = (
        "import simpletuner.data.clip_facts, simpletuner.data.clip_writer, sys; assert 'torch' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def rounded(frames: int, rate: float, unit: Fraction | None) -> tuple[list[float], ClipFacts]:
    """When frames begin in a container that counts in such units, and what is measured of the
    clip.
    """
    times = [
        index / rate if unit is None else float(round(index / rate / unit) * unit)
        for index in range(frames)
    ]
    return times, ClipFacts(64, 64, times[-1] + 1 / rate, (frames - 1) / times[-1])


UNITS = (None, Fraction(1, 1000), Fraction(1, 600), Fraction(1, 90000))
TARGETS = ((16, 81), (24, 121), (24, 241), (15, 81), (30, 121), (23.976, 121))


@pytest.mark.parametrize(
    "source",
    [
        *(whole * 1000 / 1001 for whole in (24, 30, 48, 60, 120)),
        24,
        25,
        30,
        50,
        60,
        24.04,
        29.9,
        31.7,
    ],
)
def test_no_frame_is_taken_twice_and_speed_is_exact(source: float) -> None:
    """Rates with 1001 below the line count as the whole ones, so that every step is the same as
    theirs.
    """
    for unit, (target, length) in product(UNITS, TARGETS):
        times, clip = rounded(round(length * source / target) + 20, source, unit)
        if source < target * 0.998:
            continue
        taken = list(choose_frames(enumerate(times), clip.moments(length, target)))
        steps = np.diff(taken)
        assert steps.min() >= 1, (unit, target, taken)
        exact = clip.slowed(1000.0 if abs(source / target - 1) > 0.002 else target)
        assert exact == pytest.approx(1, abs=0.0021)
        whole = [index * round(source) / round(target) for index in range(length)]
        if abs(source / round(source) - 1) <= 0.002 and float(round(source)) != source:
            assert np.abs(np.subtract(taken, whole)).max() <= 1.0, (unit, target)
        if abs(source / target - 1) <= 0.002:
            assert steps.max() == 1, (unit, target)
        assert clip.frames_at(target) >= length, (unit, target)


@pytest.mark.parametrize(
    ("source", "target"), [(24000 / 1001, 24), (30000 / 1001, 15), (60000 / 1001, 24)]
)
def test_written_clips_of_television_rates(source: float, target: float, tmp_path: Path) -> None:
    path = tmp_path / "tv.mp4"
    length = 121
    write_clip(
        path,
        rate=source,
        seconds=length / target * 1.001,
        size=(32, 32),
        codec_options={"preset": "ultrafast"},
    )
    clip = probe_clip(path)
    assert clip.frames_at(target) == length
    moments = clip.moments(length, target)
    for frames in (read_with_av(path, moments), read_clip(path, length, target)):
        brightness = [float(np.asarray(frame)[14:18, 14:18].mean()) for frame in frames]
        whole = [int(index * round(source) / target) / source for index in range(length)]
        shown = [min(255.0, 50 + round(time * 80)) for time in whole]
        assert np.abs(np.subtract(brightness, shown)).max() < 3


@pytest.mark.parametrize(
    ("size", "guessed"), [((1280, 64), "bt709"), ((64, 720), "bt709"), ((96, 64), "bt601")]
)
@pytest.mark.parametrize("tagged", [True, False])
def test_colours_of_clips_that_do_not_say_how_are_read_as_players_do(
    size: tuple[int, int], guessed: str, tagged: bool, tmp_path: Path
) -> None:
    path = tmp_path / "red.mp4"
    colour = (200, 40, 90)
    write_plain(
        path, size, colour, "bt709" if tagged or guessed == "bt709" else "bt601", tagged=tagged
    )
    clip = probe_clip(path)
    assert clip.matrix == (None if tagged else guessed)
    assert np.abs(read_clip(path, 2, 24)[:, 8, 8].astype(int) - colour).max() <= 2
    by_av = np.asarray(next(read_with_av(path, [0.0], clip.matrix)))
    assert np.abs(by_av[8, 8].astype(int) - colour).max() <= 2
    other = replace(clip, matrix="bt601" if guessed == "bt709" else "bt709")
    if not tagged:  # the dataset's key, where the guess is wrong
        wrong = np.asarray(next(frames_of(path, 1, 24, other)))
        assert np.abs(wrong[8, 8].astype(int) - colour).max() >= 10


def test_a_clip_is_damaged_only_when_it_cannot_be_decoded_twice() -> None:
    """FFmpeg calls a device's stumbling and broken data by one name."""
    results: list[Exception | int] = [MediaError("Input/output error"), 1]

    def attempt() -> int:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    assert clips.retry_once(attempt) == 1
    results[:] = [MediaError("one"), MediaError("two")]
    with pytest.raises(MediaError, match="two"):
        clips.retry_once(attempt)
