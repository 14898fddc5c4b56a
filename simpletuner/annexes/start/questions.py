"""`simpletuner start`: at most three questions, for what the files and the command line leave open."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.annexes.start.material import Material
from simpletuner.annexes.start.recipe import TRIGGER, Recipe, Start, run_name
from simpletuner.annexes.wizard.talk import Talk
from simpletuner.errors import UserError, did_you_mean


def ask(
    folder: Path, talk: Talk, given: Mapping[str, str | None], settings: Mapping[str, object], *, captions: bool
) -> Start:
    """Ask what the files and the command line leave open.

    Args:
        given: `purpose`, `trigger`, `model` and `name` from the command line.
        settings: keys of the config from there.
        captions: captions will be written for files that have none.

    Raises:
        UserError: the folder or an answer cannot be used.
    """
    material = Material.of(folder)
    name = _free_name(given["name"] or run_name(folder))
    _check_captions(material, captions=captions)
    talk.tell(f"{folder}: {material.describe()}")
    purposes = {purpose: Recipe.of(purpose).title for purpose in material.purposes}
    purpose = _choose(talk, "What should be learned?", purposes, given["purpose"], "--purpose")
    trigger = (given["trigger"] or "").strip()
    if not trigger and purpose != "edit":
        what = f", and what it is, as in: {TRIGGER}, a grey cat" if purpose == "subject" else ""
        trigger = talk.read_line(f"A word for it that the model does not know{what} [{TRIGGER}]: ") or TRIGGER
    captioned = captions or not material.uncaptioned
    # As JSON has them: 500 and not "500".
    values = {key: value if (read := _as_json(value)) is None else read for key, value in settings.items()}

    def start(example: str) -> Start:
        return Start(name, material, purpose, trigger, example, captioned, values)

    return start(_choose_model(talk, material.models, given["model"], start))


def _free_name(name: str) -> str:
    if re.search(r"[/\\\x00-\x1f]", name):
        raise UserError(f"--name {name!r} is not the name of a folder.")
    target = Path("config") / name
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already: go on with `simpletuner train env={name}`, or give --name.")
    return name


def _as_json(value: object) -> Any:
    with suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else None
    return None


def _check_captions(material: Material, *, captions: bool) -> None:
    missing, files = len(material.uncaptioned), len(material.files.files)
    if captions or not missing or (missing == files and not material.sources):
        return
    raise UserError(
        f"{missing} of {files} files have no caption ({material.uncaptioned[0]} is the first). --caption writes them "
        "with the model's own Qwen2.5-VL, or put a .txt file of the same name beside each."
    )


def _choose_model(talk: Talk, models: Sequence[str], given: str | None, start: Any) -> str:
    """The example of the model: what fits comes first, in the order of the list."""
    verdicts = {model: start(model).verdict() for model in models} if len(models) > 1 and given is None else {}
    ordered = sorted(models, key=lambda model: not verdicts.get(model, (True, ""))[0])
    choices = {model.removesuffix("-lora"): verdicts.get(model, (True, ""))[1] for model in ordered}
    return f"{_choose(talk, 'Which model?', choices, given, '--model')}-lora"


def _choose(talk: Talk, text: str, choices: Mapping[str, str], given: str | None, option: str) -> str:
    """The given choice, the only one, or the answer to a question; the first is the default."""
    names = list(choices)
    if given is not None and given not in names:
        raise UserError(f"{option} {given!r} is not one of: {', '.join(names)}.{did_you_mean(given, names)}")
    if given is not None or len(names) == 1:
        return given or names[0]
    return talk.pick(text, choices)
