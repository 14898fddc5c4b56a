"""Locates the parts of a checkpoint and checks their weight files. Imports no torch.

A part is in a local folder or in a repository of the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from simpletuner.config.schema import RunConfig
from simpletuner.config.values import home_path
from simpletuner.errors import Problem, UserError
from simpletuner.headers import METADATA, read_head
from simpletuner.models.cost import Shape
from simpletuner.models.spec import FamilySpec, Flavour

INDEX_SUFFIX = ".safetensors.index.json"
DIFFUSERS_WEIGHTS = "diffusion_pytorch_model"
MODEL_KEY, VAE_KEY = "pretrained_model_name_or_path", "pretrained_vae_model_name_or_path"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")


class WeightsError(ValueError):
    """A weight file that cannot be used; the message continues a sentence that starts with its name."""


def tensor_shapes(path: Path) -> dict[str, Shape]:
    """Names and shapes in a safetensors file.

    Raises:
        WeightsError: as for `weights_header`.
    """
    return {name: tuple(entry["shape"]) for name, entry in weights_header(path).items() if name != METADATA}


def weights_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file whose data is complete.

    Raises:
        WeightsError: the file is not a safetensors file, or is truncated.
    """
    try:
        status = path.stat()
        return _header(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}") from None
    except WeightsError:
        raise
    except ValueError as error:
        raise WeightsError(f"is not a safetensors file: {error}") from None


@lru_cache(maxsize=256)
def _header(path: Path, size: int, mtime_ns: int) -> dict[str, Any]:
    """The header, cached by size and modification time, since several parts of a plan read it."""
    with path.open("rb") as file:
        head, header = read_head(file)
    end = len(head) + max((entry["data_offsets"][1] for name, entry in header.items() if name != METADATA), default=0)
    if size < end:
        raise WeightsError(f"is truncated: {size} of {end} bytes are there")
    return header


def weights_fault(folder: Path) -> str | None:
    """The fault of a model folder that has a config.json; None if its weights are complete."""
    if read_object(folder / "config.json") is None:
        return "config.json cannot be read"
    files = [path for path in sorted(folder.iterdir()) if path.suffix in WEIGHT_SUFFIXES]
    if not files:
        return "it contains no weights"
    faults = chain(map(_index_fault, sorted(folder.glob(f"*{INDEX_SUFFIX}"))), map(_file_fault, files))
    return next(filter(None, faults), None)


def _index_fault(index: Path) -> str | None:
    """The fault of the list of a model's files."""
    shards = (read_object(index) or {}).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        return f"{index.name} cannot be read"
    absent = sorted({shard for shard in shards.values() if not index.with_name(shard).is_file()})
    return f"it lacks {', '.join(absent)}" if absent else None


def _file_fault(path: Path) -> str | None:
    """The fault of a weight file visible in its header, or None."""
    try:
        if path.suffix == ".safetensors":
            tensor_shapes(path)
    except WeightsError as error:
        return f"{path.name} {error}"
    return None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or None."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{0,95}[\w]", re.ASCII)  # owner/name
# A component is present if its folder holds one of these files.
MARKERS = (
    "config.json",
    "scheduler_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "preprocessor_config.json",
)
SETTINGS = (*MARKERS[1:], "processor_config.json", "generation_config.json")


