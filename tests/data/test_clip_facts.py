"""Facts of clips: frames count by the times at which they are shown; only lost bytes are missed."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import av
import numpy as np
import pytest
from av.error import PatchWelcomeError

from simpletuner.data import clip_facts
from simpletuner.data.clip_file import ClipFile
from simpletuner.data.clip_truncation import DECLARED_ENDS, is_truncated
from simpletuner.data.clips import probe_clip
from simpletuner.data.files import MediaError, UnsuitableError
from tests.tools.clips import (
    animated,
    read_clip,
    starting_within_a_frame,
    time_in,
    with_comment,
    without_end_mark,
    write_clip,
    write_held,
    write_with_hidden_frames,
)
from tests.tools.pictures import Writer

# Intact clips whose packets, durations or ends look as if something were missing, with their
# seconds and their rate.
INTACT: dict[str, tuple[Writer, float, float]] = {
    "held.mkv": (write_held, 7 / 3, 24),
    "held.webm": (write_held, 7 / 3, 24),
    "held.flv": (write_held, 7 / 3, 24),
    "held.mp4": (write_held, 7 / 3, 24),
    "trimmed.mp4": (starting_within_a_frame, 3, 1),
    "comment.gif": (with_comment, 2, 20),
    "no-end-mark.gif": (without_end_mark, 2, 20),
    "hidden-vp8.webm": (write_with_hidden_frames("libvpx"), 2, 24),
    "hidden-vp9.webm": (write_with_hidden_frames("libvpx-vp9"), 2, 24),
}


@pytest.mark.parametrize("name", INTACT)
def test_intact_clips_are_read_to_their_end(name: str, tmp_path: Path) -> None:
    write, seconds, rate = INTACT[name]
    write(tmp_path / name)

    facts = probe_clip(tmp_path / name)

    assert facts.seconds == pytest.approx(seconds, abs=0.05)
    assert facts.source_rate == pytest.approx(rate, rel=0.005)

    read_clip(tmp_path / name, facts.frames_at(24), 24)  # raises if the end is missing


@pytest.mark.parametrize("name", ["held.mkv", "held.flv"])
def test_the_last_frame_is_shown_until_the_declared_end(name: str, tmp_path: Path) -> None:
    write_held(tmp_path / name)
    frames = read_clip(tmp_path / name, 56, 24)

    assert time_in(frames[-1]) == pytest.approx(8 / 24, abs=0.03)
    assert np.array_equal(frames[8], frames[-1])
    with pytest.raises(MediaError, match="ends after"):
        read_clip(tmp_path / name, 80, 24)


@pytest.mark.parametrize("suffix", [".mkv", ".webm", ".avi", ".flv", ".wmv", ".gif"])
def test_a_clip_without_the_last_bytes_of_its_frames_is_truncated(
    suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"clip{suffix}"
    if suffix == ".gif":
        animated(path)
    else:
        write_clip(path, seconds=0.5)
    with av.open(str(path)) as container:
        kind = container.format.name
    content = path.read_bytes()
    end = len(content)
    with path.open("rb") as file:
        end = DECLARED_ENDS[kind](file, end) or end

    assert not is_truncated(path, kind)

    for lost in (2, 40):
        path.write_bytes(content[: end - lost])
        assert is_truncated(path, kind), lost


@pytest.mark.parametrize("kind", DECLARED_ENDS)
def test_arbitrary_bytes_are_checked_for_truncation_without_an_error(
    kind: str, tmp_path: Path
) -> None:
    numbers = np.random.default_rng(0)
    path = tmp_path / "noise"
    starts = [
        b"",
        b"\x1aE\xdf\xa3\x01",
        b"RIFF\xff\xff\xff\x7fAVI ",
        b"FLV\1\5\0\0\0\x09",
        b"GIF89a\xff\xff\xff\xff\xff",
    ]
    for start, size in product(starts, (0, 5, 300)):
        path.write_bytes(start + numbers.bytes(size) + b"\xff" * size)
        assert is_truncated(path, kind) in (True, False)


def test_a_packet_of_vp9_with_a_reference_and_a_frame_is_shown() -> None:
    reference = bytes([0b10000100, 0])
    frame = bytes([0b10000110, 0])
    index = bytes([0b11000001, 2, 2, 0b11000001])  # of two frames, of two bytes each

    assert clip_facts._is_reference_only(av.Packet(reference), "vp9")
    assert not clip_facts._is_reference_only(av.Packet(reference + frame + index), "vp9")


@pytest.mark.parametrize("name", ["config.mts", "server.ts", "page.mp4"])
def test_text_is_not_called_a_damaged_clip(name: str, tmp_path: Path) -> None:
    text = 'import { defineConfig } from "vitepress"\n\nexport default defineConfig({\n'
    (tmp_path / name).write_text(text, "utf-8")

    with pytest.raises(UnsuitableError, match="holds text"):
        probe_clip(tmp_path / name)


def test_a_segment_of_a_stream_is_not_called_damaged(tmp_path: Path) -> None:
    write_clip(tmp_path / "whole.mp4", container={"movflags": "frag_keyframe+empty_moov"})
    content = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "segment.mp4").write_bytes(content[content.index(b"moof") - 4 :])

    with pytest.raises(UnsuitableError, match="is a segment of a stream"):
        probe_clip(tmp_path / "segment.mp4")


def test_a_clip_that_ffmpeg_cannot_decode_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_clip(tmp_path / "a.avi", seconds=0.25)

    def fail(clip: ClipFile, packet: av.Packet) -> None:
        raise PatchWelcomeError(1, "Not yet implemented in FFmpeg, patches welcome")

    monkeypatch.setattr(ClipFile, "decode", fail)
    monkeypatch.setattr("simpletuner.data.clip_decord._decord", lambda: None)

    with pytest.raises(UnsuitableError, match="cannot be decoded here: Not yet implemented"):
        probe_clip(tmp_path / "a.avi")


def test_a_container_without_frames_is_not_called_damaged(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.avi"), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width = 32
        stream.height = 32
        stream.pix_fmt = "yuv420p"
        container.start_encoding()
    with pytest.raises(UnsuitableError, match="holds no frames"):
        probe_clip(tmp_path / "a.avi")
