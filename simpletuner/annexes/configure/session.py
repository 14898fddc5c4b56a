"""A session of `simpletuner configure`: questions, review, writing the files, and next steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from simpletuner.annexes.configure.answers import ConfigAnswers
from simpletuner.annexes.configure.next_steps import show_next_steps
from simpletuner.annexes.configure.questions import QUESTIONS
from simpletuner.annexes.configure.review import review
from simpletuner.annexes.configure.written import save
from simpletuner.annexes.draft import Draft, key_of
from simpletuner.annexes.questions.dialogue import Dialogue
from simpletuner.annexes.questions.interview import ask_all
from simpletuner.config.load import canonical
from simpletuner.config.records import without_removed
from simpletuner.config.schema import main_name
from simpletuner.config.sources import read_json_layer
from simpletuner.errors import ConfigError, Problems, UserError

WELCOME = """\
Answer the questions, or press Enter for the value in [brackets].
? explains a question, - leaves a setting out, back returns to the previous question.
Nothing is written until you confirm at the end."""


def run_session(file: Path, dialogue: Dialogue) -> bool:
    """Ask, review and write; returns whether the file was written.

    Raises:
        UserError: the file cannot be read or written, or the input has ended.
        KeyboardInterrupt: Ctrl-C.
    """
    check_target(file)
    dialogue.show("Settings for training", "bold")
    dialogue.show(WELCOME)
    answers = ConfigAnswers(start_draft(file, dialogue), offers_demo=dialogue.asks)
    if answers.dataset_path.is_file():
        dialogue.show(f"{answers.dataset_path} lists your files; it stays as it is.")
    ask_all(QUESTIONS, answers, dialogue)
    if not review(answers, dialogue):
        dialogue.show("Nothing was written.")
        return False
    save(answers, dialogue)
    show_next_steps(answers, dialogue)
    return True


def start_draft(file: Path, dialogue: Dialogue) -> Draft:
    """The initial settings: those of the existing file, or none."""
    if not file.exists() or not dialogue.confirm(f"{file} exists. Start from it?", default=True):
        return Draft(file)
    problems = Problems()
    draft = Draft(file, load_values(file, problems))
    refused = {problem.where for problem in draft.judgement.problems if problem.fatal}
    for problem in problems:
        # `_usable` shows what is wrong with the settings, but only the file has a key twice.
        if not problem.fatal or main_name(problem.where) not in refused:
            dialogue.warn(str(problem))
    return _usable(draft, dialogue)


def _usable(draft: Draft, dialogue: Dialogue) -> Draft:
    """The draft without the file's invalid keys, unless the user wants to keep them."""
    refused: dict[str, str] = {}
    for problem in draft.judgement.problems:
        if problem.fatal and key_of(problem) in draft.loaded:
            refused.setdefault(key_of(problem), problem.message)
    for key, reason in refused.items():
        dialogue.warn(f"{key}: {reason}")
    if not refused:
        return draft
    if not dialogue.confirm("Training would refuse the above. Leave it out?", default=True):
        return draft
    dialogue.print(f"Left out: {', '.join(refused)}", "yellow")
    usable = {key: value for key, value in draft.values.items() if key not in refused}
    return Draft(draft.file, usable)


def check_target(file: Path) -> None:
    """Check, before the first question, that the file can be written.

    Raises:
        UserError: the file cannot be written.
    """
    if file.suffix in (".toml", ".env"):
        raise UserError(f"{file}: the wizard writes JSON; name a file such as config/config.json.")
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file in it, such as {file / 'config.json'}.")
    # The nearest existing folder; folders below it are created when saving.
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{file} cannot be written: no permission in {folder}.")


def load_values(file: Path, report: Problems) -> dict[str, Any]:
    """The values in a file by main name, with variables as written.

    Keys of earlier versions are left out, and reported.

    Raises:
        ConfigError: the file cannot be read.
    """
    layer = read_json_layer(file, report)
    if layer is None:
        raise ConfigError(report)
    canonical(layer, report)  # reports what is left out below
    values: dict[str, Any] = {}
    for spelling, value in layer.values:
        key = main_name(spelling)
        # An empty value means the default; an empty resume_from_checkpoint starts a new run.
        if value not in (None, "") or key == "resume_from_checkpoint":
            values[key] = value
    return without_removed(values, str(file), Problems())