@dataclass(frozen=True)
class Part:
    """A component: `folder` inside `location`, a local folder or hub id that the config key `key` set."""

    role: str
    key: str
    location: str
    folder: str
    revision: str | None
    variant: str | None

    @property
    def is_local(self) -> bool:
        return looks_like_path(self.location)

    @property
    def described(self) -> str:
        """Key and location of the part, for messages."""
        return f"{self.key}: the {self.folder or self.role} in {self.location!r}"

    def local_folder(self) -> Path | None:
        """The folder on this machine, or None; nothing is downloaded."""
        base = home_path(self.location) if self.is_local else self._snapshot()
        return base / self.folder if base is not None and _fault(base / self.folder) is None else None

    def fault(self) -> str | None:
        """The fault of this part in a local folder, or None."""
        folder = home_path(self.location) / self.folder
        return _fault(folder) or _unreadable(folder) or self._fault_of_variant(folder)

    def weight_shapes(self) -> dict[str, Shape]:
        """Names and shapes of the weights to load; empty for formats other than safetensors, or if they are not on this
        machine.

        Raises:
            WeightsError: a file is damaged.
        """
        folder = self.local_folder()
        files = sorted(folder.glob("*.safetensors")) if folder else []
        return {name: shape for path in files if self._has_variant(path) for name, shape in tensor_shapes(path).items()}

    def weight_files(self) -> dict[str, Path]:
        """The safetensors file of each weight, as selected by diffusers.

        Raises:
            UserError: there is none.
        """
        folder, variant = self.fetch(), f".{self.variant}" if self.variant else ""
        # diffusion_pytorch_model.safetensors.index.fp16.json
        index = folder / f"{DIFFUSERS_WEIGHTS}{INDEX_SUFFIX.removesuffix('.json')}{variant}.json"
        if index.is_file():
            listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in listed.items()}
        file = folder / f"{DIFFUSERS_WEIGHTS}{variant}.safetensors"
        if not file.is_file():
            raise UserError(f"{self.described} has no {file.name}.")
        return dict.fromkeys(tensor_shapes(file), file)

    def read_config(self) -> dict[str, Any] | None:
        """The config.json of a model or scheduler; None if it is not on this machine."""
        folder, name = self.local_folder(), "scheduler_config.json" if self.role == "scheduler" else "config.json"
        return read_object(folder / name) if folder else None

    def _has_variant(self, path: Path) -> bool:
        """Whether a weight file has the chosen variant: `model.fp16.safetensors`, `model.fp16-00001-of-…`."""
        _, dot, suffix = path.stem.partition(".")
        return suffix.partition("-")[0] == self.variant if self.variant else not dot

    def _fault_of_variant(self, folder: Path) -> str | None:
        files = [path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES]
        if files and self.variant and not any(map(self._has_variant, files)):
            return f"its weights have no variant {self.variant!r}"
        return None

    def _snapshot(self) -> Path | None:
        """The repository's folder in the hub's cache, or None."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        with suppress(LocalEntryNotFoundError):
            return self._download(local_files_only=True) if HUB_ID.fullmatch(self.location) else None
        return None

    def absence(self) -> str | None:
        """Why a part that is not on this machine cannot be downloaded either; None if a download can be tried."""
        from huggingface_hub import is_offline_mode

        if not is_offline_mode():
            return None
        return (
            f"is not on this machine, and the hub is offline (HF_HUB_OFFLINE). Unset it to download the model, or set "
            f"{self.key} to a folder."
        )

    def _download(self, *, local_files_only: bool = False) -> Path:
        from huggingface_hub import snapshot_download

        # The part's files, without older formats that single-model repositories also contain.
        wanted = [f"{self.folder}/*"] if self.folder else ["*.json", "*.safetensors"]
        folder = snapshot_download(
            self.location, revision=self.revision, allow_patterns=wanted, local_files_only=local_files_only
        )
        return Path(folder)

    def fetch(self) -> Path:
        """The folder on this machine, downloaded if necessary.

        Raises:
            UserError: the hub lacks the repository or part, or cannot be reached.
        """
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

        if local := self.local_folder():
            return local
        if self.is_local:
            raise UserError(f"{self.location!r} has no {self.folder!r} folder with a model in it.")
        try:
            folder = self._download() / self.folder
        except RepositoryNotFoundError:
            raise UserError(
                f"The hub has no model {self.location!r}, or it is private: log in with `hf auth login`."
            ) from None
        except LocalEntryNotFoundError as error:
            raise UserError(f"{self.location!r} {self.absence() or f'could not be downloaded: {error}'}") from error
        except (HfHubHTTPError, OSError) as error:
            raise UserError(f"{self.location!r} could not be downloaded: {error}") from error
        if fault := _fault(folder) or _unreadable(folder):
            raise UserError(f"{self.location!r} was downloaded, but its part {self.folder!r} cannot be used: {fault}.")
        return folder


@dataclass(frozen=True)
class ModelSource:
    """The parts of a checkpoint by role, with the overrides of the configuration."""

    parts: dict[str, Part]

    @classmethod
    def from_config(cls, spec: FamilySpec, flavour: Flavour, config: RunConfig) -> ModelSource:
        """Parts at the configured base path, else in the flavour's repository, unless a key overrides them."""
        model, settings = config.model, config.flat
        base = model.pretrained_model_name_or_path or flavour.repository
        parts = {}
        for role, component in spec.components.items():
            override = settings[component.override] if component.override else None
            folder = model.pretrained_transformer_subfolder if role == "transformer" else component.folder
            key = component.override if override and component.override else MODEL_KEY
            parts[role] = Part(role, key, override or base, folder, model.revision, model.variant)
        return cls(parts)

    def with_transformer(self, part: Part | None) -> ModelSource:
        """The source with its transformer replaced, unless `part` is None."""
        return ModelSource({**self.parts, "transformer": part}) if part else self

    def __getitem__(self, role: str) -> Part:
        return self.parts[role]

    def read_config(self, role: str) -> dict[str, Any] | None:
        """The settings of a part; None if it is not on this machine."""
        return self[role].read_config()

    def problems(self) -> list[Problem]:
        """Report unusable local folders and malformed hub ids; missing repositories show on download."""
        problems = []
        # One message per location, since most parts have the same.
        for location in dict.fromkeys(part.location for part in self.parts.values()):
            parts = [part for part in self.parts.values() if part.location == location]
            key = parts[0].key
            if not parts[0].is_local:
                if not HUB_ID.fullmatch(location):
                    problems.append(Problem(key, f"{location!r} is neither an existing folder nor a valid hub id."))
            elif not home_path(location).is_dir():
                problems.append(Problem(key, f"the model folder {location!r} does not exist."))
            elif faults := [f"{part.folder} ({fault})" for part in parts if (fault := part.fault()) is not None]:
                problems.append(Problem(key, f"the model folder {location!r} lacks a usable {', '.join(faults)}."))
        return problems


def looks_like_path(location: str) -> bool:
    """Whether a model location is a folder: hub ids have exactly one slash and do not start like a path."""
    return location.startswith(("/", ".", "~")) or location.count("/") != 1 or Path(location).is_dir()


def _fault(folder: Path) -> str | None:
    """The fault of a component's folder visible in its files, or None."""
    if not any((folder / marker).is_file() for marker in MARKERS):
        return "it is not there"
    return weights_fault(folder) if (folder / MARKERS[0]).is_file() else None


def _unreadable(folder: Path) -> str | None:
    """The fault of the settings files beside a model, or None."""
    for path in filter(Path.is_file, (folder / name for name in SETTINGS)):
        if read_object(path) is None:
            return f"{path.name} cannot be read"
    return None


def check_channels(source: ModelSource, transformer_key: str, vae_key: str) -> Iterator[Problem]:
    """Report different numbers of latent channels in transformer and VAE, by these keys; skips missing parts."""
    takes = (source.read_config("transformer") or {}).get(transformer_key)
    makes = (source.read_config("vae") or {}).get(vae_key)
    if takes != makes and None not in (takes, makes):
        yield Problem(VAE_KEY, f"the VAE has {makes} channels, the transformer {takes}.")
