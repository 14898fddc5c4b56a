"""What a cache entry depends on, and the name that follows from it.

An entry's key is the SHA-256 of everything that determines its content: the bytes of the file, how it was
prepared, and the encoder. So files of the same name never collide, an edit is seen, an old size never comes back,
and nothing is encoded twice. No torch here: the plan counts what is cached before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from io import RawIOBase
from pathlib import Path
from typing import Any, ClassVar

# Raised when the meaning of an entry changes, so that entries of older versions are not read as new ones.
VERSION = 1

# What an entry depends on, one level deep: "encoder.dtype" -> "bf16".
Ingredients = dict[str, Any]


@dataclass(frozen=True)
class EncoderIdentity:
    """Which model made an entry, and how it computed.

    Attributes:
        family: value of `model_family`.
        checkpoint: `checkpoint.checkpoint_identity` of all folders that take part (tokenizers included).
        dtype: of the computation, such as "bf16".
        quantisation: value of the precision key, "no_change" for none.
        tiling: the picture was encoded in tiles.
    """

    family: str
    checkpoint: str
    dtype: str
    quantisation: str = "no_change"
    tiling: bool = False


@dataclass(frozen=True)
class CacheKey:
    """Identity of one entry: its fields are everything that the entry depends on."""

    kind: ClassVar[str]

    def ingredients(self) -> Ingredients:
        """The fields one level deep, tuples as lists, with kind and version in front."""
        result: Ingredients = {"kind": self.kind, "version": VERSION}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, EncoderIdentity):
                result |= {f"{name}.{inner}": innermost for inner, innermost in vars(value).items()}
            else:
                result[name] = list(value) if isinstance(value, tuple) else value
        return result

    def digest(self) -> str:
        """The name of the entry: 64 hexadecimal digits."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest(self.ingredients())


@dataclass(frozen=True)
class LatentKey(CacheKey):
    """Identity of one latent.

    Attributes:
        content: SHA-256 of the picture's or clip's bytes.
        size: width and height that are encoded.
        resized: width and height of the whole picture before cropping.
        crop: left and top corner of the crop in the resized picture; its size is `size`.
        frames: frames that are encoded; 1 for pictures.
        rate: frames a second they were taken at; None for pictures.
        encoder: which VAE.
        read_as: `Sample.read_as`; left out where it is empty, as in entries from before it was there.
    """

    kind = "latent"

    content: str
    size: tuple[int, int]
    resized: tuple[int, int]
    crop: tuple[int, int]
    encoder: EncoderIdentity
    frames: int = 1
    rate: float | None = None
    read_as: tuple[str, ...] = ()

    def ingredients(self) -> Ingredients:
        """Everything the entry depends on, flat."""
        found = super().ingredients()
        return found if self.read_as else {name: value for name, value in found.items() if name != "read_as"}

    def seed(self) -> int:
        """A seed in [0, 2^63) for the draw from the VAE's posterior: the same entry is always the same draw."""
        return int(self.digest()[:16], 16) >> 1


@dataclass(frozen=True)
class TextKey(CacheKey):
    """Identity of the embeddings of one caption.

    Attributes:
        caption: cleaned, as the encoder gets it.
        template: the words around it, or a name that stands for them and changes when they do.
        max_length: tokens after which it is cut.
        encoder: which text encoders.
        picture: `LatentKey.digest` (or another hash) of the picture that the prompt holds, if it holds one.
    """

    kind = "text"

    caption: str
    template: str
    max_length: int
    encoder: EncoderIdentity
    picture: str | None = None


@dataclass(frozen=True)
class FeatureKey(CacheKey):
    """Identity of what a technique caches of one sample.

    Attributes:
        feature: name of the kind.
        latents: `LatentKey.digest` of the latents that it is made from.
        maker: what else it depends on, by name: the encoder's identity, sizes.
    """

    kind = "feature"

    feature: str
    latents: str
    maker: tuple[tuple[str, str | float], ...]


def provenance_of(key: CacheKey, source: str) -> dict[str, str]:
    """What is written into an entry so that it can be explained later.

    Args:
        source: `dataset/relative path` of a file, or the caption's; for people, and no part of the identity.
    """
    return {"source": source, "ingredients": canonical_json(key.ingredients())}


def digest(ingredients: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(ingredients).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, ASCII only; NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    except ValueError:  # loading it will report the error
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
