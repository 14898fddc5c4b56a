"""Clips that this program writes: their times, colours and sizes."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from simpletuner.data import clip_writer
from simpletuner.data.clip_writer import write_mp4
from simpletuner.data.clips import probe_clip
from tests.tools.clips import filmed, read_clip, time_in


def film(count: int, rate: float, size: tuple[int, int] = (96, 64)) -> list[Image.Image]:
    return [Image.fromarray(filmed(index / rate, size)) for index in range(count)]


@pytest.mark.parametrize("rate", [24, 16, 23.976, 12.5])
def test_a_written_clip_has_every_frame_at_its_time(rate: float, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "clip.mp4"

    write_mp4(path, film(25, rate), rate)

    facts = probe_clip(path)
    assert (facts.width, facts.height) == (96, 64)
    assert facts.frames_at(rate) == 25
    assert facts.source_rate == pytest.approx(rate, rel=1e-3)

    times = [time_in(frame) for frame in read_clip(path, 25, rate)]
    assert times == pytest.approx([index / rate for index in range(25)], abs=0.03)


def test_colours_survive_and_are_declared(tmp_path: Path) -> None:
    colours = [(200, 30, 30), (30, 180, 40), (40, 50, 200), (255, 255, 255), (0, 0, 0)]
    pictures = [Image.new("RGB", (64, 64), colour) for colour in colours]

    write_mp4(tmp_path / "a.mp4", pictures, 24)

    frames = read_clip(tmp_path / "a.mp4", 5, 24)
    assert np.abs(frames[:, 32, 32].astype(int) - colours).max() <= 3

    with av.open(str(tmp_path / "a.mp4")) as container:
        context = container.streams.video[0].codec_context
        assert context.name == "h264"
        assert context.pix_fmt == "yuv420p"
        assert context.colorspace == 1  # BT.709
        assert context.color_range == 1  # limited


def test_odd_sizes_lose_their_last_pixel(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", film(5, 24, (97, 65)), 24)
    facts = probe_clip(tmp_path / "a.mp4")

    assert (facts.width, facts.height) == (96, 64)


def test_a_single_transparent_picture_becomes_a_clip(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", [Image.new("RGBA", (64, 64), "red")], 24)

    assert probe_clip(tmp_path / "a.mp4").frames_at(24) == 1


def test_a_browser_can_play_from_the_start(tmp_path: Path) -> None:
    write_mp4(tmp_path / "a.mp4", film(5, 24), 24)
    content = (tmp_path / "a.mp4").read_bytes()

    assert content.index(b"moov") < content.index(b"mdat")


def test_a_failed_write_keeps_the_existing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mp4(tmp_path / "a.mp4", film(5, 24), 24)
    before = (tmp_path / "a.mp4").read_bytes()

    def fail(picture: Image.Image) -> None:
        raise RuntimeError("stopped")

    monkeypatch.setattr(clip_writer, "_to_yuv", fail)
    with pytest.raises(RuntimeError):
        write_mp4(tmp_path / "a.mp4", film(5, 24), 24)
    assert (tmp_path / "a.mp4").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
