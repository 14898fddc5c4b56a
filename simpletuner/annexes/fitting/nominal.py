"""Files in place of datasets that do not exist yet, so that a plan can answer whether a model fits a card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from simpletuner.atomic import write_json
from simpletuner.config.schema import RunConfig
from simpletuner.config.sources import Arguments, dataset_file, resolve_alias
from simpletuner.config.values import Size, read_json
from simpletuner.errors import ConfigError, result_of
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.plan.build import resolve_layers
from simpletuner.validation.clip_writer import write_mp4

FILES = 10  # in place of a folder
USUAL_FRAMES = 61  # of clips, if their entry does not say


@contextmanager
def nominal_files(arguments: Arguments) -> Iterator[tuple[Arguments, str]]:
    """Arguments with files of the usual size in place of folders that do not exist, and a sentence that says so.

    The sentence is empty if nothing is replaced. The files exist within the context.
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
        spec, folder = FAMILIES[config.model.model_family], Path(name)
        kinds = dict.fromkeys(_fill(entry, spec, folder) for entry in missing)
        folders = dict.fromkeys(repr(entry["instance_data_dir"]) for entry in missing)
        replaced = [{**entry, **_place(entry, folder)} if entry in missing else entry for entry in entries]
        write_json(path := folder / "multidatabackend.json", replaced)
        settings = [*arguments.settings, ("data_backend_config", str(path))]
        verb = "does" if len(folders) == 1 else "do"
        sentence = f"{', '.join(folders)} {verb} not exist yet: this is the plan for {' and '.join(kinds)}."
        yield replace(arguments, settings=settings), sentence


def _read(arguments: Arguments) -> tuple[RunConfig, list[dict[str, Any]]]:
    """The configuration, and the entries of its dataset file; none if the file cannot be read."""
    layers, folder = result_of(arguments.layers())
    config = result_of(resolve_layers(layers, "train"))[0]
    path = result_of(dataset_file(config.run.data_backend_config, folder))
    entries = result_of(read_json(path, list)) or []
    return config, [entry for entry in entries if isinstance(entry, dict)]


def _is_missing(entry: Mapping[str, Any]) -> bool:
    """Whether the folder of an entry does not exist."""
    folder = entry.get("instance_data_dir")
    if not isinstance(folder, str) or entry.get("type", "local") != "local":
        return False
    return not Path(resolve_alias(folder)).expanduser().exists()


def _place(entry: Mapping[str, Any], folder: Path) -> dict[str, str]:
    return {"instance_data_dir": str(folder / str(entry.get("id")))}


def _fill(entry: Mapping[str, Any], spec: FamilySpec, folder: Path) -> str:
    """Write grey files with captions for an entry; returns what they are, in words."""
    place = Path(_place(entry, folder)["instance_data_dir"])
    place.mkdir(exist_ok=True)
    width, height = size = _size_of(spec)
    picture = Image.new("RGB", size, "grey")
    is_clip = "video" in entry
    frames = entry["video"].get("num_frames", USUAL_FRAMES) if is_clip else 1
    first = place / ("0.mp4" if is_clip else "0.png")
    if is_clip:
        write_mp4(first, [picture] * frames, entry["video"].get("frame_rate") or spec.frame_rate or 1)
    else:
        picture.save(first, compress_level=1)
    for number in range(FILES):
        (place / f"{number}.txt").write_text("a sample", encoding="utf-8")
        (place / f"{number}{first.suffix}").write_bytes(first.read_bytes())
    if is_clip:
        return f"{FILES} clips of {frames} frames of {width}x{height}"
    return f"{FILES} pictures of {width}x{height}"


def _size_of(spec: FamilySpec) -> Size:
    """The size that the model is usually trained at."""
    edge = spec.defaults["resolution"]
    return spec.native_sizes[edge][0] if edge in spec.native_sizes else (edge, edge)
