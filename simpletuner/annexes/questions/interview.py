"""Asks a list of questions; explains and repeats those with invalid answers, and goes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from simpletuner.annexes.questions.dialogue import PATIENCE, Dialogue, InputEnded, bracketed
from simpletuner.annexes.questions.question import NONE, Question
from simpletuner.errors import ConfigError, Problem, nearest

Answers = TypeVar("Answers")

HELP = "?"
BACK = "back"
# Least similarity (of difflib) of an answer to the choice that it misspells.
MISSPELLED = 0.75


class Back(Exception):
    """The user wants to return to the previous question."""


def ask_all(questions: Sequence[Question[Answers]], answers: Answers, dialogue: Dialogue) -> None:
    """Ask the questions that apply; `back` returns to the one before.

    Raises:
        InputEnded: the input has ended, or goes back from the first question again and again.
    """
    position = 0
    asked: list[int] = []  # positions
    title = ""
    refused = 0
    while position < len(questions):
        question = questions[position]
        if not question.applies(answers):
            position += 1
            continue
        if question.title != title:
            title = question.title
            dialogue.show()
            dialogue.show(title, "bold cyan")
        try:
            ask(question, answers, dialogue)
        except Back:
            if asked:
                position = asked.pop()
                continue
            dialogue.warn("This is the first question.")
            refused += 1
            if refused == PATIENCE:  # piped input could go back forever
                message = "There is no question before the first. Nothing was written."
                raise InputEnded(message) from None
            continue
        asked.append(position)
        position += 1


def ask(question: Question[Answers], answers: Answers, dialogue: Dialogue) -> None:
    """Ask a question until its answer is valid, and store it.

    After too many invalid answers, the default is stored.

    Raises:
        Back: the user wants to return to the previous question.
        InputEnded: the input has ended, or the default is invalid too.
        ConfigError: the default is invalid, and nothing is asked.
    """
    proposed = question.default(answers)
    choices = question.choices(answers)
    dialogue.list_choices(choices, question.word(proposed))
    for _ in range(PATIENCE):
        answer = dialogue.read_line(f"  {question.prompt(answers)}{_shown(proposed, question)}: ")
        if answer == HELP:
            _explain(question, choices, dialogue)
            continue
        if answer.lower() == BACK:
            raise Back
        value = question.read(answer, choices) if answer else proposed
        problems = question.problems(value, answers)
        if _accepts(question, problems, dialogue, is_proposed=not answer):
            _store(question, value, answers, dialogue)
            return
        conflicts = question.conflicts(problems, answers)
        if conflicts and dialogue.confirm(f"  Leave out {', '.join(conflicts)}?", default=True):
            _store(question, value, answers, dialogue, without=conflicts)
            return
        proposed = _correction(answer, choices, question, problems) or proposed
    _give_up(question, answers, dialogue)


def _correction(
    answer: str, choices: Mapping[str, str], question: Question[Any], problems: Sequence[Problem]
) -> Any:
    """The remedy of a problem, or else the choice that the answer misspells; else None."""
    for problem in reversed(problems):
        remedy = problem.remedy.get(question.key)
        if remedy:
            return remedy
    if answer in choices:
        return None
    return nearest(answer, choices, cutoff=MISSPELLED)


def _accepts(
    question: Question[Any], problems: Sequence[Problem], dialogue: Dialogue, *, is_proposed: bool
) -> bool:
    """Whether to take an answer: it has no problems, or only warnings that the user dismisses.

    Args:
        is_proposed: the answer is the default, of which warnings need no confirmation.

    Raises:
        ConfigError: the answer is invalid, and nothing is asked.
    """
    fatal = [problem for problem in problems if problem.fatal]
    if fatal and not dialogue.asks:
        raise ConfigError(fatal)
    for problem in fatal or problems:
        # Without the key if it is the one that was asked.
        dialogue.warn(problem.message if problem.where == question.key else str(problem))
    if fatal:
        return False
    if not problems or is_proposed:
        return True
    return dialogue.confirm("  Keep it?", default=False)


def _give_up(question: Question[Answers], answers: Answers, dialogue: Dialogue) -> None:
    """Store the default after too many invalid answers.

    Raises:
        InputEnded: the default is invalid too.
    """
    value = question.default(answers)
    if not _accepts(question, question.problems(value, answers), dialogue, is_proposed=True):
        raise InputEnded(f"{question.key}: {PATIENCE} invalid answers. Nothing was written.")
    dialogue.warn(f"Left at {question.word(value)}{question.later}.")
    _store(question, value, answers, dialogue)


def _store(
    question: Question[Answers],
    value: Any,
    answers: Answers,
    dialogue: Dialogue,
    without: Sequence[str] = (),
) -> None:
    """Store an answer, and print the question's remarks about it."""
    question.store(value, answers, without)
    for remark in question.remarks(answers):
        dialogue.print(f"    {remark}")


def _explain(question: Question[Any], choices: Mapping[str, str], dialogue: Dialogue) -> None:
    """Show the help of a question, and its choices."""
    for line in question.help(choices):
        dialogue.show(f"    {line}", "cyan")
    dialogue.list_choices(choices)
    if question.is_optional:
        dialogue.show(f"    {NONE} leaves it out.", "cyan")


def _shown(value: Any, question: Question[Any]) -> str:
    """A proposed value as the prompt shows it; empty for no proposal."""
    if value == "":
        return ""
    return " " + bracketed(value if isinstance(value, bool) else question.word(value))
