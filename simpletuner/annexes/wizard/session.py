"""From the first question to the written file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from simpletuner.annexes.wizard.config_file import (
    backup_of,
    check_target,
    load_values,
    render_config,
    save,
    show_next_steps,
    unusable_keys,
)
from simpletuner.annexes.wizard.questions import QUESTIONS, Question, stale_keys
from simpletuner.annexes.wizard.talk import PATIENCE, Back, InputEnded, Talk
from simpletuner.atomic import write_json
from simpletuner.config.json_files import read_json
from simpletuner.errors import Problem, Problems, result_of
from simpletuner.plan.draft import Draft

WELCOME = """\
Answer the questions, or press Enter for the value in [brackets].
? explains a question, - leaves a setting out, back returns to the previous question. Nothing is written until you agree
at the end. Ctrl-C keeps your answers for the next time."""
# A property of the machine, not of the run: used for the estimate and not written.
DEVICE_MEMORY = "plan_device_memory_gb"


def run_session(file: Path, talk: Talk) -> bool:
    """Ask, review and write; returns whether the file was written.

    Raises:
        UserError: the file cannot be read or written, or the input has ended.
        KeyboardInterrupt: the answers so far are kept next to the file.
    """
    check_target(file)
    talk.say("Settings for training", "bold")
    talk.say(WELCOME)
    draft, start = start_draft(file, talk)
    progress = Progress(draft, start)
    try:
        progress.ask(talk)
        agreed = review(draft, talk)
    except (KeyboardInterrupt, InputEnded):
        # A script cannot continue, and would be asked about the draft at its next start.
        if sys.stdin.isatty() and progress.position > 0:
            talk.tell(f"\nYour answers are kept in {progress.keep()}; the same command continues there.", "yellow")
        raise
    if not agreed:
        talk.say("Nothing was written.")
        return False
    existed = file.exists()
    save(file, render_config(_written(draft)))
    # Only now: if the file cannot be written, the answers are still there.
    kept_answers(file).unlink(missing_ok=True)
    talk.say()
    talk.tell(f"Written: {file}" + (f" (before: {backup_of(file)})" if existed else ""), "green")
    show_next_steps(draft, talk)
    return True


class Progress:
    """The answered questions, so that the user can go back, or stop and continue.

    Args:
        position: of the next question.
    """

    def __init__(self, draft: Draft, position: int = 0) -> None:
        self.draft, self.position = draft, position
        self._answered: list[int] = []
        self._stuck = 0

    def ask(self, talk: Talk) -> None:
        """Ask everything that applies, from the position on."""
        title = ""
        while self.position < len(QUESTIONS):
            question = QUESTIONS[self.position]
            if question.applies(self.draft):
                if question.section.label != title:
                    title = question.section.label
                    talk.say()
                    talk.say(title, "bold cyan")
                try:
                    talk.ask(question, self.draft)
                    self._answered.append(self.position)
                except Back:
                    self._go_back(talk)
                    continue
            self.position += 1

    def _go_back(self, talk: Talk) -> None:
        if self._answered:
            self.position = self._answered.pop()
            return
        talk.refuse("This is the first question.")
        # Piped input could go back for ever.
        self._stuck += 1
        if self._stuck == PATIENCE:
            raise InputEnded("There is no question before the first. Nothing was written.")

    def keep(self) -> Path:
        """Save the answers next to the file."""
        path = kept_answers(self.draft.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        # By key, as another version may ask in another order.
        following = QUESTIONS[min(self.position, len(QUESTIONS) - 1)].key
        write_json(path, {"question": following, "loaded": sorted(self.draft.loaded), "values": self.draft.values})
        return path


def kept_answers(file: Path) -> Path:
    """Where the answers of an unfinished session are kept."""
    return file.with_name(f"{file.name}.draft")


def start_draft(file: Path, talk: Talk) -> tuple[Draft, int]:
    """The initial draft and the number of the first question, from kept answers, the existing file, or defaults."""
    kept = _kept(file)
    if kept is not None and talk.confirm(f"Continue with the answers in {kept_answers(file)}?", default=True):
        keys = [question.key for question in QUESTIONS]
        draft = Draft(file, kept["values"])
        draft.loaded = frozenset(kept["loaded"])
        return draft, keys.index(kept["question"]) if kept["question"] in keys else 0
    if not file.exists() or not talk.confirm(f"{file} exists. Start from it?", default=True):
        return Draft(file), 0
    problems = Problems()
    draft = Draft(file, problems.take(load_values(file)))
    for problem in (each for each in problems if not each.fatal):
        talk.refuse(str(problem))
    return _usable(draft, talk), 0


def _usable(draft: Draft, talk: Talk) -> Draft:
    """The draft, without what training would refuse unless the user wants to keep it."""
    unusable = unusable_keys(draft)
    for key, reason in unusable.items():
        talk.refuse(f"{key}: {reason}")
    if not unusable or not talk.confirm("Training would refuse the above. Leave it out?", default=True):
        return draft
    talk.tell(f"Left out: {', '.join(unusable)}", "yellow")
    return Draft(draft.file, {key: value for key, value in draft.values.items() if key not in unusable})


def _kept(file: Path) -> dict[str, Any] | None:
    content = result_of(read_json(kept_answers(file))) if kept_answers(file).is_file() else None
    # A draft of another version is ignored rather than guessed at.
    is_whole = isinstance(content, dict) and content.keys() == {"question", "loaded", "values"}
    return content if is_whole else None


def review(draft: Draft, talk: Talk) -> bool:
    """Show all settings, and ask again for those that the user names, until the answer is yes or no."""
    owners = {question.key: question for question in QUESTIONS}
    while True:
        # None removes a key.
        draft.change(dict.fromkeys(stale_keys(draft, {})))
        _show(draft, talk)
        act = f"Write {draft.file}"
        if draft.file.exists():
            act = f"Replace {draft.file}, and keep what is there as {backup_of(draft.file).name}"
        named = talk.choose(f"{act}? (or name a setting to change)", list(owners))
        if not named:
            return named is None
        _ask_again(owners[named], draft, talk)


def _ask_again(question: Question, draft: Draft, talk: Talk) -> None:
    """Ask one question, then those that apply because of its answer."""
    before, applied = _proposals(draft), _applying(draft)
    try:
        talk.ask(question, draft)
    except Back:
        return
    # Answers that were just the proposal follow it: another model type has another learning rate.
    moved = {key: value for key, value in _proposals(draft).items() if key in before and before[key] != value}
    draft.change({key: value for key, value in moved.items() if draft.values.get(key) == before[key]})
    for further in QUESTIONS:
        if further not in applied and further != question and further.applies(draft):
            talk.ask(further, draft)


def _applying(draft: Draft) -> list[Question]:
    return [question for question in QUESTIONS if question.applies(draft)]


def _proposals(draft: Draft) -> dict[str, Any]:
    """What the wizard would propose now for keys that the file did not have."""
    asked = [question for question in _applying(draft) if question.key not in draft.loaded]
    return {question.key: question.propose(draft) for question in asked if question.propose is not None}


def _written(draft: Draft) -> dict[str, Any]:
    """The values that go into the file."""
    return {key: value for key, value in draft.values.items() if key != DEVICE_MEMORY or key in draft.loaded}


def _show(draft: Draft, talk: Talk) -> None:
    # Late, since importing the plan would delay the first question.
    from simpletuner.annexes.wizard.verdict import judge

    talk.say()
    talk.say("Your settings", "bold")
    values = _written(draft)
    asked = [question.key for question in QUESTIONS if question.key in values]
    width = max(len(key) for key in values)
    for key in asked:
        value = values[key] if isinstance(values[key], str) else json.dumps(values[key], ensure_ascii=False)
        talk.say(f"  {key:<{width}}  {value}")
    if others := [key for key in values if key not in asked]:
        talk.say(f"  As before: {', '.join(others)}")
    talk.say()
    lines, problems = judge(draft, draft.values.get(DEVICE_MEMORY))
    for line in lines:
        talk.tell(f"  {line}", "cyan")
    _warn([*draft.judgement.problems, *problems], talk)
    talk.say()


def _warn(problems: list[Problem], talk: Talk) -> None:
    fatal = {str(problem) for problem in problems if problem.fatal}
    for problem in dict.fromkeys(problems):
        if problem.fatal or str(problem) not in fatal:
            talk.refuse(f"{'Training will refuse this' if problem.fatal else 'Note'}: {problem}")
