"""Locates the parts of a checkpoint and checks their weight files. Imports no torch.

A part is in a local folder or in a repository of the Hugging Face hub.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from simpletuner.config.schema import RunConfig
from simpletuner.config.values import absence_of, home_path, similar_path
from simpletuner.errors import Problem, UserError, shorten, warning
from simpletuner.models.cost import Shape, Shapes
from simpletuner.models.spec import FamilySpec, Flavour

INDEX_SUFFIX = ".safetensors.index.json"
DIFFUSERS_WEIGHTS = "diffusion_pytorch_model"
INDEX_FILE = "model_index.json"  # of a pipeline
MODEL_KEY, VAE_KEY = "pretrained_model_name_or_path", "pretrained_vae_model_name_or_path"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")


class WeightsError(ValueError):
    """A weight file that cannot be used; the message continues a sentence that starts with its name."""


def tensor_shapes(path: Path) -> dict[str, Shape]:
    """Names and shapes in a safetensors file.

    Raises:
        WeightsError: as for `weights_header`.
    """
    return {name: shape for name, (_, shape) in weights_header(path).items()}


def weights_header(path: Path) -> dict[str, tuple[str, Shape]]:
    """Dtype and shape of each tensor in a safetensors file whose data is complete.

    Raises:
        WeightsError: the file is not a safetensors file, or is truncated.
    """
    try:
        status = path.stat()
        return _header(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}") from None


@lru_cache(maxsize=256)
def _header(path: Path, size: int, mtime_ns: int) -> dict[str, tuple[str, Shape]]:
    """The header, cached by size and modification time, since several parts of a plan read it."""
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        advice = "download it again, if by git then with git lfs"
        raise WeightsError(f"is not a complete safetensors file ({error}); {advice}") from None


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


OFFLINE = "the hub is offline (HF_HUB_OFFLINE)"


def hub_fault(error: Exception) -> str:
    """Why the hub returned nothing, in one line."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import LocalEntryNotFoundError

    is_unreached = isinstance(error, LocalEntryNotFoundError)
    reason = " ".join(str(error.__cause__ or error if is_unreached else error).split()).rstrip(".")
    return reason if not is_unreached else OFFLINE if is_offline_mode() else f"the hub cannot be reached ({reason})"


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{0,95}[\w]", re.ASCII)  # owner/name
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # model.language_model.layers.27.mlp.up_proj.weight
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
        """Names and shapes of the weights to load; empty if unknown or not on this machine.

        Raises:
            WeightsError: a file is damaged.
        """
        folder = self.local_folder()
        # safetensors first, as the libraries load them.
        for pattern, shapes_of in (("*.safetensors", tensor_shapes), ("*pytorch_model*.bin", pickled_shapes)):
            files = [path for path in sorted(folder.glob(pattern)) if self._has_variant(path)] if folder else []
            if files:
                return {name: shape for path in files for name, shape in shapes_of(path).items()}
        return {}

    def weight_files(self) -> dict[str, Path]:
        """The safetensors file of each weight, as selected by diffusers; empty if it loads another format."""
        folder, variant = self.fetch(), f".{self.variant}" if self.variant else ""
        # diffusion_pytorch_model.safetensors.index.fp16.json
        index = folder / f"{DIFFUSERS_WEIGHTS}{INDEX_SUFFIX.removesuffix('.json')}{variant}.json"
        if index.is_file():
            listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in listed.items()}
        file = folder / f"{DIFFUSERS_WEIGHTS}{variant}.safetensors"
        return dict.fromkeys(tensor_shapes(file), file) if file.is_file() else {}

    def read_config(self) -> dict[str, Any] | None:
        """The config.json of a model or scheduler; None if it is not on this machine."""
        folder, name = self.local_folder(), "scheduler_config.json" if self.role == "scheduler" else "config.json"
        return read_object(folder / name) if folder else None

    def tokens(self) -> int | None:
        """The number of tokens of a tokenizer; None if it has no tokenizer.json on this machine."""
        folder = self.local_folder()
        content = read_object(folder / "tokenizer.json") if folder else None
        if content is None:
            return None
        # Added tokens may have ids beyond the vocabulary, with gaps.
        return max(len(content["model"]["vocab"]), *(token["id"] + 1 for token in content["added_tokens"]), 0)

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

        return f"{self._absent(OFFLINE)} Or unset HF_HUB_OFFLINE." if is_offline_mode() else None

    def _absent(self, why: str) -> str:
        revision = f" --revision {self.revision}" if self.revision else ""
        return (
            f"is not on this machine, and {why}. Download it on another one with `hf download {self.location}{revision}"
            f" --local-dir FOLDER`, and set {self.key} to that folder."
        )

    def _download(self, *, local_files_only: bool = False) -> Path:
        from huggingface_hub import snapshot_download

        # The part's files, without older formats that single-model repositories also contain.
        wanted = [f"{self.folder}/*", INDEX_FILE] if self.folder else ["*.json", "*.safetensors"]
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
            raise UserError(f"{self.location!r} {self.absence() or self._absent(hub_fault(error))}") from error
        except (HfHubHTTPError, OSError) as error:
            raise UserError(f"{self.location!r} could not be downloaded: {hub_fault(error)}.") from error
        if fault := _fault(folder) or _unreadable(folder):
            raise UserError(f"{self.location!r} was downloaded, but its part {self.folder!r} cannot be used: {fault}.")
        return folder

    def fetch_index(self) -> Path:
        """The file that lists the parts of the pipeline, downloaded if necessary.

        Raises:
            UserError: as for `fetch`.
        """
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        if self.is_local:
            return home_path(self.location) / INDEX_FILE
        try:
            return Path(hf_hub_download(self.location, INDEX_FILE, revision=self.revision))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise UserError(f"{INDEX_FILE} of {self.location!r} {self._absent(hub_fault(error))}") from error


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
                problems.append(Problem(key, f"the model folder {absence_of(home_path(location))}"))
            elif faults := [f"{part.folder} ({fault})" for part in parts if (fault := part.fault()) is not None]:
                problems.append(Problem(key, f"the model folder {location!r} lacks a usable {', '.join(faults)}."))
        return problems

    def doubts(self) -> Iterator[Problem]:
        """Warn about names of hub models that are probably misspelt folders."""
        for location, key in {part.location: part.key for part in self.parts.values()}.items():
            folder = Path(location)
            if HUB_ID.fullmatch(location) and not folder.exists() and folder.parent.is_dir():
                message = f"there is no folder {location!r}, so it is taken for a model of the hub."
                yield warning(key, f"{message}{similar_path(folder, '*/')}")


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
        content = read_object(path)
        if content is None:
            return f"{path.name} cannot be read"
        if path.name == "tokenizer.json" and not _is_tokenizer(content):
            return "tokenizer.json holds no vocabulary"
    return None


