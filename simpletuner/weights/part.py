"""A part of a checkpoint: where it is, what is wrong with its files, and how it is fetched.

A part is in a local folder or in a repository of the Hugging Face hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simpletuner.config.paths import home_path
from simpletuner.errors import UserError, did_you_mean
from simpletuner.weights.files import (
    INDEX_SUFFIX,
    NO_WEIGHTS,
    WEIGHT_SUFFIXES,
    Shape,
    first_rows_fit_bf16,
    pickled_shapes,
    read_object,
    tensor_shapes,
    weights_fault,
)
from simpletuner.weights.hub import (
    OFFLINE,
    PICKLED,
    SAFETENSORS,
    Selection,
    best_selection,
    hub_fault,
    part_files,
    repository_files,
)

DIFFUSERS_WEIGHTS = "diffusion_pytorch_model"
INDEX_FILE = "model_index.json"  # of a pipeline
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{0,95}[\w]", re.ASCII)  # owner/name
HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)")
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
    """A component of a checkpoint.

    Attributes:
        role: of the component in the pipeline, such as `vae`.
        key: the config key that sets `location`.
        location: a local folder or a hub id.
        folder: the component's folder inside `location`; empty if that is the component.
        revision: branch, tag or commit on the hub; None for the default.
        variant: the word before the suffix of weight files, such as `fp16`; None for plain files.
        published: hub ids of the family's checkpoints.
        overrides: values of its config.json that the run replaces.
    """

    role: str
    key: str
    location: str
    folder: str
    revision: str | None
    variant: str | None
    published: tuple[str, ...] = ()
    overrides: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def is_local(self) -> bool:
        return looks_like_path(self.location)

    @property
    def described(self) -> str:
        """Key and location of the part, for messages."""
        return f"{self.key}: the {self.folder or self.role} in {self.location!r}"

    def local_folder(self) -> Path | None:
        """The folder on this machine, or None; nothing is downloaded."""
        base: Path | None = home_path(self.location)
        if not self.is_local:
            base = self._snapshot()
        if base is None or folder_fault(base / self.folder) is not None:
            return None
        return base / self.folder

    def fault(self) -> str | None:
        """The fault of this part in a local folder, or None."""
        folder = home_path(self.location) / self.folder
        return folder_fault(folder) or _unreadable(folder) or self._fault_of_variant(folder)

    def weight_shapes(self) -> dict[str, Shape]:
        """Names and shapes of the weights to load; empty if unknown or not on this machine.

        Raises:
            WeightsError: a file is damaged.
        """
        folder = self.local_folder()
        if folder is None:
            return {}
        # safetensors first, as the libraries load them.
        formats = (("*.safetensors", tensor_shapes), ("*pytorch_model*.bin", pickled_shapes))
        for pattern, shapes_of in formats:
            files = [path for path in sorted(folder.glob(pattern)) if self._has_variant(path)]
            if not files:
                continue
            shapes: dict[str, Shape] = {}
            for path in files:
                shapes |= shapes_of(path)
            return shapes
        return {}

    def fits_bf16(self, is_chosen: Callable[[str], bool]) -> bool:
        """Whether bf16 represents all chosen weights on this machine exactly.

        Judged by the first row of each: if weights were rounded to bf16, then all of their rows.
        """
        folder = self.local_folder()
        if folder is None:
            return False
        files = [path for path in sorted(folder.glob("*.safetensors")) if self._has_variant(path)]
        for path in files:
            chosen = tuple(name for name in tensor_shapes(path) if is_chosen(name))
            if not first_rows_fit_bf16(path, chosen):
                return False
        return bool(files)

    def weight_files(self) -> dict[str, Path]:
        """The safetensors file of each weight, as diffusers selects them.

        Empty if diffusers loads another format.
        """
        folder = self.fetch()
        variant = f".{self.variant}" if self.variant else ""
        # With a variant: diffusion_pytorch_model.safetensors.index.fp16.json.
        index = folder / f"{DIFFUSERS_WEIGHTS}{INDEX_SUFFIX.removesuffix('.json')}{variant}.json"
        if index.is_file():
            listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in listed.items()}
        file = folder / f"{DIFFUSERS_WEIGHTS}{variant}.safetensors"
        if not file.is_file():
            return {}
        return dict.fromkeys(tensor_shapes(file), file)

    def read_config(self) -> dict[str, Any] | None:
        """The config.json of a model or scheduler with `overrides`.

        None if it is not on this machine.
        """
        folder = self.local_folder()
        if folder is None:
            return None
        name = "scheduler_config.json" if self.role == "scheduler" else "config.json"
        content = read_object(folder / name)
        return None if content is None else {**content, **self.overrides}

    def tokens(self) -> int | None:
        """The number of tokens of a tokenizer; None if it has no tokenizer.json on this machine."""
        folder = self.local_folder()
        if folder is None:
            return None
        content = read_object(folder / "tokenizer.json")
        if content is None:
            return None
        count = len(content["model"]["vocab"])
        # Added tokens may have ids beyond the vocabulary, with gaps.
        for token in content["added_tokens"]:
            count = max(count, token["id"] + 1)
        return count

    def _has_variant(self, path: Path) -> bool:
        """Whether a weight file has the chosen variant.

        With the variant fp16, it is called `model.fp16.safetensors` or `model.fp16-00001-of-…`.
        """
        _, dot, suffix = path.stem.partition(".")
        if not self.variant:
            return not dot
        return suffix.partition("-")[0] == self.variant

    def _fault_of_variant(self, folder: Path) -> str | None:
        files = [path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES]
        if files and self.variant and not any(map(self._has_variant, files)):
            return f"its weights have no variant {self.variant!r}"
        return None

    def _snapshot(self) -> Path | None:
        """The repository's folder in the hub's cache, or None."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        with suppress(LocalEntryNotFoundError):
            if HUB_ID.fullmatch(self.location):
                return self._download(self._selection(SAFETENSORS), local_files_only=True)
        return None

    def absence(self) -> str | None:
        """Why a part that is not on this machine cannot be downloaded either.

        None if a download can be tried.
        """
        from huggingface_hub import is_offline_mode

        if is_offline_mode():
            return f"{self._absent(OFFLINE)} Or unset HF_HUB_OFFLINE."
        if repository_files(self.location, self.revision) == {}:
            return self._not_found()
        return None

    def _absent(self, reason: str) -> str:
        revision = f" --revision {self.revision}" if self.revision else ""
        return (
            f"is not on this machine, and {reason}. Download it on another one with `hf download "
            f"{self.location}{revision} --local-dir FOLDER`, and set {self.key} to that folder."
        )

    def _not_found(self) -> str:
        if self.location in self.published:
            return (
                "is no longer on the hub, or no longer public. If you have been granted access, "
                "log in with `hf auth login`; otherwise look for its new place, and set "
                f"{self.key} to it."
            )
        return f"is not on the hub, or not public.{did_you_mean(self.location, self.published)}"

    def download_size(self) -> int | None:
        """Bytes still to download; None if the hub does not answer."""
        if self.local_folder() is not None:
            return 0
        sizes = repository_files(self.location, self.revision)
        if not sizes:
            return None
        selection = best_selection(sizes, self.folder, self.variant)
        return sum(sizes[file] for file in selection.pick(sizes))

    def _download(self, selection: Selection, *, local_files_only: bool = False) -> Path:
        """The repository's folder in the hub's cache, with the selected files."""
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            self.location,
            revision=self.revision,
            allow_patterns=[*selection.allowed, INDEX_FILE],
            ignore_patterns=[*selection.ignored],
            local_files_only=local_files_only,
        )
        return Path(folder)

    def fetch(self) -> Path:
        """The folder on this machine, downloaded if necessary.

        Raises:
            UserError: the hub lacks the repository or part, or cannot be reached.
        """
        local = self.local_folder()
        if local is not None:
            return local
        if self.is_local:
            raise UserError(f"{self.location!r} has no {self.folder!r} folder with a model in it.")
        with self.downloading():
            folder = self._download(self._selection(SAFETENSORS)) / self.folder
            if folder_fault(folder) == NO_WEIGHTS:  # the repository has only the older format
                self._download(self._selection(PICKLED))
        fault = folder_fault(folder) or _unreadable(folder)
        if fault:
            part = f"its part {self.folder!r}"
            raise UserError(
                f"{self.location!r} was downloaded, but {part} cannot be used: {fault}."
            )
        return folder

    def _selection(self, suffix: str) -> Selection:
        return part_files(self.folder, self.variant, suffix)

    @contextmanager
    def downloading(self) -> Iterator[None]:
        """Translate the errors of a download.

        Raises:
            UserError: one line that names the repository and what can be done.
        """
        from huggingface_hub.errors import (
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )

        try:
            yield
        except RepositoryNotFoundError:
            raise UserError(f"{self.location!r} {self._not_found()}") from None
        except LocalEntryNotFoundError as error:
            reason = self.absence() or self._absent(hub_fault(error))
            raise UserError(f"{self.location!r} {reason}") from error
        except (HfHubHTTPError, OSError) as error:
            message = f"{self.location!r} could not be downloaded: {hub_fault(error)}."
            raise UserError(message) from error

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
            absent = self._absent(hub_fault(error))
            raise UserError(f"{INDEX_FILE} of {self.location!r} {absent}") from error


