"""A conversation in a terminal or through a pipe: lines to read, texts to show, yes or no."""

from __future__ import annotations

import importlib.util
import sys
import unicodedata
from collections.abc import Mapping, Sequence

from rich.console import Console

from simpletuner.config.types import parse_flag, plain_key
from simpletuner.errors import UserError, nearest
from simpletuner.reporting.screen import layout_of

# Invalid answers before a question takes its default, so that piped input cannot loop forever.
PATIENCE = 5
# Unicode categories that an answer must not contain: control characters, and surrogates, which
# stand for invalid UTF-8.
REFUSED_CATEGORIES = ("Cc", "Cs")
# Longer lists would hide the question; `?` shows the names.
LONGEST_LIST = 20


class InputEnded(UserError):
    """The input has ended."""


class Dialogue:
    """A conversation with the user.

    Args:
        asks: ask the questions; otherwise each takes its default, and only results and problems
            are printed.
        unasked: the option with which the command asks nothing.
    """

    def __init__(self, *, asks: bool = True, unasked: str = "") -> None:
        self.asks = asks
        self.unasked = unasked
        # rich would colour the numbers and paths in answers.
        self.console = Console(highlight=False)
        # Windows has no readline.
        if sys.stdin.isatty() and importlib.util.find_spec("readline") is not None:
            import readline  # noqa: F401 - arrow keys and history in input()

    def show(self, text: str = "", style: str = "") -> None:
        """Print a line that belongs to the questions: only if they are asked."""
        if self.asks:
            self.print(text, style)

    def print(self, text: str = "", style: str = "") -> None:
        """Print a line; markup is not interpreted."""
        lines = layout_of(sys.stdout).wrap_lines(text)
        self.console.print(lines, style=style, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a problem."""
        self.print(f"    {text}", "yellow")

    def read_line(self, prompt: str) -> str:
        """Read a line, stripped; empty for the default.

        Raises:
            InputEnded: the input has ended.
        """
        if not self.asks:
            return ""
        while True:
            try:
                answer = input(prompt).strip()
            except EOFError:
                self.show()
                advice = f" {self.unasked} takes every default." if self.unasked else ""
                message = f"The input ended before the last question. Nothing was written.{advice}"
                raise InputEnded(message) from None
            except KeyboardInterrupt:
                self.show()  # what follows begins a line of its own
                raise
            if not sys.stdin.isatty():
                self.show(answer)  # piped input is not echoed
            if all(unicodedata.category(char) not in REFUSED_CATEGORIES for char in answer):
                return answer
            self.warn("This contains control characters; type it again.")

    def confirm(self, text: str, *, default: bool) -> bool:
        """Ask yes or no; no after too many other answers."""
        return self.choose(text, (), default=default) is None

    def choose(self, text: str, names: Sequence[str], *, default: bool) -> str | None:
        """Ask for yes (None), no ("") or one of the names; no after too many other answers."""
        for _ in range(PATIENCE):
            answer = self.read_line(f"  {text} {bracketed(default)}: ")
            is_yes = default if not answer else _yes_or_no(answer)
            if is_yes is not None:
                return None if is_yes else ""
            name = plain_key(answer).lower()
            if name in names:
                return name
            kinds = ", no nor a setting of the list" if names else " nor no"
            warning = f"{answer!r} is neither yes{kinds}."
            guess = nearest(name, names)
            if guess:
                warning += f" {guess}?"
            self.warn(warning)
        return ""

    def list_choices(self, choices: Mapping[str, str], marked: str = "") -> None:
        """Print a numbered list of choices with remarks; a star marks the choice of Enter."""
        if not choices or len(choices) > LONGEST_LIST:
            return
        width = max(map(len, choices))
        digits = len(str(len(choices)))
        for number, (name, remark) in enumerate(choices.items(), start=1):
            mark = "*" if name == marked else " "
            self.show(f"  {mark} {number:>{digits}}  {name:<{width}}  {remark}".rstrip())


def _yes_or_no(answer: str) -> bool | None:
    """Whether an answer is yes; None if it is neither yes nor no."""
    try:
        return bool(parse_flag(spelled_out(answer)))
    except ValueError:
        return None


def bracketed(default: bool | str) -> str:
    """The default as a prompt shows it."""
    if isinstance(default, str):
        return f"[{default}]"
    return "[Y/n]" if default else "[y/N]"


def spelled_out(answer: str) -> str:
    """`yes` and `no` for their first letters; other answers are unchanged."""
    return {"y": "yes", "n": "no"}.get(answer.lower(), answer)


def named_choice(answer: str, choices: Mapping[str, str]) -> str:
    """The choice with this number or spelling, or else the answer unchanged."""
    # Longer lists are not shown, so they have no numbers.
    if answer.isdecimal() and 1 < len(choices) <= LONGEST_LIST:
        by_number = dict(enumerate(choices, start=1))
        return by_number.get(int(answer), answer)
    spellings = {name.lower().replace("_", "-"): name for name in choices}
    return spellings.get(answer.lower().replace("_", "-"), answer)
