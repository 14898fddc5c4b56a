"""The pictures or clips of one entry: what lies in its folder, and what the index still remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from simpletuner.config.datasets import DatasetConfig

from .context import DataContext
from .discovery import Scan, is_readable, scan
from .inventory import FileFacts, inspect_files, load_index
from .sample import Rejected


@dataclass(frozen=True)
class Folder:
    """A dataset folder after every file was looked at.

    Attributes:
        root: the folder.
        facts: of each whole picture or clip, by name, sorted.
        damaged: facts of those with a problem.
        captions: caption file by `pair_key`.
        gone: captions of those that are used although their files are gone.
        rejected: every other file.
    """

    root: Path
    facts: Mapping[str, FileFacts]
    damaged: Mapping[str, FileFacts]
    captions: Mapping[str, str]
    gone: Mapping[str, tuple[str, ...]]
    rejected: tuple[Rejected, ...]

    @property
    def is_there(self) -> bool:
        """Whether there is a folder, or an index to use in its place."""
        return is_readable(self.root) or bool(self.facts)


def read_folder(config: DatasetConfig, context: DataContext) -> Folder:
    """Look at every file of an entry; one that did not change since the last run is not read again."""
    root = Path(config.instance_data_dir or "")
    known = load_index(Path(config.cache_dir_vae or ""), root)
    listing = scan(root, clips=config.holds_clips and context.spec.media == "video") if is_readable(root) else Scan()
    rejected = [Rejected(config.id, name, *why) for name, why in listing.ignored.items()]
    names = list(listing.files)
    if known and _keeps_list(config):
        detail = "was added after the list of files was made, which is kept as it is"
        rejected += [Rejected(config.id, name, "not chosen", detail) for name in names if name not in known]
        names = [name for name in names if name in known]
    facts = inspect_files(root, names, known, workers=context.max_workers)
    # A damaged file may have been moved to quarantine; only a picture that was good is missed.
    lost = {name: fact for name, fact in known.items() if name not in listing.files and fact.problem is None}
    if context.defaults.ignore_missing_files:
        facts |= lost
    else:
        rejected += [Rejected(config.id, name, "gone", "was here in the last run and is gone") for name in lost]
    for name, fact in facts.items():
        if fact.problem is not None:
            rejected.append(Rejected(config.id, name, "damaged" if fact.content else "unreadable", fact.problem))
    return Folder(
        root=root,
        facts={name: facts[name] for name in sorted(facts) if facts[name].problem is None},
        damaged={name: fact for name, fact in facts.items() if fact.problem is not None},
        captions=listing.captions,
        gone={name: fact.captions for name, fact in lost.items() if name in facts},
        rejected=tuple(rejected),
    )


def _keeps_list(config: DatasetConfig) -> bool:
    skipped = config.skip_file_discovery or []
    return bool(config.preserve_data_backend_cache) or "metadata" in skipped or "aspect" in skipped