def _is_tokenizer(content: Mapping[str, Any]) -> bool:
    """Whether the content of a tokenizer.json has the entries that loading needs."""
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return isinstance(vocabulary, dict | list) and len(vocabulary) > 0 and isinstance(added, list)


def check_channels(source: ModelSource, transformer_key: str, vae_key: str) -> Iterator[Problem]:
    """Report different numbers of latent channels in transformer and VAE, by these keys; skips missing parts."""
    takes = (source["transformer"].read_config() or {}).get(transformer_key)
    makes = (source["vae"].read_config() or {}).get(vae_key)
    if takes != makes and None not in (takes, makes):
        yield Problem(VAE_KEY, f"the VAE has {makes} channels, the transformer {takes}.")


def encoder_fault(config: Mapping[str, Any], shapes: Shapes, tokens: int | None) -> str | None:
    """The mismatch of a text encoder's weights with its config or tokenizer, or None.

    Args:
        tokens: number of tokens of its tokenizer, if known. Embeddings have a few more rows, as padding.
    """
    inner = config.get("text_config")
    settings = {**config, **(inner if isinstance(inner, dict) else {})}
    return _fault_of_layers(settings, shapes) or _fault_of_embeddings(settings, shapes, tokens)


def _fault_of_layers(settings: Mapping[str, Any], shapes: Shapes) -> str | None:
    wanted = settings.get("num_hidden_layers")
    layers = {int(match[1]) for match in map(LAYER.search, shapes) if match}
    absent = sorted(set(range(wanted)) - layers) if isinstance(wanted, int) and layers else []
    numbers = shorten([str(number) for number in absent])
    return f"is incomplete: its files lack layers {numbers} of {wanted}" if absent else None


