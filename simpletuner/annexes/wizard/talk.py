"""Asks questions until the answers are valid, in a terminal or through a pipe, or takes the defaults."""

from __future__ import annotations

import importlib.util
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from simpletuner.annexes.draft import Draft, key_of
from simpletuner.annexes.wizard.questions import Question, stale_keys
from simpletuner.config.option import Option
from simpletuner.config.schema import all_options
from simpletuner.config.techniques import ROUTES
from simpletuner.config.types import parse_flag, plain_key
from simpletuner.errors import ConfigError, Problem, UserError, nearest, not_one_of

HELP, NONE, BACK = "?", "-", "back"
# Other answers that leave out an optional setting.
NOTHING = frozenset({"n", "no", "none"})
# Invalid answers before a question takes its default, so that piped input cannot loop forever.
PATIENCE = 5
# Minimum difflib ratio at which an answer counts as a misspelled choice, which becomes the new default.
MISSPELLED = 0.75
# Unicode categories that no setting may contain: control characters, and surrogates, which stand for invalid UTF-8.
NO_TEXT = ("Cc", "Cs")
# Longer lists would hide the question; `?` shows the names.
LONGEST_LIST = 20


class Back(Exception):
    """The user wants to return to the previous question."""


class InputEnded(UserError):
    """The input has ended."""


class Talk:
    """A conversation with the user.

    Args:
        defaults: ask nothing, and take all defaults.
    """

    def __init__(self, *, defaults: bool = False) -> None:
        self.defaults = defaults
        # rich would colour the numbers and paths in answers.
        self.console = Console(highlight=False)
        # Windows has no readline.
        if sys.stdin.isatty() and importlib.util.find_spec("readline") is not None:
            import readline  # noqa: F401 - arrow keys and history in input()

    def say(self, text: str = "", style: str = "") -> None:
        """Print a line, unless nothing is asked."""
        if not self.defaults:
            self.tell(text, style)

    def tell(self, text: str = "", style: str = "") -> None:
        """Print a line even if nothing is asked; markup is not interpreted."""
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    def ask(self, question: Question, draft: Draft) -> None:
        """Ask for a setting and store the answer in the draft."""
        proposed, choices = question.default(draft), question.choices(draft)
        self.list_choices(choices, _worded(proposed, question))
        for _ in range(PATIENCE):
            answer = self.read_line(f"  {question.text} {_bracketed(proposed, question)}: ")
            if answer == HELP:
                self._explain(question.option, choices)
                continue
            if answer.lower() == BACK:
                raise Back
            value = _interpret(answer, question, proposed, choices)
            problems = _problems_of(question, draft, value)
            changes = question.changes(value, draft)
            if self._accept(question, problems, is_proposed=not answer):
                draft.change(changes)
                return
            if (keys := _only_others(question, draft, problems)) and self.confirm(
                f"  Leave out {', '.join(keys)}?", default=True
            ):
                draft.change({**changes, **dict.fromkeys(keys)})
                return
            # The new default is the remedy of a problem, or else the corrected spelling.
            remedies = [problem.remedy[question.key] for problem in problems if question.key in problem.remedy]
            word = None if answer in choices else nearest(answer, choices, cutoff=MISSPELLED)
            proposed = next(filter(None, [*reversed(remedies), word]), proposed)
        self._give_up(question, draft)

    def _give_up(self, question: Question, draft: Draft) -> None:
        """Take the default after too many invalid answers.

        Raises:
            InputEnded: the default is invalid too.
        """
        value = question.default(draft)
        if not self._accept(question, _problems_of(question, draft, value), is_proposed=True):
            raise InputEnded(f"{question.key}: {PATIENCE} invalid answers. Nothing was written.")
        self.refuse(f"Left at {_worded(value, question)}; name {question.key} at the end to change it.")
        draft.change(question.changes(value, draft))

    def confirm(self, text: str, *, default: bool) -> bool:
        """Ask yes or no; no after too many other answers."""
        return self.choose(text, (), default=default) is None

    def choose(self, text: str, names: Sequence[str], *, default: bool) -> str | None:
        """Ask for yes (None), no ("") or one of the names; no after too many other answers."""
        for _ in range(PATIENCE):
            answer = self.read_line(f"  {text} {_bracketed(default)}: ")
            try:
                return None if (parse_flag(_word(answer)) if answer else default) else ""
            except ValueError:
                name = plain_key(answer).lower()
            if name in names:
                return name
            guess, kinds = nearest(name, names), ", no nor a setting of the list" if names else " nor no"
            self.refuse(f"{answer!r} is neither yes{kinds}." + (f" {guess}?" if guess else ""))
        return ""

    def pick(self, text: str, choices: Mapping[str, str]) -> str:
        """Ask for one of several names, which have notes; the first name is the default."""
        first = next(iter(choices))
        self.say(text)
        self.list_choices(choices, first)
        for _ in range(PATIENCE):
            answer = self.read_line(f"  [{first}]: ")
            if (chosen := _named(answer or first, choices)) in choices:
                return chosen
            if answer == HELP:
                self.say("    Type a number or a name from the list; Enter takes the one in brackets.", "cyan")
            else:
                self.refuse(not_one_of(answer, choices))
        return first

    def refuse(self, reason: str) -> None:
        """Print a problem, even if nothing is asked."""
        self.tell(f"    {reason}", "yellow")

    def read_line(self, prompt: str) -> str:
        """Read a line, stripped; empty for the default.

        Raises:
            InputEnded: the input has ended.
        """
        if self.defaults:
            return ""
        while True:
            try:
                answer = input(prompt).strip()
            except EOFError:
                self.say()
                raise InputEnded("The input ended before the last question. Nothing was written.") from None
            if not sys.stdin.isatty():
                self.say(answer)  # piped input is not echoed
            if all(unicodedata.category(char) not in NO_TEXT for char in answer):
                return answer
            self.refuse("This contains control characters; type it again.")

    def list_choices(self, choices: Mapping[str, str], proposed: str = "") -> None:
        """Print a numbered list of choices with remarks; a star marks the one that Enter takes."""
        if len(choices) > LONGEST_LIST:
            return
        width, digits = max(map(len, choices), default=0), len(str(len(choices)))
        for number, (name, note) in enumerate(choices.items(), start=1):
            mark = "*" if name == proposed else " "
            self.say(f"  {mark} {number:>{digits}}  {name:<{width}}  {note}".rstrip())

    def _accept(self, question: Question, problems: Sequence[Problem], *, is_proposed: bool) -> bool:
        """Whether to take an answer: it has no problems, or only warnings that the user dismisses.

        Warnings about the wizard's proposal need no confirmation.

        Raises:
            ConfigError: the answer is invalid, and nothing is asked.
        """
        fatal = [problem for problem in problems if problem.fatal]
        if self.defaults and fatal:
            raise ConfigError(fatal)
        for problem in fatal or problems:
            self.refuse(problem.message if problem.where == question.key else str(problem))
        return not problems or (not fatal and (is_proposed or self.confirm("  Keep it?", default=False)))

    def _explain(self, option: Option, choices: Mapping[str, str]) -> None:
        """Show the help of an option."""
        self.say(f"    {option.help}", "cyan")
        allowed = ", ".join(choices) if choices else " ".join(filter(None, (option.type_name, option.limit_text)))
        self.say(f"    Allowed: {allowed}. Setting: {option.name}.", "cyan")
        self.list_choices(choices)
        if option.default_note:
            self.say(f"    Default: {option.default_note.replace('`', '')}.", "cyan")
        if not option.required:
            self.say(f"    {NONE} leaves it out.", "cyan")


