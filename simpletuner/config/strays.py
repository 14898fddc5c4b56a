"""What a folder on the command line is, and what to type instead.

Newcomers name a folder, but every command except `start` and `sample` takes settings.
"""

from __future__ import annotations

import mimetypes
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simpletuner.config.json_reader import read_stored
from simpletuner.config.paths import home_path

MOST_LOOKED_AT = 200  # files, since a folder may be a whole disk
CHECKPOINT = re.compile(r"checkpoint-(\d+)(-rolling)?")
CONFIG = "config.json"


def describe_folder(folder: Path, examples: Path) -> str:
    """The end of the message about a folder; empty if it is neither a run nor data.

    Args:
        examples: the folder of the packaged examples, whose runs newcomers have first.
    """
    checkpoints = _checkpoints(folder)
    if checkpoints:
        choice = _choice(_config_of_output(folder)) or _example_of_output(folder, examples)
        if not choice:
            choice = f"--config {shlex.quote(str(checkpoints[-1] / CONFIG))}"
        return (
            "is the output folder of a run, not a setting; name the run's configuration instead: "
            f"{choice}."
        )
    if not _holds_media(folder):
        return ""
    config = _config_of_dataset(folder)
    if config is not None:
        choice = _choice(config)
        advice = f"name that instead: {choice}" if choice else "leave the folder out"
        return f"is a dataset of {config}, not a setting; {advice}."
    command = f"simpletuner start {shlex.quote(str(folder))} --dry-run"
    return (
        "is a folder of pictures or clips, and this command takes the settings of a run. "
        f"`{command}` writes a configuration for the folder, and prints the env=NAME with which "
        "every command finds it."
    )


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder that record their settings, by step."""
    steps = {}
    for path in folder.glob(f"checkpoint-*/{CONFIG}"):
        match = CHECKPOINT.fullmatch(path.parent.name)
        if match is not None:
            steps[path.parent] = int(match[1])
    return sorted(steps, key=steps.__getitem__)


def _holds_media(folder: Path) -> bool:
    """Whether one of the first files below a folder is a picture or a clip, by its name."""
    looked_at = 0
    for _, _, names in os.walk(folder):
        for name in names:
            kind = mimetypes.guess_type(name)[0] or ""
            looked_at += 1
            if kind.startswith(("image/", "video/")):
                return True
            if looked_at == MOST_LOOKED_AT:
                return False
    return False


def _configs() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The configurations that commands find by default or by name, and their content."""
    for path in (Path(CONFIG), Path("config", CONFIG), *sorted(Path("config").glob(f"*/{CONFIG}"))):
        content = read_stored(path, dict)
        if content is not None:
            yield path, content


def _choice(config: Path | None) -> str:
    """The argument that chooses a configuration; empty for the default one."""
    if config is None or config.parent in (Path(), Path("config")):
        return ""
    return f"env={shlex.quote(config.parent.name)}"


def _config_of_output(folder: Path) -> Path | None:
    """The configuration whose results are in a folder."""
    for path, content in _configs():
        if _is_at(folder, content.get("output_dir")):
            return path
    return None


def _example_of_output(folder: Path, examples: Path) -> str:
    """The argument that chooses the packaged example whose results are in a folder, or nothing."""
    for path in sorted(examples.glob(f"*/{CONFIG}")):
        content = read_stored(path, dict) or {}
        if _is_at(folder, content.get("output_dir")):
            return f"example={path.parent.name}"
    return ""


def _config_of_dataset(folder: Path) -> Path | None:
    """The configuration that trains on the files of a folder."""
    for path, content in _configs():
        file = content.get("data_backend_config") or path.with_name("multidatabackend.json")
        datasets = read_stored(home_path(str(file)), list)
        for entry in datasets or []:
            if isinstance(entry, dict) and _is_at(folder, entry.get("instance_data_dir")):
                return path
    return None


def _is_at(folder: Path, written: object) -> bool:
    """Whether a setting names a folder."""
    if not isinstance(written, str):
        return False
    return os.path.realpath(home_path(written)) == os.path.realpath(folder)
