"""The files of an output folder: those that simpletuner wrote, and others, which it never deletes.

simpletuner's files are those that its records name, and those whose names are listed here. All
others are files of the user, as is everything in `quarantine`, and every link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from simpletuner.annexes.payloads import EVENTS_FILE
from simpletuner.annexes.report.samples import SAMPLES_FOLDER
from simpletuner.annexes.report.sheet import CONTENT as SHEET_FILE
from simpletuner.annexes.runs.console import CONSOLE_FILE
from simpletuner.atomic import STRAY_FILE
from simpletuner.budget.device import RATES_FILE
from simpletuner.caching.entry import ENTRY_NAME
from simpletuner.config.json_reader import read_stored
from simpletuner.data.file_index import INDEX_NAME
from simpletuner.hashing import hash_json
from simpletuner.planning.checkpoint_folder import (
    BRANCHES,
    FILE_NAME,
    FOLDER_NAME,
    LINE_FILE,
    STARS_FILE,
    SWEEP_FOLDER,
    Manifest,
    result_step,
)
from simpletuner.planning.lineage import WANDB_FILE
from simpletuner.planning.lock import LOCK_FILE, STARTED_FILE
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    METRICS_FILE,
    MIME,
    REPORT_FILE,
    VIDEO_MIME,
    MediaRecord,
    read_media,
)
from simpletuner.weights.lora_names import LORA_FILE

ARCHIVED_FILE = "archived.json"  # in the folder of an archived run: what it was called
MEDIA = "|".join(suffix.removeprefix(".") for suffix in (*MIME, *VIDEO_MIME))

# Files at the top of an output folder, or of a branch.
TOP_FILES = frozenset(
    {
        ARCHIVED_FILE,
        CONSOLE_FILE,
        EVENTS_FILE,
        LINE_FILE,
        MEDIA_FILE,
        METRICS_FILE,
        RATES_FILE,
        REPORT_FILE,
        STARS_FILE,
        f".{STARS_FILE}.lock",
        STARTED_FILE,
        WANDB_FILE,
        "caption.log",
        "data_backend_config.json",
        "kernel_choices.json",
        "outcomes.json",
        "unfinished.json",
    }
)
# Other files, by their paths below the output folder.
PATTERNS = (
    # Results: LoRAs, adapters in their native form, converted files, the pipeline of a full run.
    r"(ema/)?[a-z_]+_weights\.safetensors",
    r"(ema/)?(config_lora|lycoris_config)\.json",
    r"[^/]+-(comfyui|diffusers)\.safetensors",
    r"(pipeline|transformer|transformer_ema)/([\w-]+/)?[\w.-]+\.(json|safetensors|jinja|model|txt)",
    # Checkpoints without a manifest, which were not completed.
    r"checkpoint-[\w-]+/(ema/)?[a-z_]+_weights\.safetensors",
    r"checkpoint-[\w-]+/(ema/)?[\w-]+\.json",
    r"checkpoint-[\w-]+/training_state/(shards/)?[\w.-]+\.(pt|safetensors|distcp|metadata)",
    r"checkpoint-[\w-]+/(transformer|transformer_ema)/[\w.-]+\.(json|safetensors)",
    # Previews, samples and comparisons; the model card.
    rf"validation_images/(in_progress/)?step_\d+_[^/]+\.({MEDIA})",
    rf"benchmarks/base_model/[^/]+_\d+x\d+[^/]*\.({MEDIA})",
    rf"{SWEEP_FOLDER}/(sheet\.(html|json|png)|(losses|owner)\.json|job\.log)",
    rf"{SWEEP_FOLDER}/cells/[0-9a-f]{{20}}\.(json|{MEDIA})",
    rf"{SAMPLES_FOLDER}/job\.log",
    r"model_card/(README\.md|simpletuner_config\.json)",
    rf"model_card/assets/(image_\d+_\d+|evaluation_loss)\.({MEDIA})",
    # What was asked of the run, and records of its failures.
    r"requests/[a-z_]+",
    r"failures/step-[^/]+/(failure\.json|config\.json|traceback\.txt)",
    # Caches.
    rf"(\w+/)?cache/([\w.-]+/)*{ENTRY_NAME.pattern}",
    rf"(\w+/)?cache/([\w.-]+/)*({re.escape(INDEX_NAME)}|verifying\.json)",
)
OWN = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS))
BRANCH = re.compile(rf"{BRANCHES}/\d+/")
PREVIEW = re.compile(r"(?:validation_images|benchmarks)/.+")


@dataclass(frozen=True)
class Contents:
    """What lies in an output folder, by paths below it.

    Attributes:
        files: files that simpletuner wrote, with their size in bytes and time of change.
        foreign: all other files and links.
        folders: all folders, the deepest first.
    """

    folder: Path
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Contents:
        """Everything in a folder; links are not followed.

        Raises:
            OSError: a folder cannot be listed.
        """
        contents = cls(folder)
        recorded = recorded_files(folder)
        for path in _walk(folder, contents.folders):
            name = path.relative_to(folder).as_posix()
            if name == LOCK_FILE:
                continue  # comes and goes, also with a look at these files
            is_own = name in recorded or _is_own(folder, name)
            if path.is_symlink() or not path.is_file() or not is_own:
                contents.foreign.append(name)
            else:
                status = path.lstat()
                contents.files[name] = (status.st_size, status.st_mtime_ns)
        return contents

    @property
    def bytes(self) -> int:
        """The size of simpletuner's files."""
        return sum(size for size, _ in self.files.values())

    @property
    def checkpoints(self) -> list[str]:
        """The folders of checkpoints."""
        return sorted({name.split("/")[0] for name in self.files if name.startswith("checkpoint-")})

    @property
    def previews(self) -> int:
        """The number of previews."""
        return sum(bool(PREVIEW.fullmatch(name)) for name in self.files)

    @property
    def lora_step(self) -> int | None:
        """The step of the LoRA; None without one."""
        return result_step(self.folder, "lora") if LORA_FILE in self.files else None

    @property
    def digest(self) -> str:
        """Changes with any file, so that only what was shown is deleted."""
        return hash_json({"files": sorted(self.files.items()), "foreign": sorted(self.foreign)})


