"""From the first question to the written file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.cli.wizard.config_file import (
    backup_of,
    check_target,
    load_values,
    render_config,
    save,
    show_next_steps,
    unusable_keys,
)
from simpletuner.cli.wizard.questions import STEPS, Question, Step
from simpletuner.cli.wizard.talk import Talk
from simpletuner.errors import Problem
from simpletuner.plan.draft import Draft

WELCOME = """\
Answer the questions, or press Enter for what stands in [brackets].
? explains a question, - leaves a setting out. Nothing is written before you say so at the end."""


def run_session(file: Path, talk: Talk) -> bool:
    """Ask, show, write; whether the file was written.

    Raises:
        UserError: the file cannot be read or written, or the input has ended.
    """
    check_target(file)
    talk.say("Settings for training", "bold")
    talk.say(WELCOME)
    draft = start_draft(file, talk)
    steps = [step for step in STEPS if any(question.applies(draft) for question in step.questions)]
    for number, step in enumerate(steps, start=1):
        talk.say()
        talk.say(f"{number}/{len(steps)}  {step.title}", "bold cyan")
        ask_step(step, draft, talk)
    if not review(draft, steps, talk):
        talk.say("Nothing was written.")
        return False
    existed = file.exists()
    save(file, render_config(draft.values))
    talk.say()
    talk.tell(f"Written: {file}" + (f" (before: {backup_of(file)})" if existed else ""), "green")
    show_next_steps(draft, talk)
    return True


def start_draft(file: Path, talk: Talk) -> Draft:
    """The draft to begin with: the file that is there, when that is wanted, or the defaults."""
    if not file.exists() or not talk.confirm(f"{file} exists. Start from it?", default=True):
        return Draft(file)
    problems: list[Problem] = []
    draft = Draft(file, load_values(file, problems))
    for problem in problems:
        if not problem.fatal:
            talk.refuse(str(problem))
    unusable = unusable_keys(draft)
    for key, reason in unusable.items():
        talk.refuse(f"{key}: {reason}")
    if unusable and talk.confirm("Training would refuse the above. Leave it out?", default=True):
        talk.tell(f"Left out: {', '.join(unusable)}", "yellow")
        kept = {key: value for key, value in draft.values.items() if key not in unusable}
        return Draft(file, kept)
    return draft


def ask_step(step: Step, draft: Draft, talk: Talk) -> None:
    """Ask what applies to the draft as it is by then."""
    for question in step.questions:
        if question.applies(draft):
            talk.ask(question, draft)


def review(draft: Draft, steps: list[Step], talk: Talk) -> bool:
    """Show everything and change what is named, until the answer is yes or no."""
    owners = {question.key: step for step in steps for question in step.questions}
    while True:
        _drop_stale(draft, steps)
        _show(draft, steps, talk)
        verb = "Replace" if draft.file.exists() else "Write"
        note = f", and keep what is there as {backup_of(draft.file).name}" if draft.file.exists() else ""
        named = talk.choose(f"{verb} {draft.file}{note}? (or name a setting to change)", list(owners))
        if not named:
            return named is None
        before = _proposals(draft, steps)
        ask_step(owners[named], draft, talk)
        _follow_proposals(draft, before, _proposals(draft, steps))


def _proposals(draft: Draft, steps: list[Step]) -> dict[str, Any]:
    """What the wizard would propose now, where the file said nothing."""
    asked = [question for step in steps for question in step.questions if question.key not in draft.loaded]
    return {each.key: each.propose(draft) for each in asked if each.propose is not None and each.applies(draft)}


def _follow_proposals(draft: Draft, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Answers that were only the proposal follow it: another model type has another learning rate."""
    moved = {key: value for key, value in now.items() if key in before and before[key] != value}
    draft.change({key: value for key, value in moved.items() if draft.values.get(key) == before[key]})


def _drop_stale(draft: Draft, steps: list[Step]) -> None:
    """Take out answers to questions that later answers made pointless, with what a yes had implied."""
    asked = [question for step in steps for question in step.questions]
    stale = [each for each in asked if each.key in draft.values and _is_stale(each, draft)]
    implied = [key for each in stale if draft.values[each.key] is True for key in each.implied(True)]
    draft.change(dict.fromkeys([*(each.key for each in stale), *implied]))


def _is_stale(question: Question, draft: Draft) -> bool:
    # Epochs of 0 beside a number of steps are what the steps imply.
    value = draft.values[question.key]
    return not question.applies(draft) and question.key not in draft.loaded and (value is False or value != 0)


def _show(draft: Draft, steps: list[Step], talk: Talk) -> None:
    talk.say()
    talk.say("Your settings", "bold")
    asked = [question.key for step in steps for question in step.questions]
    width = max(len(key) for key in draft.values)
    for key in (key for key in asked if key in draft.values):
        talk.say(f"  {key:<{width}}  {_shown(draft.values[key])}")
    others = [key for key in draft.values if key not in asked]
    if others:
        talk.say(f"  As before: {', '.join(others)}")
    for problem in dict.fromkeys(draft.judgement.problems):
        talk.refuse(f"{'Training will refuse this' if problem.fatal else 'Note'}: {problem}")
    talk.say()


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
