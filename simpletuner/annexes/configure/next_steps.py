"""The steps from a written config to training."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simpletuner.annexes.configure.answers import ConfigAnswers
from simpletuner.annexes.questions.dialogue import Dialogue
from simpletuner.atomic import write_json
from simpletuner.budget.device import find_device
from simpletuner.config.sources import EXAMPLES_ALIAS


def show_next_steps(answers: ConfigAnswers, dialogue: Dialogue) -> None:
    """Show the next steps up to training, and offer to write a dataset file if there is none."""
    entries = answers.datasets()
    is_new = not answers.dataset_path.is_file() and _offer_datasets(answers, entries, dialogue)
    dialogue.print()
    dialogue.print("Next steps", "bold")
    steps = [*_data_steps(answers, entries, is_new=is_new), *_run_steps(answers)]
    for number, step in enumerate(steps, start=1):
        dialogue.print(f"  {number}. {step}")
    if answers.run is None and not answers.dataset_path.is_file():
        dialogue.print(f"The dataset file {answers.draft.dataset_file} could be:")
        dialogue.print(textwrap.indent(json.dumps(entries, indent=2), " " * 5), "dim")


def _offer_datasets(
    answers: ConfigAnswers, entries: list[dict[str, Any]], dialogue: Dialogue
) -> bool:
    """Offer a dataset file for a folder that may not exist yet; returns whether it was written."""
    # Scripts have already given all answers.
    if not dialogue.asks or not sys.stdin.isatty():
        return False
    folder = entries[0]["instance_data_dir"]
    question = (
        f"Also write {answers.draft.dataset_file}, for {answers.draft.spec.media_noun} in {folder}?"
    )
    if not dialogue.confirm(question, default=True):
        return False
    write_json(answers.dataset_path, entries)
    return True


def _data_steps(
    answers: ConfigAnswers, entries: list[dict[str, Any]], *, is_new: bool
) -> Iterator[str]:
    """What is left to do about the files.

    Args:
        is_new: the dataset file was written for a folder that may not exist yet.
    """
    path = answers.draft.dataset_file
    noun = answers.draft.spec.media_noun
    if answers.run is not None:
        media = answers.run.media
        if media.uncaptioned and (media.captioned or media.sources):
            command = train_command(answers.file).replace("train", "caption", 1)
            yield f"Write the missing captions:  {command}"
    elif is_new:
        folder = entries[0]["instance_data_dir"]
        yield f"Put your {noun} into {folder}, each with a caption in a .txt file of the same name."
    elif answers.dataset_path.is_file():
        yield f"Check your dataset file {path}; the wizard does not change it."
    else:
        yield (
            f"Write the dataset file {path}, which says where your {noun} are, such as the "
            "one below."
        )


def _run_steps(answers: ConfigAnswers) -> Iterator[str]:
    """Checking the config, and training."""
    command = train_command(answers.file)
    yield f"Check:  {command} --dry-run"
    checkpoint = str(answers.draft.values.get("pretrained_model_name_or_path"))
    is_tiny = checkpoint.startswith(EXAMPLES_ALIAS)
    where = ""
    if not is_tiny and not find_device().is_gpu:
        where = ", on a machine with a GPU"
    yield f"Train{where}:  {command}"


def train_command(file: Path) -> str:
    """The shortest command that uses this config."""
    main_file = Path("config.json")
    if file == main_file:
        return "simpletuner train"
    if file == Path("config/config.json") and not main_file.exists():
        return "simpletuner train"
    folder = file.parent
    if file.name == "config.json" and folder.parent == Path("config"):
        return f"simpletuner train env={shlex.quote(folder.name)}"
    return f"simpletuner train config_path={shlex.quote(str(file))}"
