"""The questions of `simpletuner start`: at most three, about settings that files and command line leave open."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.annexes.draft import Draft
from simpletuner.annexes.start.media_folder import MediaFolder, read_media_folder
from simpletuner.annexes.start.new_run import FILES, NewRun, run_name
from simpletuner.annexes.start.recipe import PURPOSES, RECIPES, TRIGGER, find_models, writes_captions
from simpletuner.annexes.start.verdict import Verdict, judge_new_run
from simpletuner.annexes.wizard.talk import HELP, Talk
from simpletuner.config.device import HERE, AskedDevice
from simpletuner.errors import Problems, counted, not_one_of


def ask(
    folder: Path,
    talk: Talk,
    given: Mapping[str, str | None],
    settings: Mapping[str, object],
    *,
    captions: bool,
    device: AskedDevice = HERE,
) -> NewRun:
    """Ask the open questions.

    Args:
        given: `purpose`, `trigger`, `model` and `name` from the command line.
        settings: keys of the config from the command line, by their main names.
        captions: captions will be written for files without one.
        device: the device that the plan is asked about.

    Raises:
        UserError: the folder, an answer or a setting is invalid.
    """
    media, name = read_media_folder(folder), given["name"] or run_name(folder)
    talk.tell(f"{folder}: {media.describe()}")
    for note in media.notes():
        talk.refuse(note)
    problems = Problems()
    _check_output(folder, name, settings, problems)
    _check(media, name, given, problems, captions=captions)
    problems.raise_if_fatal()
    purposes = {purpose: RECIPES[purpose].title for purpose in PURPOSES[media.kind]}
    purpose = _choose(talk, "What should be learned?", purposes, given["purpose"])
    trigger = (given["trigger"] or "").strip() or media.words or _ask_trigger(talk, purpose)
    captioned, values = captions or not media.uncaptioned, _as_json(settings)
    starts = {
        model: NewRun(name, media, purpose, trigger, example, captioned, values, device=device)
        for model, example in find_models(media.kind).items()
        if not (captions and media.uncaptioned) or writes_captions(example)
    }
    made = starts[_choose_model(talk, starts, given["model"])]
    _check_settings(made)
    for note in made.fit.notes():
        talk.refuse(note)
    if made.captioned_as:
        _name_exceptions(talk, media, made.captioned_as)
    return made


def _name_exceptions(talk: Talk, media: MediaFolder, words: str) -> None:
    """Name the captions without the words that most captions contain."""
    captions = media.parts[0].captions
    unnamed = captions.without(words)
    if unnamed:
        count = f"{len(unnamed)} of {counted(len(captions.texts), 'caption')}"
        talk.refuse(f"Without {words!r}, which most captions contain: {count}, such as {unnamed[0]!r}.")


def _check_settings(made: NewRun) -> None:
    """Raise problems of the config; files that are written later are not checked."""
    judged = {key: value for key, value in made.config().items() if key not in FILES or key in made.settings}
    Problems(Draft(made.folder / "config.json", judged).judgement.problems).raise_if_fatal()


def _ask_trigger(talk: Talk, purpose: str) -> str:
    if purpose == "edit":
        return ""
    what = f", and what it is, as in: {TRIGGER}, a grey cat" if purpose == "subject" else ""
    question = f"A word for it that the model does not know{what} [{TRIGGER}]: "
    while (answer := talk.read_line(question)) == HELP:
        talk.say("    It names what is learned, in captions now and later in your prompts.", "cyan")
    return answer or TRIGGER


def _check_output(folder: Path, name: str, settings: Mapping[str, object], report: Problems) -> None:
    """Refuse to write the previews into the folder of the training files, usually the working folder."""
    output, inner = Path(str(settings.get("output_dir", f"output/{name}"))), folder.resolve()
    if output.resolve().is_relative_to(inner):
        way = f"cd {shlex.quote(str(inner.parent))} && simpletuner start {shlex.quote(inner.name)}"
        report.error("", f"{output} is inside {folder}, so previews would be trained. Start outside of it: {way}")


def _check(media: MediaFolder, name: str, given: Mapping[str, str | None], report: Problems, *, captions: bool) -> None:
    """All problems of the folder and the given answers, before the first question."""
    target = Path("config") / name
    if re.search(r"[/\\\x00-\x1f]", name):
        report.error("", f"--name {name!r} is not the name of a folder.")
    elif target.exists() or target.is_symlink():
        message = f"{target} exists already: continue with `simpletuner train env={shlex.quote(name)}`, or set --name."
        report.error("", message)
    for option, names in (("purpose", PURPOSES[media.kind]), ("model", [*find_models(media.kind)])):
        if (value := given[option]) is not None and value not in names:
            report.error("", f"--{option} {not_one_of(value, names)}")
    for part in media.parts:
        _check_captions(part, given["model"], report, captions=captions)


def _check_captions(media: MediaFolder, model: str | None, report: Problems, *, captions: bool) -> None:
    """Problems of missing captions, or of a model that cannot write them."""
    missing, captioned, models = len(media.uncaptioned), len(media.captioned), find_models(media.kind)
    if not missing:
        return
    if captions:
        if model in models and not writes_captions(models[model]):
            report.error("", f"--caption: the text encoder of {model} cannot write captions; choose another model.")
        if media.captions.is_table:
            advice = "add the missing ones to the table, or write all captions into .txt files."
            report.error("", f"--caption writes .txt files, and captions are read from a metadata table: {advice}")
    elif captioned or media.sources:
        first = media.uncaptioned[0]
        advice = "writes them with the model's own Qwen2.5-VL, or put a .txt file of the same name beside each."
        message = f"no caption for {missing} of {missing + captioned} files ({first} is the first). --caption {advice}"
        report.error("", message)


def _as_json(settings: Mapping[str, object]) -> dict[str, Any]:
    """Settings with values as in JSON: 500, not "500"."""
    values = dict(settings)
    for key, value in settings.items():
        with suppress(ValueError):
            values[key] = json.loads(value) if isinstance(value, str) else value
    return values


def _choose_model(talk: Talk, starts: Mapping[str, NewRun], given: str | None) -> str:
    """The model; those that fit the machine come first. A tiny one is never chosen unasked."""
    if talk.defaults and given is None:
        starts = {model: start for model, start in starts.items() if not start.is_demo}
    judged = len(starts) > 1 and given is None
    verdicts = {model: judge_new_run(start) if judged else Verdict(True, "") for model, start in starts.items()}
    choices = {model: verdicts[model].words for model in sorted(starts, key=lambda model: not verdicts[model].suits)}
    return _choose(talk, "Which model?", choices, given)


def _choose(talk: Talk, text: str, choices: Mapping[str, str], given: str | None) -> str:
    """The given choice, the only one, or the answer to a question; the first choice is the default."""
    if given is not None or len(choices) == 1:
        return given or next(iter(choices))
    return talk.pick(text, choices)
