"""The questions about a new run: at most three, about what is still open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simpletuner.annexes.questions.question import Question
from simpletuner.annexes.start.answers import RunAnswers
from simpletuner.annexes.start.recipe import PURPOSES, RECIPES, TRIGGER


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
    text = "A word for it that the model does not know"
    about = "It names what is learned, in captions now and later in your prompts."

    def prompt(self, answers: RunAnswers) -> str:
        if answers.purpose != "subject":
            return self.text
        return f"{self.text}, and what it is, as in: {TRIGGER}, a grey cat"

    def applies(self, answers: RunAnswers) -> bool:
        return not answers.known_trigger and answers.purpose != "edit"

    def default(self, answers: RunAnswers) -> str:
        return answers.trigger

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


QUESTIONS: Sequence[Question[RunAnswers]] = (Purpose(), Trigger(), Model())
