"""The dependencies of a cache entry, and the key derived from them.

An entry's key is the SHA-256 of everything that determines its content: the bytes of the file, its
preparation, and the encoder. Files of the same name never collide, edits and other sizes get new
entries, and nothing is encoded twice. The plan counts cached entries before any model is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cached_property
from io import RawIOBase
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any, Literal

from simpletuner.hashing import canonical_json, hash_bytes, hash_file, hash_json, hash_text

# Increment it when the meaning of entries changes, so that old entries do not match.
VERSION = 1

# Flattened dependencies of an entry: "encoder.dtype" -> "bf16".
Ingredients = dict[str, Any]


@dataclass(frozen=True)
class EncoderIdentity:
    """The model that computes an entry, and its settings.

    Attributes:
        family: value of `model_family`.
        checkpoint: `checkpoint_identity` of all folders involved, including tokenizers.
        dtype: compute dtype, such as "bf16".
        quantisation: value of the precision key, "no_change" for none.
        tiling: the picture is encoded in tiles.
        tf32: False if a GPU computes in full float32; omitted if None, on a CPU or in another
            dtype. Older GPU entries without it were computed in TF32.
    """

    family: str
    checkpoint: str
    dtype: str
    quantisation: str = "no_change"
    tiling: bool = False
    tf32: Literal[False] | None = None

    @cached_property
    def text(self) -> str:
        """The encoder's part of a key's text."""
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                values[f"encoder.{field.name}"] = value
        # Without braces, to be spliced into a key's text at the sorted position of `encoder.`.
        return canonical_json(values)[1:-1]


# Not frozen, which halves the time to build the keys of 100,000 files at every start, but treated
# as immutable.
class CacheKey:
    """Identity of one entry; every field is a dependency."""

    __slots__ = ()

    def text(self) -> str:
        """The text to hash: `canonical_json` of the ingredients."""
        raise NotImplementedError

    def ingredients(self) -> Ingredients:
        """The flattened fields, with tuples as lists, and with kind and version."""
        ingredients: Ingredients = json.loads(self.text())
        return ingredients

    def digest(self) -> str:
        """The name of the entry: 64 hexadecimal digits."""
        return hash_text(self.text())


@dataclass(slots=True, unsafe_hash=True)
class LatentKey(CacheKey):
    """Identity of one latent.

    Attributes:
        content: SHA-256 of the picture's or clip's bytes.
        size: encoded width and height.
        resized: width and height of the whole picture before cropping.
        crop: left and top of the crop in the resized picture; its size is `size`.
        frames: number of encoded frames; 1 for pictures.
        rate: frames per second at which the clip is sampled; None for pictures.
        encoder: the VAE.
        read_as: `Sample.read_as`; omitted if empty, so that older entries stay valid.
        reader: `ClipFacts.reader`, since PyAV and decord round differently; omitted for pictures.
    """

    content: str
    size: tuple[int, int]
    resized: tuple[int, int]
    crop: tuple[int, int]
    encoder: EncoderIdentity
    frames: int = 1
    rate: float | None = None
    read_as: tuple[str, ...] = ()
    reader: str | None = None

    def text(self) -> str:
        """Written out for speed; an empty `read_as` and the reader of a picture are omitted."""
        # The exact bytes of `canonical_json`, keys sorted: any change would orphan every cached
        # latent.
        left, top = self.crop
        resized_width, resized_height = self.resized
        width, height = self.size
        rate = "null" if self.rate is None else canonical_json(self.rate)
        read_as = f'"read_as":{canonical_json(self.read_as)},' if self.read_as else ""
        reader = f'"reader":{quoted(self.reader)},' if self.reader else ""
        return (
            f'{{"content":"{self.content}",'
            f'"crop":[{left},{top}],'
            f"{self.encoder.text},"
            f'"frames":{self.frames},'
            '"kind":"latent",'
            f'"rate":{rate},'
            f"{read_as}"
            f"{reader}"
            f'"resized":[{resized_width},{resized_height}],'
            f'"size":[{width},{height}],'
            f'"version":{VERSION}}}'
        )

    def seed(self) -> int:
        """A seed in [0, 2^63) for sampling the VAE's posterior: always the same for an entry."""
        return int(self.digest()[:16], 16) >> 1  # torch takes signed 64-bit seeds


@dataclass(slots=True, unsafe_hash=True)
class TextKey(CacheKey):
    """Identity of the embeddings of one caption.

    Attributes:
        caption: cleaned, as passed to the encoder.
        template: the prompt template around it, or a name that changes with the template.
        max_length: maximum number of tokens.
        encoder: the text encoders.
        picture: `catalogue.picture_fingerprint` of the picture in the prompt, if any.
    """

    caption: str
    template: str
    max_length: int
    encoder: EncoderIdentity
    picture: str | None = None

    def text(self) -> str:
        """Written out for speed."""
        picture = "null" if self.picture is None else quoted(self.picture)
        return (
            f'{{"caption":{quoted(self.caption)},'
            f"{self.encoder.text},"
            '"kind":"text",'
            f'"max_length":{self.max_length},'
            f'"picture":{picture},'
            f'"template":{quoted(self.template)},'
            f'"version":{VERSION}}}'
        )


