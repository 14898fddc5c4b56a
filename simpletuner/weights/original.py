"""Transformers that are published as one file in their original form.

The names and shapes of their weights are those of diffusers, but diffusers loads a folder with a
config.json. `OriginalTransformer` makes one beside the downloaded file, of a link to it and the
config.json of a related checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner.atomic import write_json
from simpletuner.errors import UserError
from simpletuner.weights.files import read_object
from simpletuner.weights.hub import repository_files
from simpletuner.weights.part import DIFFUSERS_WEIGHTS, MARKERS, Part, folder_fault

CONFIG = MARKERS[0]
# Beside the file in the hub's cache, so that it is removed with it.
FOLDER = "diffusers-form"


@dataclass(frozen=True, kw_only=True)
class OriginalTransformer(Part):
    """A part whose repository holds one file of weights and no config.json.

    Attributes:
        file: path of the weights in the repository.
        related: the transformer whose config.json it shares, but for `changes`.
        diffusers_form: the same transformer in diffusers' form, which is used if the hub has it.
    """

    file: str
    related: Part
    changes: Mapping[str, object]
    diffusers_form: Part

    def local_folder(self) -> Path | None:
        published = self.diffusers_form.local_folder()
        if published is not None:
            return published
        file = self._cached_file(self, self.file)
        if file is None:
            return None
        folder = self._folder_beside(file)
        if folder_fault(folder) is not None:
            return None
        return folder

    def absence(self) -> str | None:
        config = self._cached_file(self.related, f"{self.related.folder}/{CONFIG}")
        if config is not None and self._cached_file(self, self.file) is not None:
            return None  # `fetch` makes the folder from these
        if self._is_published():
            return self.diffusers_form.absence()
        return super().absence() or self.related.absence()

    def download_size(self) -> int | None:
        if self.local_folder() is not None:
            return 0
        if self._is_published():
            return self.diffusers_form.download_size()
        return (repository_files(self.location, self.revision) or {}).get(self.file)

    def fetch(self) -> Path:
        local = self.local_folder()
        if local is not None:
            return local
        if self._is_published():
            return self.diffusers_form.fetch()

        weights = self._fetch_file(self, self.file)
        config = self._fetch_file(self.related, f"{self.related.folder}/{CONFIG}")
        settings = read_object(config)
        if settings is None:
            raise UserError(f"{CONFIG} of {self.related.location!r} cannot be read.")
        folder = self._folder_beside(weights)
        folder.mkdir(exist_ok=True)
        _link(weights.resolve(), folder / f"{DIFFUSERS_WEIGHTS}.safetensors")
        write_json(folder / CONFIG, {**settings, **self.changes})
        fault = folder_fault(folder)
        if fault:
            raise UserError(f"{self.location!r} was downloaded, but cannot be used: {fault}.")
        return folder

    def _is_published(self) -> bool:
        """Whether the hub has the transformer in diffusers' form, as far as it answers."""
        return bool(repository_files(self.diffusers_form.location, self.revision))

    def _folder_beside(self, file: Path) -> Path:
        """The folder in diffusers' form, in the repository's folder in the hub's cache."""
        snapshot = file.parents[self.file.count("/")]
        return snapshot / FOLDER

    @staticmethod
    def _cached_file(part: Part, path: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(part.location, path, revision=part.revision)
        return Path(cached) if isinstance(cached, str) else None

    @staticmethod
    def _fetch_file(part: Part, path: str) -> Path:
        from huggingface_hub import hf_hub_download

        with part.downloading():
            return Path(hf_hub_download(part.location, path, revision=part.revision))

    def _absent(self, reason: str) -> str:
        return (
            f"is not on this machine, and {reason}. On another one, download it with `hf download "
            f"{self.location} {self.file}` and `hf download {self.related.location}`, and copy "
            "its hub cache here."
        )


def _link(target: Path, link: Path) -> None:
    """Make a link to a file; a hard link where the system allows no symbolic ones.

    The link is relative, as those in the hub's cache, so that a copied cache stays complete.
    """
    if link.exists():
        return
    if link.is_symlink():  # an absolute one of an earlier version, in a cache that was moved
        link.unlink(missing_ok=True)
    try:
        link.symlink_to(os.path.relpath(target, link.parent.resolve()))
    except FileExistsError:
        return  # made by another process of the run
    except OSError:
        os.link(target, link)
