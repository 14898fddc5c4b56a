"""Where the parts of a checkpoint are: a local folder, or a repository of the Hugging Face hub.

Free of torch, so that a plan can say what is missing before anything is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from simpletuner.config.schema import ModelConfig
from simpletuner.errors import Problem, UserError
from simpletuner.models.spec import FamilySpec, Flavour

# One of these in its folder shows that a component is there.
MARKERS = (
    "config.json",
    "scheduler_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "preprocessor_config.json",
)


@dataclass(frozen=True)
class Part:
    """One component: `folder` inside `location`, which is a local folder or a hub id."""

    role: str
    location: str
    folder: str
    revision: str | None
    variant: str | None

    @property
    def is_local(self) -> bool:
        return looks_like_path(self.location)

    def local_folder(self) -> Path | None:
        """The folder on this machine, if the part is there; nothing is downloaded."""
        if self.is_local:
            folder = Path(self.location).expanduser() / self.folder
            return folder if _holds_component(folder) else None
        try:
            snapshot = snapshot_download(
                self.location, revision=self.revision, allow_patterns=[f"{self.folder}/*"], local_files_only=True
            )
        except LocalEntryNotFoundError:
            return None
        folder = Path(snapshot) / self.folder
        return folder if _holds_component(folder) else None

    def fetch(self) -> Path:
        """The folder on this machine, downloaded when it is not there yet.

        Raises:
            UserError: the hub has no such repository or part, or cannot be reached.
        """
        local = self.local_folder()
        if local is not None:
            return local
        if self.is_local:
            raise UserError(f"{self.location!r} has no {self.folder!r} folder with a model in it.")
        try:
            snapshot = snapshot_download(self.location, revision=self.revision, allow_patterns=[f"{self.folder}/*"])
        except RepositoryNotFoundError:
            raise UserError(
                f"The hub has no model {self.location!r}, or it is private: log in with `hf auth login`."
            ) from None
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise UserError(f"{self.location!r} could not be downloaded: {error}") from error
        return Path(snapshot) / self.folder


@dataclass(frozen=True)
class ModelSource:
    """The parts of one checkpoint by role, with what the configuration put in their place."""

    parts: dict[str, Part]

    @classmethod
    def from_config(cls, spec: FamilySpec, flavour: Flavour, model: ModelConfig) -> ModelSource:
        """Base path (the configured one, else the flavour's repository) and the overrides of single parts."""
        base = model.pretrained_model_name_or_path or flavour.repository
        parts = {}
        for role, component in spec.components.items():
            override = getattr(model, component.override) if component.override else None
            folder = model.pretrained_transformer_subfolder if role == "transformer" else component.folder
            parts[role] = Part(role, override or base, folder, model.revision, model.variant)
        return cls(parts)

    def __getitem__(self, role: str) -> Part:
        return self.parts[role]

    def read_config(self, role: str) -> dict[str, Any] | None:
        """config.json of a part that is on this machine, else None."""
        folder = self[role].local_folder()
        path = folder / "config.json" if folder else None
        if path is None or not path.is_file():
            return None
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

    def problems(self) -> list[Problem]:
        """Local folders that do not hold what they should; hub ids are left to the download."""
        found = []
        for location, parts in _by_location(self.parts.values()).items():
            if not parts[0].is_local:
                continue
            if not Path(location).expanduser().is_dir():
                found.append(Problem("pretrained_model_name_or_path", f"the model folder {location!r} does not exist."))
                continue
            missing = [part.folder for part in parts if part.local_folder() is None]
            if missing:
                message = f"the model folder {location!r} lacks {', '.join(missing)} (or they hold no model)."
                found.append(Problem("pretrained_model_name_or_path", message))
        return found


def looks_like_path(location: str) -> bool:
    """Whether a model location is meant as a folder: hub ids have exactly one slash and never start like a path."""
    return location.startswith(("/", ".", "~")) or location.count("/") != 1 or Path(location).expanduser().is_dir()


def _holds_component(folder: Path) -> bool:
    return any((folder / marker).is_file() for marker in MARKERS)


def _by_location(parts: Iterable[Part]) -> dict[str, list[Part]]:
    grouped: dict[str, list[Part]] = {}
    for part in parts:
        grouped.setdefault(part.location, []).append(part)
    return grouped