def _fault_of_embeddings(settings: Mapping[str, Any], shapes: Shapes, tokens: int | None) -> str | None:
    size = [settings.get(key) for key in ("vocab_size", "hidden_size")]  # None is the class's default
    for name, shape in shapes.items():
        if not name.endswith(("embed_tokens.weight", "token_embedding.weight")):
            continue
        if any(said not in (None, actual) for said, actual in zip(size, shape, strict=False)):
            return f"has {name} of {list(shape)}, its config.json {size}"
        # A vocabulary of less than half the rows belongs to another model, since padding adds only a few rows.
        if tokens is not None and not shape[0] / 2 < tokens <= shape[0]:
            return f"has an embedding of {shape[0]} tokens, its tokenizer has {tokens}"
    return None


# Lower and upper limits of the numbers, or lists of numbers, that normalise latents; far beyond published VAEs, whose
# scales are 0.13 to 8.
LOWEST = {"scaling_factor": 1e-3, "latents_std": 1e-3, "shift_factor": -1e3, "latents_mean": -1e3}
LARGEST_SCALE = 1e3


def vae_fault(config: Mapping[str, Any]) -> str | None:
    """A value in a VAE's config that would corrupt all latents, or None. Missing values are the class's defaults."""
    for key, lowest in LOWEST.items():
        value: Any = config.get(key)
        if key not in config or (value is None and key != "scaling_factor"):
            continue
        form, numbers = ("a list of numbers", value) if key.startswith("latents_") else ("a number", [value])
        # `type`, since True is an int; NaN fails the comparison.
        are_numbers = isinstance(numbers, list) and all(type(each) in (int, float) for each in numbers)
        if not are_numbers or not all(lowest <= each <= LARGEST_SCALE for each in numbers):
            return f"has {key} {repr(value)[:60]}, not {form} between {lowest:g} and {LARGEST_SCALE:g}"
    return None


def blocks_of(group: str, shapes: Shapes) -> dict[int, dict[str, Shape]]:
    """Shapes of the weights of a group's blocks, by block number and by name within the block."""
    blocks: dict[int, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        number, dot, rest = name.removeprefix(f"{group}.").partition(".")
        if name.startswith(f"{group}.") and dot and number.isdecimal():
            blocks.setdefault(int(number), {})[rest] = shape
    return blocks


def differing_weights(group: str, blocks: Mapping[int, Shapes]) -> list[str]:
    """Weights missing in some blocks, or with a shape that differs from the majority."""
    everything = {name for block in blocks.values() for name in block}
    usual = {name: Counter(block[name] for block in blocks.values() if name in block) for name in everything}
    return sorted(
        f"{group}.{number}.{name}"
        for number, block in blocks.items()
        for name in everything
        if block.get(name) != usual[name].most_common(1)[0][0]
    )


def pickled_shapes(path: Path) -> dict[str, Shape]:
    """Names and shapes in a torch.save file, without executing its code; empty for files from before torch 1.6, and for
    other content."""
    status = path.stat()
    return _pickled_shapes(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _pickled_shapes(path: Path, size: int, mtime_ns: int) -> dict[str, Shape]:
    """The shapes, cached by size and modification time, since several parts of a plan read them."""
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save writes a zip: archive/data.pkl has names and shapes, archive/data/… the values.
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                weights = _Shapes(file).load()
    except Exception:  # noqa: BLE001 - damaged archives and opcodes may raise any error; loading reports the fault
        return {}
    shapes = list(weights.values()) if isinstance(weights, dict) else [None]
    are_shapes = all(isinstance(shape, tuple) and all(type(side) is int for side in shape) for shape in shapes)
    return dict(weights) if are_shapes else {}


class _Shapes(pickle.Unpickler):
    """Reads shapes instead of tensors, and refuses everything that weights do not need."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return None
        return {
            ("collections", "OrderedDict"): OrderedDict,
            # Rebuilds only the shape of a tensor; a parameter is rebuilt from a tensor.
            ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, shape, *rest: shape,
            ("torch._utils", "_rebuild_parameter"): lambda shape, *rest: shape,
        }[module, name]

    def persistent_load(self, pid: Any) -> None:
        """Skip the values of a tensor."""
