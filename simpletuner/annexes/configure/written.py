"""What `simpletuner configure` writes: the config, and a dataset file where none exists."""

from __future__ import annotations

from pathlib import Path

from simpletuner.annexes.configure.answers import ConfigAnswers
from simpletuner.annexes.questions.dialogue import Dialogue
from simpletuner.atomic import unused_path, write_atomically, write_json
from simpletuner.config.schema import render_config


def save(answers: ConfigAnswers, dialogue: Dialogue) -> None:
    """Write the dataset file for the folder, if none exists, then the config.

    A previous config is kept as `.bak`.

    Raises:
        WriteError: a file cannot be written.
    """
    dialogue.show()
    if writes_datasets(answers):
        write_json(answers.dataset_path, answers.datasets())
        dialogue.print(f"Written: {answers.draft.dataset_file}", "green")
    target = answers.file.resolve()  # replaces the target of a link, not the link
    before = ""
    if target.is_file():
        backup = backup_of(target)
        # A copy, so that the file stays in place until the new one replaces it.
        write_atomically(backup, target.read_bytes())
        before = f" (before: {answers.file.with_name(backup.name)})"
    write_atomically(target, render_config(answers.draft.values))
    dialogue.print(f"Written: {answers.file}{before}", "green")


def writes_datasets(answers: ConfigAnswers) -> bool:
    """Whether a dataset file will be written: the user has named a folder, and there is none."""
    return answers.new_run() is not None and not answers.dataset_path.exists()


def backup_of(file: Path) -> Path:
    """Where the file is copied before it is replaced; an earlier copy of other content is kept."""
    backup = file.with_name(f"{file.name}.bak")
    if backup.is_file() and backup.read_bytes() == file.read_bytes():
        return backup
    return unused_path(backup)
