"""Files in place of datasets that do not exist yet, to plan whether a model fits a card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from simpletuner.atomic import write_json
from simpletuner.config.json_reader import read_json
from simpletuner.config.schema import RunConfig
from simpletuner.config.sources import Arguments, dataset_file, resolve_alias
from simpletuner.config.types import Size
from simpletuner.errors import ConfigError, Problems
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.build import resolve_layers

FILES = 10  # in place of a folder
USUAL_FRAMES = 61  # of clips, unless their entry has another number
MOST_FRAMES = 1000  # of a clip that is written


@contextmanager
def nominal_files(arguments: Arguments, count: int = FILES) -> Iterator[tuple[Arguments, str]]:
    """Arguments with files of the usual size in place of folders that do not exist.

    With them comes a sentence about the files; it is empty if nothing is replaced. The files exist
    within the context.

    Args:
        count: files of a folder.
    """
    with TemporaryDirectory(prefix="simpletuner-nominal-") as name:
        try:
            config, entries = _read(arguments)
            missing = [entry for entry in entries if _is_missing(entry)]
        except ConfigError:  # the plan reports it
            missing = []
        if not missing:
            yield arguments, ""
            return
        spec = FAMILIES[config.model.model_family]
        size = _size_of(config, spec)
        frame_rate = spec.frame_rate or 1
        folder = Path(name)
        folders: list[str] = []
        kinds: list[str] = []
        replaced: list[dict[str, Any]] = []
        for number, entry in enumerate(entries):
            if entry not in missing:
                replaced.append(entry)
                continue
            dataset_folder = folder / str(number)
            kinds.append(_fill(dataset_folder, entry, size, frame_rate, count))
            folders.append(repr(entry["instance_data_dir"]))
            replaced.append({**entry, "instance_data_dir": str(dataset_folder)})
        path = folder / "multidatabackend.json"
        write_json(path, replaced)
        settings = [*arguments.settings, ("data_backend_config", str(path))]
        names = list(dict.fromkeys(folders))
        verb = "does" if len(names) == 1 else "do"
        content = " and ".join(dict.fromkeys(kinds))
        sentence = f"{', '.join(names)} {verb} not exist yet: this is the plan for {content}."
        yield replace(arguments, settings=settings), sentence


def _read(arguments: Arguments) -> tuple[RunConfig, list[dict[str, Any]]]:
    """The configuration, and the entries of its dataset file; none if the file cannot be read."""
    ignored = Problems()  # the plan reports them
    layers, folder = arguments.layers(ignored)
    config, _ = resolve_layers(layers, ignored)
    path = dataset_file(config.run.data_backend_config, folder, Problems())
    entries = read_json(path, Problems(), list) or []
    return config, [entry for entry in entries if isinstance(entry, dict)]


def _is_missing(entry: Mapping[str, Any]) -> bool:
    """Whether the folder of an entry does not exist."""
    folder = entry.get("instance_data_dir")
    if not isinstance(folder, str) or entry.get("type", "local") != "local":
        return False
    return not Path(resolve_alias(folder)).expanduser().exists()


def _fill(folder: Path, entry: Mapping[str, Any], size: Size, usual_rate: float, count: int) -> str:
    """Write grey files with captions for an entry into a new folder; returns a description."""
    folder.mkdir()
    if "video" in entry:
        frames = _number_in(entry["video"], "num_frames") or USUAL_FRAMES
        frame_rate = _number_in(entry["video"], "frame_rate") or usual_rate
        first = folder / "0.mp4"
        _write_still_clip(first, size, frames, frame_rate)
        description = f"{count} clips of {frames} frames of {size}"
    else:
        first = folder / "0.png"
        Image.new("RGB", size, "grey").save(first, compress_level=1)
        description = f"{count} pictures of {size}"
    (folder / "0.txt").write_text("a sample", encoding="utf-8")
    for number in range(1, count):
        for file in (first, folder / "0.txt"):
            (folder / f"{number}{file.suffix}").hardlink_to(file)
    return description


def _write_still_clip(path: Path, size: Size, frames: int, rate: float) -> None:
    """Write a clip in which nothing moves: one frame, encoded once and stored for every time."""
    exact_rate = Fraction(rate).limit_denominator(1001)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=exact_rate)
        assert isinstance(stream, VideoStream)
        stream.width = size.width
        stream.height = size.height
        stream.pix_fmt = "yuv420p"
        frame = VideoFrame(size.width, size.height, "yuv420p")
        frame.pts = 0
        encoded = bytes([*stream.encode(frame), *stream.encode(None)][0])
        for number in range(frames):
            packet = av.Packet(encoded)
            packet.stream = stream
            packet.time_base = 1 / exact_rate
            packet.pts = number
            packet.dts = number
            packet.duration = 1
            packet.is_keyframe = True
            container.mux(packet)


def _number_in(settings: object, key: str) -> int:
    """A whole number among settings that are not checked yet; 0 if it is missing or invalid."""
    value = settings.get(key) if isinstance(settings, Mapping) else None
    # The plan reports an invalid one. A bool is an int too, hence `type`.
    if type(value) is int and 0 < value <= MOST_FRAMES:
        return value
    return 0


def _size_of(config: RunConfig, spec: FamilySpec) -> Size:
    """The size of the previews, which is the one that is sampled; else the model's usual size."""
    previews = config.validation.validation_resolution
    if previews:
        return previews[0]
    edge = spec.defaults["resolution"]
    if edge in spec.native_sizes:
        return spec.native_sizes[edge][0]
    return Size(edge, edge)
