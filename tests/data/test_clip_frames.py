"""Frames of clips as they are trained: exact colours, on a background, without combs."""

from __future__ import annotations

import io
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from PIL import Image

from simpletuner.config.types import Size
from simpletuner.data import clip_decord, clip_facts, clips
from simpletuner.data.buckets import Geometry
from simpletuner.data.clip_file import ClipFile, UndecodableError, UnsupportedError, open_clip
from simpletuner.data.clip_frames import CONVERSION, PictureConverter, _deinterlaced, read_with_av
from simpletuner.data.clips import ClipFacts, fit_clip, frames_of, probe_clip
from simpletuner.data.files import MediaError, UnsuitableError
from tests.tools.clips import (
    HEIGHT,
    INTERLACED,
    TRANSPARENT,
    WHOLE,
    WIDTH,
    filmed,
    read_clip,
    write_clip,
    write_interlaced,
    write_transparent,
)
from tests.tools.pictures import BLUE, GREEN, ORIENTATION, RED, TURNED, WHITE, corners, scene

# Share of red and of blue in brightness, by the H.273 number of the matrix.
BRIGHTNESS = {1: (0.2126, 0.0722), 6: (0.299, 0.114)}


def exact_rgb(levels: tuple[int, int, int], matrix: int, *, is_full: bool) -> np.ndarray:
    """The colour of 8-bit levels of YUV, in floats (ITU-R BT.709 and BT.601)."""
    red_share, blue_share = BRIGHTNESS[matrix]
    luma, blue_difference, red_difference = np.subtract(levels, (0 if is_full else 16, 128, 128))
    scale = 1.0 if is_full else 255 / 219
    chroma_scale = 1.0 if is_full else 255 / 224
    red = luma * scale + 2 * (1 - red_share) * red_difference * chroma_scale
    blue = luma * scale + 2 * (1 - blue_share) * blue_difference * chroma_scale
    green = (luma * scale - red_share * red - blue_share * blue) / (1 - red_share - blue_share)
    return np.clip([red, green, blue], 0, 255)


