"""`simpletuner start`: at most three questions, for what the files and the command line leave open."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.annexes.draft import Draft
from simpletuner.annexes.start.recipe import FILES, TRIGGER, Material, Recipe, Start, run_name
from simpletuner.annexes.wizard.talk import HELP, Talk
from simpletuner.errors import Problems, UserError, not_one_of


def ask(
    folder: Path, talk: Talk, given: Mapping[str, str | None], settings: Mapping[str, object], *, captions: bool
) -> Start:
    """Ask what the files and the command line leave open.

    Args:
        given: `purpose`, `trigger`, `model` and `name` from the command line.
        settings: keys of the config from there, by their main names.
        captions: captions will be written for files that have none.

    Raises:
        UserError: the folder, an answer or a setting cannot be used.
    """
    material = Material.of(folder)
    name = _free_name(given["name"] or run_name(folder))
    _check_captions(material, captions=captions)
    talk.tell(f"{folder}: {material.describe()}")
    purposes = {purpose: Recipe.of(purpose).title for purpose in material.purposes}
    purpose = _choose(talk, "What should be learned?", purposes, given["purpose"], "--purpose")
    trigger = (given["trigger"] or "").strip() or _ask_trigger(talk, purpose)
    captioned = captions or not material.uncaptioned
    values = {key: _as_json(value) for key, value in settings.items()}

    def start(example: str) -> Start:
        return Start(name, material, purpose, trigger, example, captioned, values)

    starts = {model.removesuffix("-lora"): start(model) for model in material.models}
    if captions and material.uncaptioned:
        starts = _with_captioner(starts, given["model"])
    made = starts[_choose_model(talk, starts, given["model"])]
    # Before anything is written; the files beside the config come with it.
    judged = {key: value for key, value in made.config().items() if key not in FILES or key in values}
    Problems(Draft(made.folder / "config.json", judged).judgement.problems).raise_if_fatal()
    return made


def _ask_trigger(talk: Talk, purpose: str) -> str:
    if purpose == "edit":
        return ""
    what = f", and what it is, as in: {TRIGGER}, a grey cat" if purpose == "subject" else ""
    question = f"A word for it that the model does not know{what} [{TRIGGER}]: "
    while (answer := talk.read_line(question)) == HELP:
        talk.say("    It stands for what is learned: in captions now, later in your prompts.", "cyan")
    return answer or TRIGGER


def _free_name(name: str) -> str:
    if re.search(r"[/\\\x00-\x1f]", name):
        raise UserError(f"--name {name!r} is not the name of a folder.")
    target = Path("config") / name
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already: go on with `simpletuner train env={name}`, or give --name.")
    return name


def _as_json(value: object) -> Any:
    """A value as JSON has it: 500 and not "500"."""
    with suppress(ValueError):
        return json.loads(value) if isinstance(value, str) else value
    return value


def _check_captions(material: Material, *, captions: bool) -> None:
    missing, captioned = len(material.uncaptioned), len(material.captioned)
    if captions or not missing or not (captioned or material.sources):
        return
    first = material.uncaptioned[0]
    advice = "--caption writes them with the model's own Qwen2.5-VL, or put a .txt file of the same name beside each"
    raise UserError(f"{missing} of {missing + captioned} files have no caption ({first} is the first). {advice}.")


def _with_captioner(starts: Mapping[str, Start], given: str | None) -> dict[str, Start]:
    """Those whose model can write the captions."""
    able = {model: start for model, start in starts.items() if start.spec.words.captioner and not start.is_demo}
    if given in starts.keys() - able.keys():
        raise UserError(f"--caption: the text encoder of {given} writes none; choose another model.")
    return able


def _choose_model(talk: Talk, starts: Mapping[str, Start], given: str | None) -> str:
    """The model: what fits comes first, in the order of the list."""
    judged = len(starts) > 1 and given is None
    verdicts = {model: start.verdict() if judged else (True, "") for model, start in starts.items()}
    choices = {model: verdicts[model][1] for model in sorted(starts, key=lambda model: not verdicts[model][0])}
    return _choose(talk, "Which model?", choices, given, "--model")


def _choose(talk: Talk, text: str, choices: Mapping[str, str], given: str | None, option: str) -> str:
    """The given choice, the only one, or the answer to a question; the first is the default."""
    names = list(choices)
    if given is not None and given not in names:
        raise UserError(f"{option} {not_one_of(given, names)}")
    if given is not None or len(names) == 1:
        return given or names[0]
    return talk.pick(text, choices)
