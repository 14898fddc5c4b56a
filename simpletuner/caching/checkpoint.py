"""Telling one checkpoint from another by its content, without reading gigabytes.

The name of a model is not enough: a folder can be retrained in place and a branch can move. Its path is too much:
the same files elsewhere would be encoded with again. So the identity is a hash of

- every JSON, text and tokenizer file, whole, except for keys that only say who saved it;
- of every safetensors file its size and header (names, dtypes and shapes of all tensors) and, of each tensor, a few
  short slices spread over its bytes;
- of other weight files their size and slices spread over the file.

Training changes nearly every number of the tensors that it touches, so two checkpoints that differ in any tensor
differ in its slices. What this cannot see is an edit of single numbers by hand; the slices take milliseconds where
hashing a 7B text encoder takes minutes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path

from .keys import canonical_json

WHOLE_FILES = frozenset({".json", ".txt", ".model", ".jinja"})
WEIGHT_FILES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack"})
SAVED_BY = frozenset({"_name_or_path", "_diffusers_version", "transformers_version"})

SLICE_BYTES = 256
SLICES_PER_TENSOR = 4
SLICES_PER_FILE = 256


def checkpoint_identity(*folders: Path) -> str:
    """Identity of one or several component folders (a text encoder and its tokenizer), as 64 hexadecimal digits.

    The folders' own names and places play no part; their order does. Links, as in a hub snapshot, are followed.

    Raises:
        FileNotFoundError: a folder is missing or holds nothing that belongs to a checkpoint.
    """
    return hashlib.sha256("".join(_folder_identity(folder) for folder in folders).encode()).hexdigest()


def _folder_identity(folder: Path) -> str:
    parts = []
    for path in sorted(folder.rglob("*")):
        identity = _file_identity(path) if path.is_file() else None
        if identity is not None:
            parts.append([path.relative_to(folder).as_posix(), identity])
    if not parts:
        raise FileNotFoundError(f"{folder}: no checkpoint here")
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def _file_identity(path: Path) -> str | None:
    """Hash of what matters in a file, or None for files that are no part of a model (README, pictures)."""
    if path.suffix == ".json":
        return _json_identity(path)
    if path.suffix in WHOLE_FILES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if path.suffix == ".safetensors":
        return _safetensors_identity(path)
    if path.suffix in WEIGHT_FILES:
        with path.open("rb", buffering=0) as file:
            return _slices_identity(file, b"", [(0, path.stat().st_size)], SLICES_PER_FILE)
    return None


def _json_identity(path: Path) -> str:
    content = path.read_bytes()
    try:
        value = json.loads(content)
    except ValueError:  # whoever loads it will complain with more right to
        return hashlib.sha256(content).hexdigest()
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if key not in SAVED_BY}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _safetensors_identity(path: Path) -> str:
    """Size, header and slices of each tensor. A file that is cut short still gets an identity of its own."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, size))
        spans = list(_tensor_spans(header, 8 + length)) or [(0, size)]
        return _slices_identity(file, header + str(size).encode(), spans, SLICES_PER_TENSOR)


def _tensor_spans(header: bytes, data_start: int) -> Iterator[tuple[int, int]]:
    """First and last byte of each tensor in the file, in the order of the file."""
    try:
        entries = json.loads(header)
    except ValueError:
        return
    offsets = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
    for start, end in sorted(offsets):
        yield data_start + start, data_start + end


def _slices_identity(file: RawIOBase, prefix: bytes, spans: list[tuple[int, int]], count: int) -> str:
    """Hash of `count` slices spread evenly over each span, its first and last bytes included."""
    hasher = hashlib.sha256(prefix)
    for start, end in spans:
        room = max(end - start - SLICE_BYTES, 0)
        for position in sorted({start + room * n // max(count - 1, 1) for n in range(count)}):
            file.seek(position)
            hasher.update(file.read(min(SLICE_BYTES, end - position)))
        hasher.update(f"{start}-{end}".encode())
    return hasher.hexdigest()
