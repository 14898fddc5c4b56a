"""The questions about a new run: about what is still open, and about files that are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simpletuner.annexes.questions.question import Question
from simpletuner.annexes.start.answers import CAPTION, START, STOP, RunAnswers
from simpletuner.annexes.start.recipe import PURPOSES, RECIPES, TRIGGER
from simpletuner.annexes.start.trigger import EXAMPLE, SUBJECT, why_incomplete
from simpletuner.errors import Problem


class RunQuestion(Question[RunAnswers]):
    """A question whose answer is kept by its key.

    Attributes:
        about: what `?` explains first.
    """

    about: str

    def help(self, choices: Mapping[str, str]) -> list[str]:
        return [self.about, *super().help(choices)]

    def store(self, value: Any, answers: RunAnswers, without: Sequence[str] = ()) -> None:
        answers.answer(self.key, value)


class Purpose(RunQuestion):
    """What the files show."""

    key = "purpose"
    text = "What should be learned?"
    about = (
        "It decides the words in captions and prompts, the length of the run and the rank of "
        "the LoRA."
    )

    def applies(self, answers: RunAnswers) -> bool:
        return answers.given.get("purpose") is None and len(PURPOSES[answers.media.kind]) > 1

    def default(self, answers: RunAnswers) -> str:
        return answers.purpose

    def choices(self, answers: RunAnswers) -> Mapping[str, str]:
        return {purpose: RECIPES[purpose].title for purpose in PURPOSES[answers.media.kind]}


class Trigger(RunQuestion):
    """The words for what is learned."""

    key = "trigger"
    text = "Name it: a made-up word"
    about = "It names what is learned, in captions now and later in your prompts."

    def prompt(self, answers: RunAnswers) -> str:
        if answers.purpose != SUBJECT:
            return f"{self.text} ({TRIGGER})"
        return f"{self.text}, then what it is ({EXAMPLE})"

    def applies(self, answers: RunAnswers) -> bool:
        return not answers.known_trigger and answers.purpose != "edit"

    def default(self, answers: RunAnswers) -> str:
        # Enter is not an answer for a subject: the default would not say what it is.
        return "" if self._insists(answers) else answers.trigger

    def problems(self, value: str, answers: RunAnswers) -> list[Problem]:
        reason = why_incomplete(answers.purpose, value) if self._insists(answers) else ""
        return [Problem(self.key, reason)] if reason else []

    def _insists(self, answers: RunAnswers) -> bool:
        return answers.asks and answers.purpose == SUBJECT

    def read(self, answer: str, choices: Mapping[str, str]) -> str:
        return answer


class Model(RunQuestion):
    """The model; those that fit the machine come first."""

    key = "model"
    text = "Which model?"
    about = "The remarks are estimates for the GPU that is planned for, or for this machine."

    def applies(self, answers: RunAnswers) -> bool:
        return answers.given.get("model") is None and len(answers.models) > 1

    def default(self, answers: RunAnswers) -> str:
        return answers.model

    def choices(self, answers: RunAnswers) -> Mapping[str, str]:
        return {model: verdict.words for model, verdict in answers.judged_models().items()}


class Rest(RunQuestion):
    """What to do with many files that would be left out."""

    key = "rest"
    text = "What shall be done?"
    about = "Files that are left out stay where they are."

    def prompt(self, answers: RunAnswers) -> str:
        return f"{answers.left_out.describe()} {self.text}"

    def applies(self, answers: RunAnswers) -> bool:
        return answers.asks and answers.left_out.is_much

    def default(self, answers: RunAnswers) -> str:
        return next(iter(self.choices(answers)))

    def choices(self, answers: RunAnswers) -> Mapping[str, str]:
        choices = {}
        if answers.may_caption:
            choices[CAPTION] = "write the missing captions with the model, then train all"
        if answers.left_out.trained:
            choices[START] = f"train only the other {answers.left_out.trained}"
        choices[STOP] = "write nothing"
        return choices


QUESTIONS: Sequence[Question[RunAnswers]] = (Purpose(), Trigger(), Model(), Rest())
