"""What the Hugging Face hub has of a checkpoint: the files that a part needs, and their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache

SAFETENSORS = ".safetensors"
PICKLED = ".bin"
# Files of a model, tokenizer or scheduler that are not weights.
SETTINGS_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
# How long a plan waits for the hub, whose answer it can do without.
ANSWER_SECONDS = 3.0
OFFLINE = "the hub is offline (HF_HUB_OFFLINE)"


@dataclass(frozen=True)
class Selection:
    """Patterns of files in a repository, in the form that `snapshot_download` takes.

    Attributes:
        settings: of files that are not weights.
        weights: of weight files.
        ignored: of weight files that `weights` would match too.
    """

    settings: tuple[str, ...]
    weights: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def allowed(self) -> list[str]:
        """Patterns of all files to select."""
        return [*self.settings, *self.weights]

    def pick(self, files: Iterable[str]) -> list[str]:
        """The selected files."""
        return _filter(files, self.allowed, self.ignored)

    def has_weights(self, files: Iterable[str]) -> bool:
        """Whether any of these files are weights to select."""
        return bool(_filter(files, list(self.weights), self.ignored))


def _filter(files: Iterable[str], allowed: list[str], ignored: tuple[str, ...]) -> list[str]:
    """The files that match an allowed pattern and no ignored one, as `snapshot_download` does."""
    selected: list[str] = []
    for file in files:
        is_allowed = any(fnmatch(file, pattern) for pattern in allowed)
        is_ignored = any(fnmatch(file, pattern) for pattern in ignored)
        if is_allowed and not is_ignored:
            selected.append(file)
    return selected


def part_files(folder: str, variant: str | None, suffix: str = SAFETENSORS) -> Selection:
    """The files of one part: its settings, and its weights in one format and one variant.

    A folder may hold the same weights up to four times, as `model.safetensors`,
    `model.fp16.safetensors`, `pytorch_model.bin` and `tf_model.h5`.

    Args:
        folder: the part's folder in the repository; empty if the repository is the part.
        variant: the word before the suffix, such as `fp16`; None for the plain files.
    """
    prefix = f"{folder}/" if folder else ""
    settings = tuple(f"{prefix}{pattern}" for pattern in SETTINGS_FILES)
    if variant is None:
        # A further dot in the name begins a variant.
        return Selection(
            settings=settings,
            weights=(f"{prefix}*{suffix}",),
            ignored=(f"{prefix}*.*{suffix}",),
        )
    single_file = f"{prefix}*.{variant}{suffix}"
    shards = f"{prefix}*.{variant}-*{suffix}"
    return Selection(settings=settings, weights=(single_file, shards), ignored=())


def best_selection(files: Iterable[str], folder: str, variant: str | None) -> Selection:
    """`part_files` in safetensors, or pickled if the part's weights exist only in that format."""
    names = list(files)
    selection = part_files(folder, variant)
    pickled = part_files(folder, variant, PICKLED)
    if not selection.has_weights(names) and pickled.has_weights(names):
        return pickled
    return selection


def repository_files(repository: str, revision: str | None) -> Mapping[str, int] | None:
    """Sizes in bytes of the files in a repository of the hub.

    Returns:
        the sizes by path; empty if the hub has no such repository, or does not show it to this
        user; None if the hub does not answer at once. The first answer holds as long as the
        process.
    """
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        return None
    return ask_hub(repository, revision)


@cache
def ask_hub(repository: str, revision: str | None) -> Mapping[str, int] | None:
    """The answer of `repository_files`, over the network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(
            repository, revision=revision, files_metadata=True, timeout=ANSWER_SECONDS
        )
    except GatedRepoError:
        return None  # it exists, and the download reports how to get access
    except RepositoryNotFoundError:
        return {}
    except Exception:  # noqa: BLE001 - releases of the client raise different errors; a plan can do without an answer
        return None
    return {file.rfilename: file.size or 0 for file in info.siblings or ()}


def hub_fault(error: Exception) -> str:
    """Why the hub returned nothing, in one line."""
    from huggingface_hub import is_offline_mode
    from huggingface_hub.errors import LocalEntryNotFoundError

    is_unreachable = isinstance(error, LocalEntryNotFoundError)
    if is_unreachable and is_offline_mode():
        return OFFLINE
    cause: BaseException = error
    if is_unreachable and error.__cause__ is not None:
        cause = error.__cause__
    reason = " ".join(str(cause).split()).rstrip(".")
    if is_unreachable:
        return f"the hub cannot be reached ({reason})"
    return reason
