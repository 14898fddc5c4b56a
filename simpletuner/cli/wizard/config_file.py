"""Reading the config that is there, and writing the new one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.atomic import write_atomically
from simpletuner.cli.wizard.draft import Draft
from simpletuner.config.load import canonical, read_json_layer
from simpletuner.config.schema import GROUPS, option_names
from simpletuner.errors import ConfigError, Problem, UserError


def check_target(file: Path) -> None:
    """Say what forbids writing the file before the first question, not after the last.

    Raises:
        UserError: it cannot be written.
    """
    if file.suffix in (".toml", ".env"):
        raise UserError(f"{file}: the wizard writes JSON; name a file such as config/config.json.")
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file in it, such as {file / 'config.json'}.")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{file} cannot be written: no permission in {folder}.")


def load_values(file: Path, problems: list[Problem]) -> dict[str, Any]:
    """Keys by their proper names, with the values as they were written.

    Raises:
        ConfigError: the file cannot be read.
    """
    layer = read_json_layer(file, problems)
    if layer is None:
        raise ConfigError(problems)
    names = option_names()
    canonical(layer, problems)
    values = {}
    for written, value in layer.values:
        key = written.removeprefix("--").replace("-", "_")
        if value not in (None, "") or key == "resume_from_checkpoint":
            values[names[key].name if key in names else written] = value
    return values


def unusable_keys(draft: Draft) -> dict[str, str]:
    """Keys of a loaded file that training refuses, with the reason."""
    reasons: dict[str, str] = {}
    for problem in draft.judgement.problems:
        key = re.split(r"[.\[]", problem.where)[0]
        if problem.fatal and key in draft.loaded:
            reasons.setdefault(key, problem.message)
    return reasons


def render_config(values: Mapping[str, Any]) -> str:
    """JSON in the order of the schema, with an empty line between its groups; unknown keys stand at the end."""
    known = [[name for name in group.model_fields if name in values] for group in GROUPS.values()]
    others = [name for name in values if name not in option_names()]
    blocks = [",\n".join(_entry(name, values[name]) for name in names) for names in (*known, others) if names]
    return "{\n" + ",\n\n".join(blocks) + "\n}\n"


def save(file: Path, text: str) -> None:
    """Write the file, whole or not at all; what it was before stays beside it as `.bak`."""
    target = file.resolve()  # behind a link, the file and not the link is replaced
    if target.is_file():
        write_atomically(backup_of(target), target.read_bytes())
    write_atomically(target, text)


def backup_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.bak")


def _entry(name: str, value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False).replace("\n", "\n  ")
    return f"  {json.dumps(name)}: {text}"