def recorded_files(folder: Path) -> set[str]:
    """The previews and cells of comparisons that the records of a folder name."""
    names = set()
    for below in (folder, *(folder / BRANCHES).glob("*")):
        prefix = below.relative_to(folder)
        names |= {(prefix / record.path).as_posix() for record in read_media(below / MEDIA_FILE)}
    cells = read_stored(folder / SWEEP_FOLDER / SHEET_FILE, list[MediaRecord]) or []
    return names | {f"{SWEEP_FOLDER}/{record.path}" for record in cells}


def _walk(folder: Path, folders: list[str]) -> Iterator[Path]:
    """The files and links below a folder; `folders` receives the folders, the deepest first."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, below, names in os.walk(folder, topdown=False, onerror=refuse):
        here = Path(parent)
        yield from (here / name for name in sorted(names))
        # os.walk lists links to folders among the folders.
        yield from (here / name for name in sorted(below) if (here / name).is_symlink())
        if here != folder:
            folders.append(here.relative_to(folder).as_posix())


def _is_own(folder: Path, name: str) -> bool:
    """Whether simpletuner writes files of this name."""
    branch = BRANCH.match(name)
    if branch is not None:
        return _is_own(folder / branch[0], name.removeprefix(branch[0]))
    first, _, rest = name.partition("/")
    if not rest:
        return first in TOP_FILES or _is_stray(first) or OWN.fullmatch(name) is not None
    if FOLDER_NAME.fullmatch(first):
        manifest = read_stored(folder / first / FILE_NAME, Manifest)
        if manifest is not None:
            return rest == FILE_NAME or rest in manifest.files
    if first == SAMPLES_FOLDER and _has_recipe(folder / name):
        return True
    return OWN.fullmatch(name) is not None or _is_stray(Path(name).name)


def _is_stray(name: str) -> bool:
    """Whether a file is the rest of a write that was killed."""
    return STRAY_FILE.fullmatch(name) is not None


def _has_recipe(path: Path) -> bool:
    """Whether a file is a sample or its recipe, which lie beside each other."""
    if path.suffix != ".json":
        return path.with_suffix(".json").is_file()
    return any(path.with_suffix(f".{suffix}").is_file() for suffix in MEDIA.split("|"))
