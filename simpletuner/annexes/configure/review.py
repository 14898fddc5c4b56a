"""The review of all settings, with the plan's verdict, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from simpletuner.annexes.configure.answers import ConfigAnswers
from simpletuner.annexes.configure.questions import GPU
from simpletuner.annexes.configure.settings import SETTINGS, Setting, stale_keys
from simpletuner.annexes.configure.verdict import judge
from simpletuner.annexes.configure.written import backup_of, writes_datasets
from simpletuner.annexes.draft import Draft
from simpletuner.annexes.questions.dialogue import Dialogue
from simpletuner.annexes.questions.interview import Back, ask
from simpletuner.config.types import as_user_text
from simpletuner.errors import Problem
from simpletuner.redaction import redact


def review(answers: ConfigAnswers, dialogue: Dialogue) -> bool:
    """Show all settings, and ask again for those that the user names; returns whether to write."""
    settings = {setting.key: setting for setting in SETTINGS}
    offered: Mapping[str, Any] = {}  # the last remedy
    while True:
        stale = stale_keys(answers.draft, {})
        answers.draft.change(dict.fromkeys(stale))  # None removes a key
        is_refused, remedy = _show(answers, dialogue)
        # The user confirms a remedy before it is applied; the same one is not offered again.
        if remedy and remedy != offered and dialogue.asks:
            words = ", ".join(f"{key} {json.dumps(value)}" for key, value in remedy.items())
            if dialogue.confirm(f"Apply {words}?", default=True):
                answers.draft.change(remedy)
            offered = remedy
            continue
        key = dialogue.choose(
            f"{_action(answers)}? (or name a setting to change)",
            [*settings, GPU.key],
            default=not dialogue.asks or not is_refused,
        )
        if not key:
            return key is None
        if key == GPU.key:
            _ask_gpu(answers, dialogue)
        else:
            _ask_again(settings[key], answers, dialogue)


def _action(answers: ConfigAnswers) -> str:
    """What is written next, as the beginning of a question."""
    datasets = answers.draft.dataset_file if writes_datasets(answers) else ""
    if not answers.file.exists():
        return f"Write {answers.file} and {datasets}" if datasets else f"Write {answers.file}"
    backup = backup_of(answers.file.resolve()).name
    if datasets:
        return f"Write {datasets}, replace {answers.file}, and keep the old file as {backup}"
    return f"Replace {answers.file}, and keep the old file as {backup}"


def _ask_gpu(answers: ConfigAnswers, dialogue: Dialogue) -> None:
    """Ask for the GPU to estimate for; `back` keeps it."""
    try:
        ask(GPU, answers, dialogue)
    except Back:
        return


def _ask_again(setting: Setting, answers: ConfigAnswers, dialogue: Dialogue) -> None:
    """Ask for a setting, then for further settings that apply because of its answer."""
    applying = _applying(answers.draft)
    before = _proposals(answers.draft)
    try:
        ask(setting, answers, dialogue)
    except Back:
        return
    # Answers equal to an old proposal change with it: another model type has another learning rate.
    changes = {}
    for key, value in _proposals(answers.draft).items():
        was_proposed = key in before and answers.draft.values.get(key) == before[key]
        if was_proposed and before[key] != value:
            changes[key] = value
    answers.draft.change(changes)
    for further in SETTINGS:
        if further not in applying and further != setting and further.applies(answers):
            ask(further, answers, dialogue)


def _applying(draft: Draft) -> list[Setting]:
    """The settings that apply with the settings so far."""
    return [setting for setting in SETTINGS if setting.fits(draft)]


def _proposals(draft: Draft) -> dict[str, Any]:
    """The current proposals for keys that the file did not have."""
    proposals = {}
    for setting in _applying(draft):
        if setting.propose is not None and setting.key not in draft.loaded:
            proposals[setting.key] = setting.propose(draft)
    return proposals


def _show(answers: ConfigAnswers, dialogue: Dialogue) -> tuple[bool, Mapping[str, Any]]:
    """Show all settings and the plan's verdict.

    Returns:
        Whether training will refuse the settings, and a remedy.
    """
    _show_settings(answers.draft, dialogue)
    run = answers.new_run()
    if run is not None:
        for note in run.fit.notes(with_remedies=False):
            dialogue.warn(note)
    lines, problems = judge(answers)
    for line in lines:
        dialogue.print(f"  {line}", "cyan")
    shown = dict.fromkeys([*answers.draft.judgement.problems, *problems])
    fatal = {str(problem) for problem in shown if problem.fatal}
    for problem in shown:
        if problem.fatal:
            dialogue.warn(f"Training will refuse this: {problem}")
        elif str(problem) not in fatal:
            dialogue.warn(f"Note: {problem}")
    dialogue.show()
    is_refused = any(problem.fatal and problem.where != "device" for problem in shown)
    return is_refused, _remedy(problems)


def _remedy(problems: list[Problem]) -> Mapping[str, Any]:
    """Settings that make the run fit; empty if it fits, or if none do."""
    for problem in problems:
        if problem.where == "memory":
            return problem.remedy
    return {}


def _show_settings(draft: Draft, dialogue: Dialogue) -> None:
    """Show the settings that questions are about, line by line, and all other ones as a list."""
    values = draft.values
    dialogue.show()
    dialogue.show("Your settings", "bold")
    asked = [setting.key for setting in SETTINGS if setting.key in values]
    width = max(len(key) for key in values)
    for key in asked:
        dialogue.show(f"  {key:<{width}}  {redact(as_user_text(values[key]))}")
    not_asked = [key for key in values if key not in asked]
    implied = [key for key in not_asked if key not in draft.loaded]
    kept = [key for key in not_asked if key in draft.loaded]
    _show_keys("Follows from your answers", implied, draft, dialogue)
    _show_keys("As before", kept, draft, dialogue)
    dialogue.show()


def _show_keys(title: str, keys: list[str], draft: Draft, dialogue: Dialogue) -> None:
    """Show keys with their values in a line; nothing if there are none."""
    if not keys:
        return
    settings = []
    for key in keys:
        value = json.dumps(draft.values[key], ensure_ascii=False)
        settings.append(f"{key} {redact(value)}")
    dialogue.show(f"  {title}: {', '.join(settings)}")