def _problems_of(question: Question, draft: Draft, value: Any) -> list[Problem]:
    """The problems of an answer; none for an unchanged value of the file, whose problems were shown at loading."""
    if question.key in draft.loaded and value == draft.values.get(question.key):
        return []
    changes = question.changes(value, draft)
    return draft.weigh(question.key, {**dict.fromkeys(stale_keys(draft, changes)), **changes})


def _only_others(question: Question, draft: Draft, problems: Sequence[Problem]) -> list[str]:
    """Other settings that an answer makes invalid, if it has no other problem and they can be left out."""
    keys = sorted({key_of(problem) for problem in problems if problem.fatal})
    optional = {key for key in draft.values if key != question.key and not all_options()[key].required}
    return keys if optional.issuperset(keys) else []


def _interpret(answer: str, question: Question, proposed: Any, choices: Mapping[str, str]) -> Any:
    """The value of an answer: the proposal, None, a choice by its number, or the text itself."""
    if not answer:
        return proposed
    if answer == NONE:
        return None
    if answer.lower() in NOTHING and not question.option.required and not question.option.is_flag:
        # If there is a choice named none, "no" means it.
        if "none" not in choices:
            return None
        answer = "none"
    answer = _named(answer, choices)
    if question.key == "tread_config" and answer in ROUTES:
        return ROUTES[answer]
    return _word(answer) if question.option.is_flag else answer


def _named(answer: str, choices: Mapping[str, str]) -> str:
    """The choice with this number or spelling, or else the answer unchanged."""
    # Longer lists are not shown, so they have no numbers.
    if answer.isdecimal() and 1 < len(choices) <= LONGEST_LIST:
        return dict(enumerate(choices, start=1)).get(int(answer), answer)
    spelled = {name.lower().replace("_", "-"): name for name in choices}
    return spelled.get(answer.lower().replace("_", "-"), answer)


def _word(answer: str) -> str:
    return {"y": "yes", "n": "no"}.get(answer.lower(), answer)


def _bracketed(value: Any, question: Question | None = None) -> str:
    """The default, as shown in a prompt."""
    if isinstance(value, bool):
        return "[Y/n]" if value else "[y/N]"
    return f"[{_worded(value, question)}]"


def _worded(value: Any, question: Question | None) -> str:
    if value is None:
        # `?` shows the rest: a long line cannot be edited in some terminals.
        note = re.split("[;,]", question.option.default_note)[0].replace("`", "") if question else ""
        return note or "none"
    known = (word for word, route in ROUTES.items() if route == value)
    return next(known, f"{value:g}" if isinstance(value, float) else str(value))