@dataclass(frozen=True, slots=True)
class FeatureKey(CacheKey):
    """Identity of a feature that a technique caches for one sample.

    Attributes:
        feature: name of the feature kind.
        latents: `LatentKey.digest` of the source latents.
        maker: other dependencies by name: the encoder's identity, sizes.
    """

    feature: str
    latents: str
    maker: tuple[tuple[str, str | float], ...]

    def text(self) -> str:
        """The JSON of the fields."""
        return canonical_json(
            {
                "feature": self.feature,
                "kind": "feature",
                "latents": self.latents,
                "maker": self.maker,
                "version": VERSION,
            }
        )


def provenance_of(key: CacheKey, source: str) -> dict[str, str]:
    """Metadata that documents an entry.

    Args:
        source: `dataset/relative path` of a file or of a caption's file; informative, not part of
            the identity.
    """
    return {"source": source, "ingredients": key.text()}


WHOLE_FILES = frozenset({".json", ".txt", ".model", ".jinja"})
WEIGHT_FILES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack"})
# Keys about the program that saved a config, irrelevant to the model.
IGNORED_KEYS = frozenset({"_name_or_path", "_diffusers_version", "transformers_version"})

# Bytes per slice. Checkpoints are identified by slices, since reading tens of gigabytes would delay
# every start.
SLICE_BYTES = 256
SLICES_PER_TENSOR = 4
SLICES_PER_FILE = 256


def checkpoint_identity(*folders: Path) -> str:
    """Identity of component folders or weight files, such as a text encoder and its tokenizer.

    It has 64 hexadecimal digits and depends on the order of the folders but not on their paths.
    Links, as in a hub snapshot, are followed.

    Raises:
        FileNotFoundError: a folder is missing or contains no model files.
    """
    return hash_text("".join(_folder_identity(folder) for folder in folders))


def _folder_identity(folder: Path) -> str:
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    parts = []
    for path in paths:
        identity = _file_identity(path) if path.is_file() else None
        if identity is not None:
            parts.append([path.relative_to(folder).as_posix(), identity])
    if not parts:
        raise FileNotFoundError(f"{folder}: no checkpoint here")
    return hash_json(parts)


def _file_identity(path: Path) -> str | None:
    """Hash of the relevant content of a file; None if it is not part of a model (README)."""
    if path.suffix == ".json":
        return _json_identity(path)
    if path.suffix in WHOLE_FILES:
        return hash_file(path)
    if path.suffix == ".safetensors":
        return _safetensors_identity(path)
    if path.suffix in WEIGHT_FILES:
        with path.open("rb", buffering=0) as file:
            return _slices_identity(file, b"", [(0, path.stat().st_size)], SLICES_PER_FILE)
    return None


def _json_identity(path: Path) -> str:
    """Hash of a config, without what the program that saved it wrote about itself."""
    content = path.read_bytes()
    try:
        value = json.loads(content)
    except ValueError:  # the error is reported on loading
        return hash_bytes(content)
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if key not in IGNORED_KEYS}
    return hash_text(json.dumps(value, sort_keys=True))


def _safetensors_identity(path: Path) -> str:
    """Hash of the size, the header and slices of each tensor; distinguishes truncated files too."""
    size = path.stat().st_size
    # Unbuffered, since a buffer would read kilobytes per slice.
    with path.open("rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        # In a damaged file, the length may be any number.
        header = file.read(min(length, size))
        try:
            offsets = [
                entry["data_offsets"]
                for name, entry in json.loads(header).items()
                if name != "__metadata__"
            ]
        except ValueError:
            offsets = []
        data = 8 + length  # where the data begins, to which offsets refer
        spans = [(data + start, data + end) for start, end in sorted(offsets)]  # in file order
        if not spans:
            spans = [(0, size)]
        return _slices_identity(file, header + str(size).encode(), spans, SLICES_PER_TENSOR)


def _slices_identity(
    file: RawIOBase, prefix: bytes, spans: list[tuple[int, int]], count: int
) -> str:
    """Hash of `count` evenly spaced slices per span, including its first and last bytes."""
    parts = [prefix]
    gaps = max(count - 1, 1)
    for start, end in spans:
        room = max(end - start - SLICE_BYTES, 0)  # between the starts of the first and last slice
        # A set, since the slices of a small span coincide.
        positions = {start + room * number // gaps for number in range(count)}
        for position in sorted(positions):
            file.seek(position)
            parts.append(file.read(min(SLICE_BYTES, end - position)))
        # Spans of different sizes may have the same slices.
        parts.append(f"{start}-{end}".encode())
    return hash_bytes(b"".join(parts))
