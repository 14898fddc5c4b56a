"""The interview of `simpletuner start`: from a folder and a command line to a new run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from simpletuner.annexes.draft import Draft
from simpletuner.annexes.questions.dialogue import Dialogue
from simpletuner.annexes.questions.interview import ask_all
from simpletuner.annexes.start.answers import STOP, RunAnswers
from simpletuner.annexes.start.left_out import SHARE
from simpletuner.annexes.start.media_folder import MediaFolder, read_media_folder
from simpletuner.annexes.start.new_run import FILES, NewRun, holds_run, run_name
from simpletuner.annexes.start.questions import QUESTIONS
from simpletuner.annexes.start.recipe import PURPOSES, find_models, writes_captions
from simpletuner.config.device import HERE, AskedDevice
from simpletuner.config.sources import CONFIG_NAME
from simpletuner.errors import Problems, UserError, counted, not_one_of, shorten


def ask_run(
    folder: Path,
    dialogue: Dialogue,
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
    media = read_media_folder(folder)
    answers = RunAnswers(
        given["name"] or run_name(folder),
        media,
        given,
        _as_json(settings),
        captions=captions,
        device=device,
        offers_demo=dialogue.asks,  # a demo is never chosen unasked
        asks=dialogue.asks,
    )
    dialogue.print(f"{folder}: {media.describe()}")
    for note in media.notes():
        dialogue.warn(note)
    _check(folder, answers).raise_if_fatal()
    ask_all(QUESTIONS, answers, dialogue)
    if answers.answered.get("rest") == STOP:
        raise UserError(f"{answers.left_out.describe()} Nothing was written.")
    run = answers.run(answers.model)
    _check_settings(run)
    _check_existing(run)
    _warn_of_files(run, media, dialogue)
    return run


def _warn_of_files(run: NewRun, media: MediaFolder, dialogue: Dialogue) -> None:
    """Warn of files that are left out, that do not fit, or whose captions lack the trigger.

    Args:
        media: all files of the folder.
    """
    missing = len(media.files.files) - len(run.media.files.files)
    if missing:
        verb = "has" if missing == 1 else "have"
        dialogue.warn(f"Left out: {counted(missing, 'file')} that {verb} no caption.")
    for note in run.fit.notes():
        dialogue.warn(note)
    if run.captioned_as:
        warn_of_captions_without(run.captioned_as, media, dialogue)


def warn_of_captions_without(words: str, media: MediaFolder, dialogue: Dialogue) -> None:
    """Warn of captions without the words that most captions contain."""
    captions = media.parts[0].captions
    unnamed = captions.without(words)
    if unnamed:
        count = f"{len(unnamed)} of {counted(len(captions.texts), 'caption')}"
        dialogue.warn(
            f"Without {words!r}, which most captions contain: {count}, such as {unnamed[0]!r}."
        )


def _check(folder: Path, answers: RunAnswers) -> Problems:
    """All problems of the folder and the command line, before the first question."""
    report = Problems()
    _check_output(folder, answers, report)
    _check_name(answers.name, report)
    _check_choices(answers, report)
    for part in answers.media.parts:
        _check_captions(part, answers, report)
    return report


def _check_output(folder: Path, answers: RunAnswers, report: Problems) -> None:
    """Refuse an output folder inside the folder of the files, usually the working folder."""
    output = Path(str(answers.settings.get("output_dir", f"output/{answers.name}")))
    inner = folder.resolve()
    if output.resolve().is_relative_to(inner):
        parent = shlex.quote(str(inner.parent))
        command = f"cd {parent} && simpletuner start {shlex.quote(inner.name)}"
        report.error(
            "",
            f"{output} is inside {folder}, so previews would be trained. Start outside of "
            f"it: {command}",
        )


def _check_name(name: str, report: Problems) -> None:
    """Report a name that cannot be the name of a new config."""
    target = Path("config") / name
    if re.search(r"[/\\\x00-\x1f]", name):
        report.error("", f"--name {name!r} is not the name of a folder.")
    elif not CONFIG_NAME.fullmatch(name):
        report.error(
            "",
            f"--name {name!r}: a name has letters, digits, -, _ and . only, as in "
            f"{run_name(Path(name))}.",
        )
    elif (target.exists() or target.is_symlink()) and not holds_run(target):
        message = (
            f"{target} exists already: continue with `simpletuner train env={shlex.quote(name)}`, "
            "or set --name."
        )
        report.error("", message)


def _check_choices(answers: RunAnswers, report: Problems) -> None:
    """Report a purpose or a model that does not suit the files."""
    kind = answers.media.kind
    for option, names in (("purpose", PURPOSES[kind]), ("model", [*find_models(kind)])):
        value = answers.given[option]
        if value is not None and value not in names:
            report.error("", f"--{option} {not_one_of(value, names)}")


def _check_captions(media: MediaFolder, answers: RunAnswers, report: Problems) -> None:
    """Report missing captions, or a model that cannot write them."""
    missing = len(media.uncaptioned)
    captioned = len(media.captioned)
    if not missing:
        return
    if answers.captions:
        model = answers.given["model"]
        models = find_models(media.kind)
        if model in models and not writes_captions(models[model]):
            report.error(
                "",
                f"--caption: the text encoder of {model} cannot write captions; choose "
                "another model.",
            )
        if media.captions.is_table:
            advice = "add the missing ones to the table, or write all captions into .txt files."
            report.error(
                "",
                "--caption writes .txt files, and captions are read from a metadata table: "
                f"{advice}",
            )
    elif (captioned or media.sources) and not _may_leave_out(missing, captioned, answers):
        first = media.uncaptioned[0]
        advice = (
            "writes them with the model's own Qwen2.5-VL, or put a .txt file of the same name "
            "beside each."
        )
        message = (
            f"no caption for {missing} of {missing + captioned} files ({first} is the first). "
            f"--caption {advice}"
        )
        report.error("", message)


def _may_leave_out(missing: int, captioned: int, answers: RunAnswers) -> bool:
    """Whether files without a caption can be left out: if they are few, or if the user is asked."""
    if answers.media.concepts or not captioned:
        return False
    return answers.asks or missing * SHARE <= missing + captioned


def _check_settings(run: NewRun) -> None:
    """Raise problems of the config; files that are written later are not checked."""
    checked = {
        key: value for key, value in run.config().items() if key not in FILES or key in run.settings
    }
    judgement = Draft(run.folder / "config.json", checked).judgement
    Problems(judgement.problems).raise_if_fatal()


def _check_existing(run: NewRun) -> None:
    """Raise a problem if the config exists, and is not what these answers would write.

    `start --dry-run` leaves such a config behind, from which `start` goes on.
    """
    if not (run.root / run.folder).exists():
        return
    changed = run.differences()
    if not changed:
        return
    report = Problems()
    name = shlex.quote(run.name)
    report.error(
        "",
        f"{run.folder} exists already, and differs from these answers in {shorten(changed, 5)}. "
        f"Train it as it is with `simpletuner train env={name}`, or set --name.",
    )
    report.raise_if_fatal()


def _as_json(settings: Mapping[str, object]) -> dict[str, Any]:
    """Settings with values as in JSON: 500, not "500"."""
    values = dict(settings)
    for key, value in settings.items():
        if isinstance(value, str):
            with suppress(ValueError):
                values[key] = json.loads(value)
    return values