def looks_like_path(location: str) -> bool:
    """Whether a model location is a folder, not a hub id."""
    # Hub ids have exactly one slash and do not start like a path.
    if location.startswith(("/", ".", "~")) or location.count("/") != 1:
        return True
    return Path(location).is_dir()


def hub_id_of(address: str) -> str:
    """The hub id in the address of a model's page; empty if it is not one."""
    match = HUB_ADDRESS.match(address)
    return match[1] if match else ""


def folder_fault(folder: Path) -> str | None:
    """The fault of a component's folder visible in its files, or None."""
    if not any((folder / marker).is_file() for marker in MARKERS):
        return "it is not there"
    if not (folder / MARKERS[0]).is_file():  # not a model, so it has no weights
        return None
    return weights_fault(folder)


def _unreadable(folder: Path) -> str | None:
    """The fault of the settings files beside a model, or None."""
    for name in SETTINGS:
        path = folder / name
        if not path.is_file():
            continue
        content = read_object(path)
        if content is None:
            return f"{name} cannot be read"
        if name == "tokenizer.json" and not _is_tokenizer(content):
            return "tokenizer.json holds no vocabulary"
    return None


def _is_tokenizer(content: Mapping[str, Any]) -> bool:
    """Whether the content of a tokenizer.json has the entries that loading needs."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    has_vocabulary = isinstance(vocabulary, dict | list) and len(vocabulary) > 0
    return has_vocabulary and isinstance(content.get("added_tokens"), list)
