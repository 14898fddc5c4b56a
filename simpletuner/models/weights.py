"""Weight files, judged by their headers: what is in them, and whether they are whole. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path

from simpletuner.headers import LENGTH_BYTES, METADATA, header_end, read_header

INDEX_SUFFIX = ".safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")


class WeightsError(ValueError):
    """A weight file that cannot be used; the message says why, ready to follow its name."""


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a safetensors file.

    Raises:
        WeightsError: the file is no safetensors file, or its end is missing.
    """
    try:
        entries = {name: entry for name, entry in read_header(path).items() if name != METADATA}
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        with path.open("rb") as file:
            start = header_end(file.read(LENGTH_BYTES))
        end = start + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise WeightsError("is not a safetensors file (perhaps a pointer that git lfs has not replaced)") from None
    if path.stat().st_size < end:
        raise WeightsError(f"is truncated: {path.stat().st_size} of {end} bytes are there")
    return shapes


def find_fault(folder: Path) -> str | None:
    """What is wrong with the model in a folder with a config.json; None when its weights are there and whole."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        return "config.json cannot be read"
    files = [path for path in sorted(folder.iterdir()) if path.suffix in WEIGHT_SUFFIXES]
    if not files:
        return "there are no weights in it"
    for index in sorted(folder.glob(f"*{INDEX_SUFFIX}")):
        missing = _missing_shards(index)
        if missing:
            return missing
    for path in files:
        try:
            if path.suffix == ".safetensors":
                tensor_shapes(path)
        except WeightsError as error:
            return f"{path.name} {error}"
    return None


def _missing_shards(index: Path) -> str | None:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        absent = sorted(shard for shard in shards if not (index.parent / shard).is_file())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"{index.name} cannot be read"
    return f"it lacks {', '.join(absent)}" if absent else None
