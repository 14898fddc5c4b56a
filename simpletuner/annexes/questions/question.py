"""A question as data: when it is asked, its default and choices, and what an answer changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from simpletuner.annexes.questions.dialogue import named_choice, spelled_out
from simpletuner.errors import Problem, not_one_of

# The class that keeps the answers so far.
Answers = TypeVar("Answers", contravariant=True)

# The answer that leaves out an optional value.
NONE = "-"
# Words that leave it out, too.
NOTHING = frozenset({"n", "no", "none"})


class Question(Generic[Answers]):
    """A question about one value.

    Attributes:
        key: names the question.
        text: the question in a few words.
    """

    key: str
    text: str

    @property
    def title(self) -> str:
        """The part of the conversation, shown above its first question; empty for none."""
        return ""

    @property
    def is_flag(self) -> bool:
        """Whether the answer is yes or no."""
        return False

    @property
    def is_optional(self) -> bool:
        """Whether the value may be left out."""
        return False

    @property
    def later(self) -> str:
        """How an answer can be changed later, shown after too many invalid ones."""
        return ""

    def prompt(self, answers: Answers) -> str:
        """The question as it is asked."""
        return self.text

    def applies(self, answers: Answers) -> bool:
        """Whether to ask the question, with the answers so far."""
        return True

    def default(self, answers: Answers) -> Any:
        """The value for an empty answer; None for no value."""
        return None

    def choices(self, answers: Answers) -> Mapping[str, str]:
        """Allowed words with remarks; empty if any answer is allowed."""
        return {}

    def help(self, choices: Mapping[str, str]) -> list[str]:
        """The lines that `?` shows above the list of choices."""
        if choices:
            return ["Type a number or a name from the list; Enter takes the one in brackets."]
        return []

    def read(self, answer: str, choices: Mapping[str, str]) -> Any:
        """The value that a line means: None, a choice by its number, or the text itself."""
        if answer == NONE:
            return None
        if answer.lower() in NOTHING and self.is_optional and not self.is_flag:
            if "none" not in choices:
                return None
            answer = "none"  # the choice of this name
        answer = named_choice(answer, choices)
        return spelled_out(answer) if self.is_flag else answer

    def word(self, value: Any) -> str:
        """A value as prompts show it."""
        return "none" if value is None else str(value)

    def problems(self, value: Any, answers: Answers) -> list[Problem]:
        """What is wrong or doubtful about an answer."""
        choices = self.choices(answers)
        if choices and value not in choices:
            return [Problem(self.key, not_one_of(self.word(value), choices))]
        return []

    def conflicts(self, problems: Sequence[Problem], answers: Answers) -> list[str]:
        """Values that could be left out to make an answer valid; empty if it is invalid anyway."""
        return []

    def store(self, value: Any, answers: Answers, without: Sequence[str] = ()) -> None:
        """Keep an answer.

        Args:
            without: conflicting values that are left out.
        """
        raise NotImplementedError

    def remarks(self, answers: Answers) -> list[str]:
        """Lines to print about an answer once it is stored."""
        return []