def plain_frame(levels: tuple[int, int, int], pixel_format: str, matrix: int) -> VideoFrame:
    """A frame of one colour."""
    frame = VideoFrame(32, 16, pixel_format)
    frame.colorspace = matrix
    frame.color_range = 2 if pixel_format.startswith("yuvj") else 1
    deep = "10le" in pixel_format
    for plane, level in zip(frame.planes, levels, strict=True):
        value = np.uint16(level * 4) if deep else np.uint8(level)
        plane.update(np.full(plane.buffer_size // value.itemsize, value).tobytes())
    return frame


@pytest.mark.parametrize("matrix", BRIGHTNESS)
@pytest.mark.parametrize(
    "pixel_format", ["yuv420p", "yuv422p", "yuv444p", "yuvj420p", "yuv420p10le", "yuv422p10le"]
)
def test_colours_are_those_of_an_exact_computation(pixel_format: str, matrix: int) -> None:
    numbers = np.random.default_rng(0)
    converter = PictureConverter(None, "white")
    is_full = pixel_format.startswith("yuvj")
    errors: list[np.ndarray] = []
    for _ in range(30):
        levels = tuple(map(int, numbers.integers((60, 100, 100), (190, 156, 156))))
        picture = converter.picture_of(plain_frame(levels, pixel_format, matrix))
        centre = np.asarray(picture)[8, 16].astype(float)
        errors.append(centre - exact_rgb(levels, matrix, is_full=is_full))

    assert np.abs(errors).max() <= 0.6
    assert abs(np.mean(errors)) < 0.1, "no bias towards dark"


@pytest.mark.parametrize(
    "pixel_format", ["yuv420p", "yuv444p", "yuv420p10le", "rgb24", "bgra", "gray"]
)
def test_planar_conversion_gives_the_values_of_packed_pixels(pixel_format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 66, 3), dtype=np.uint8)
    frame = VideoFrame.from_ndarray(noise, format="rgb24").reformat(format=pixel_format)
    packed = VideoReformatter().reformat(frame, format="rgb24", interpolation=CONVERSION)

    picture = PictureConverter(None, "white").picture_of(frame)

    assert np.array_equal(picture, packed.to_ndarray())


def test_a_repeated_frame_is_converted_and_resized_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "slow.mp4"
    write_clip(path, rate=12, seconds=1)
    original_fit = clips.fit
    resized: list[Image.Image] = []

    def fit(frame: Image.Image, geometry: Geometry) -> np.ndarray:
        resized.append(frame)
        return original_fit(frame, geometry)

    monkeypatch.setattr(clips, "fit", fit)
    geometry = Geometry("1.5", Size(WIDTH, HEIGHT), Size(WIDTH, HEIGHT), (0, 0))
    pixels = fit_clip(frames_of(path, 24, 24, probe_clip(path)), geometry)

    assert len(resized) == 12
    assert len({id(frame) for frame in resized}) == 12
    assert np.array_equal(pixels[::2], pixels[1::2])
    assert np.array_equal(pixels[::2], read_clip(path, 12, 12))


@pytest.mark.parametrize("background", ["white", "black"])
@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparent_clips_are_shown_on_the_background(
    name: str, background: str, tmp_path: Path
) -> None:
    """Its three stripes are opaque, half transparent and transparent."""
    write_transparent(tmp_path / name)
    behind = 255 if background == "white" else 0
    half = np.add(RED, behind) / 2
    stripes = {WIDTH // 6: RED, WIDTH // 2: half, WIDTH * 5 // 6: np.full(3, behind)}

    frame = next(frames_of(tmp_path / name, 1, 24, probe_clip(tmp_path / name), background))

    for left, colour in stripes.items():
        assert np.abs(np.subtract(frame.getpixel((left, HEIGHT // 2)), colour)).max() <= 3


def test_a_transparent_gif_is_shown_on_white(tmp_path: Path) -> None:
    path = tmp_path / "sticker.gif"
    frames = [Image.new("RGBA", (32, 32), (0, 0, 0, 0)) for _ in range(3)]
    for index, frame in enumerate(frames):
        frame.paste((*RED, 255), (0, 0, 16, 8 + index))
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=50, disposal=2)

    shown = next(frames_of(path, 1, 20, probe_clip(path)))

    assert shown.getpixel((4, 4)) == RED
    assert shown.getpixel((24, 24)) == WHITE


def combs(frame: np.ndarray) -> float:
    """Mean difference of neighbouring rows; the bars of `write_interlaced` are upright."""
    inner = frame.astype(int)[8:-8]
    return float(np.abs(inner[1:] - inner[:-1]).mean())


@pytest.mark.parametrize("name", INTERLACED)
def test_interlaced_clips_are_deinterlaced_at_the_rate_of_frames(name: str, tmp_path: Path) -> None:
    codec, options = INTERLACED[name]
    write_interlaced(tmp_path / name, codec, **options)

    facts = probe_clip(tmp_path / name)
    frames = read_clip(tmp_path / name, 25, 25)

    assert facts.is_interlaced
    assert facts.source_rate == pytest.approx(25)
    assert facts.frames_at(25) == 25
    assert max(combs(frame) for frame in frames[2:-2]) < 4

    is_repeated = [np.array_equal(*neighbours) for neighbours in pairwise(frames)]
    assert not any(is_repeated)


def test_an_interlaced_clip_may_change_its_size(tmp_path: Path) -> None:
    path = tmp_path / "broadcast.ts"
    parts = b""
    codec, options = INTERLACED["interlaced.ts"]
    for size in ((WIDTH, HEIGHT), (WIDTH // 2, HEIGHT // 2)):
        write_interlaced(path, codec, size=size, **options)
        parts += path.read_bytes()
    path.write_bytes(parts)
    with open_clip(path) as clip:
        sizes = [(frame.width, frame.height) for frame in _deinterlaced(clip.frames())]

    assert sizes == [(WIDTH, HEIGHT)] * 25 + [(WIDTH // 2, HEIGHT // 2)] * 25


def test_a_packet_of_one_field_is_not_counted_as_a_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fields.ts"
    codec, options = INTERLACED["interlaced.ts"]
    write_interlaced(path, codec, **options)
    read_packets = clip_facts._read_packets

    def read_fields(clip: ClipFile) -> clip_facts._Packets:
        packets = read_packets(clip)
        packets.spans |= {time + 0.02: 0.02 for time in packets.spans}
        return packets

    monkeypatch.setattr(clip_facts, "_read_packets", read_fields)
    facts = probe_clip(path)

    assert facts.source_rate == pytest.approx(25)
    assert facts.seconds == pytest.approx(1)


def test_clips_without_fields_are_not_filtered(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.mkv", codec="ffv1", pixel_format="bgr0", seconds=0.25)

    frames = read_clip(tmp_path / "a.mkv", 6, 24)

    for index, frame in enumerate(frames):
        assert np.array_equal(frame, filmed(index / 24))


def two_streams(path: Path) -> None:
    """A small stream first, and a large one that players and decord prefer."""
    with av.open(str(path), "w") as container:
        for size in ((32, 32), (64, 64)):
            stream = container.add_stream("libx264", rate=24)
            stream.width, stream.height = size
            stream.pix_fmt = "yuv420p"
        for index, stream in product(range(8), container.streams.video):
            pixels = filmed(index / 24, (stream.width, stream.height))
            frame = VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index
            container.mux(stream.encode(frame))
        for stream in container.streams.video:
            container.mux(stream.encode(None))


def test_a_clip_with_two_streams_is_read_from_the_probed_one(tmp_path: Path) -> None:
    path = tmp_path / "two.mp4"
    two_streams(path)

    facts = probe_clip(path)

    assert (facts.width, facts.height) == (32, 32)
    assert next(frames_of(path, 1, 24, facts)).size == (32, 32)


def test_decord_refuses_a_clip_with_two_streams(tmp_path: Path) -> None:
    pytest.importorskip("decord")
    path = tmp_path / "two.mp4"
    two_streams(path)

    with pytest.raises(UnsuitableError, match="holds 2 streams of frames"):
        list(frames_of(path, 1, 24, ClipFacts(32, 32, 0.3, 24, reader="decord")))


def write_camera_clip(path: Path, orientation: int) -> None:
    """Photographs in an AVI, as some cameras record, with EXIF data."""
    turn = TURNED[orientation]
    picture = scene() if turn is None else scene().transpose(turn)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=95, exif=exif)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=24)
        stream.width, stream.height = picture.size
        stream.pix_fmt = "yuvj420p"
        for index in range(5):
            packet = av.Packet(file.getvalue())
            packet.stream = stream
            packet.pts = index
            packet.dts = index
            packet.time_base = stream.time_base or Fraction(1, av.time_base)
            packet.is_keyframe = True
            container.mux(packet)


MIRRORED = (2, 4, 5, 7)  # orientations


@pytest.mark.parametrize("orientation", [number for number in TURNED if number not in MIRRORED])
def test_side_data_without_a_name_in_pyav_is_ignored(orientation: int, tmp_path: Path) -> None:
    """FFmpeg passes on the EXIF data of photographs and turns them by it."""
    path = tmp_path / "camera.avi"
    write_camera_clip(path, orientation)

    facts = probe_clip(path)
    shown = next(frames_of(path, 1, 24, facts))

    assert (facts.width, facts.height) == (WIDTH, HEIGHT)
    for colour, expected in zip(corners(shown), [RED, GREEN, BLUE, WHITE], strict=True):
        assert np.abs(np.subtract(colour, expected)).max() <= 12


@pytest.mark.parametrize("orientation", MIRRORED)
def test_mirrored_photographs_in_a_clip_are_refused(orientation: int, tmp_path: Path) -> None:
    path = tmp_path / "camera.avi"
    write_camera_clip(path, orientation)

    with pytest.raises(UnsuitableError, match="is shown mirrored"):
        probe_clip(path)


def fail_with(error: Exception) -> Callable[[Path], ClipFacts]:
    def fail(path: Path) -> ClipFacts:
        raise error

    return fail


@pytest.mark.slow(2)
def test_decord_reads_what_pyav_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("decord")
    path = tmp_path / "a.mp4"
    write_clip(path)
    monkeypatch.setattr(clip_facts, "read_facts", fail_with(UndecodableError("cannot be decoded")))

    facts = probe_clip(path)
    frames = read_clip(path, 48, 24)

    assert (facts.width, facts.height) == (WIDTH, HEIGHT)
    assert facts.reader == "decord"
    assert facts.frames_at(24) == 48

    by_av = [np.asarray(frame).astype(int) for frame in read_with_av(path, facts.moments(48, 24))]
    assert np.abs(frames - by_av).mean() < 3


@pytest.mark.parametrize("error_type", [UndecodableError, UnsupportedError])
def test_decord_reads_what_pyav_cannot_decode_or_the_first_error_is_raised(
    error_type: type[MediaError], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ClipFacts(WIDTH, HEIGHT, 1, 24, reader="decord")
    answers = [facts, None]
    monkeypatch.setattr(clip_facts, "read_facts", fail_with(error_type("is odd")))
    monkeypatch.setattr(clip_decord, "read_facts_with_decord", lambda path: answers.pop(0))

    assert probe_clip(Path("a.mp4")) == facts
    with pytest.raises(error_type, match="is odd"):
        probe_clip(Path("a.mp4"))


@pytest.mark.parametrize("error_type", [UnsuitableError, MediaError])
def test_decord_does_not_read_what_pyav_refuses(
    error_type: type[MediaError], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = ClipFacts(WIDTH, HEIGHT, 1, 24, reader="decord")
    monkeypatch.setattr(clip_facts, "read_facts", fail_with(error_type("is HDR")))
    monkeypatch.setattr(clip_decord, "read_facts_with_decord", lambda path: facts)

    with pytest.raises(error_type, match="is HDR"):
        probe_clip(Path("a.mp4"))


@pytest.mark.parametrize(
    ("is_installed", "message"),
    [
        (True, r"video\.reader of its dataset to pyav"),
        (False, "decord, which is not installed"),
    ],
)
def test_a_clip_for_decord_is_never_read_by_pyav(
    is_installed: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WHOLE["h264.avi"](tmp_path / "a.avi")  # which decord cannot read
    facts = ClipFacts(WIDTH, HEIGHT, 2, 24, reader="decord")
    if not is_installed:
        monkeypatch.setattr(clip_decord, "_decord", lambda: None)

    with pytest.raises(UnsuitableError, match=message):
        list(frames_of(tmp_path / "a.avi", 2, 24, facts))
