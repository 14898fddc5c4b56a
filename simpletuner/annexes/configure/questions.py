"""The questions of `simpletuner configure`: files and machine first, then the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simpletuner.annexes.configure.answers import NO_RECIPE, ConfigAnswers
from simpletuner.annexes.configure.settings import SETTINGS
from simpletuner.annexes.questions.question import NONE, NOTHING, Question
from simpletuner.annexes.start import questions as start
from simpletuner.annexes.start.answers import RunAnswers
from simpletuner.annexes.start.media_folder import read_media_folder
from simpletuner.annexes.start.recipe import RECIPES
from simpletuner.budget.device import find_device
from simpletuner.config.device import HERE, read_card_or_memory
from simpletuner.errors import Problem, Problems, UserError, counted

# Where folders of files usually are, and those that the guides name.
USUAL_PARENT = Path("datasets")
USUAL_FOLDERS = (Path("datasets/my_images"), Path("datasets/videos"))


class AboutFiles(Question[ConfigAnswers]):
    """A question that comes before the settings."""

    @property
    def title(self) -> str:
        return "Files and machine"


class Folder(AboutFiles):
    """The folder of the files, for a new dataset file; not asked if the file exists."""

    key = "folder"
    text = "Folder of your pictures or clips"

    @property
    def is_optional(self) -> bool:
        return True

    def applies(self, answers: ConfigAnswers) -> bool:
        return not answers.dataset_path.is_file()

    def default(self, answers: ConfigAnswers) -> str | None:
        if answers.folder is not None:
            return answers.folder.as_posix()
        for folder in _usual_folders():
            try:
                read_media_folder(folder)
            except UserError:
                continue
            return folder.as_posix()
        return None

    def help(self, choices: Mapping[str, str]) -> list[str]:
        return [
            "The dataset file is written for it, and what suits its files is proposed. The "
            "files stay as they are.",
            "Two folders named before and after in it are pictures before and after an edit.",
        ]

    def problems(self, value: Any, answers: ConfigAnswers) -> list[Problem]:
        if value is None:
            return []
        folder = _path(value)
        if folder.is_file():
            return [Problem(self.key, f"{folder} is a file; name the folder that it is in.")]
        try:
            read_media_folder(folder)
        except UserError as error:
            return [Problem(self.key, str(error))]
        return []

    def store(self, value: Any, answers: ConfigAnswers, without: Sequence[str] = ()) -> None:
        answers.name_folder(None if value is None else _path(value))

    def remarks(self, answers: ConfigAnswers) -> list[str]:
        if answers.run is None:
            return []
        media = answers.run.media
        remarks = [f"{answers.folder}: {media.describe()}", *media.notes()]
        missing = len(media.uncaptioned)
        if missing and (media.captioned or media.sources):
            total = missing + len(media.captioned)
            remarks.append(
                f"No caption for {missing} of {counted(total, 'file')}: write them before training."
            )
        return remarks


class Gpu(AboutFiles):
    """The GPU to estimate for; it is not a setting of the run, so it is not written."""

    key = "device"
    text = "GPU to estimate for, a card or its memory in GB (4090, 24)"

    @property
    def is_optional(self) -> bool:
        return True

    def help(self, choices: Mapping[str, str]) -> list[str]:
        return ["Only estimates are for it: training uses the GPU of its machine."]

    def word(self, value: Any) -> str:
        if value is None:
            return "that of this machine" if find_device().is_gpu else "none"
        return str(value)

    def problems(self, value: Any, answers: ConfigAnswers) -> list[Problem]:
        problems = Problems()
        if value is not None:
            read_card_or_memory(value, problems)
        return [Problem(self.key, problem.message) for problem in problems]

    def store(self, value: Any, answers: ConfigAnswers, without: Sequence[str] = ()) -> None:
        device = HERE if value is None else read_card_or_memory(value, Problems())
        answers.set_asked_device(device)


class RecipeChoice(AboutFiles):
    """A recipe of `start`, whose values the settings propose; asked if no folder is named."""

    key = "recipe"
    text = "Start from a recipe?"

    def applies(self, answers: ConfigAnswers) -> bool:
        return answers.run is None and not answers.is_loaded

    def default(self, answers: ConfigAnswers) -> str:
        return answers.recipe

    def choices(self, answers: ConfigAnswers) -> Mapping[str, str]:
        titles = {purpose: recipe.title for purpose, recipe in RECIPES.items()}
        return {NO_RECIPE: "the usual defaults", **titles}

    def read(self, answer: str, choices: Mapping[str, str]) -> Any:
        if answer.lower() in (NONE, *NOTHING):
            return NO_RECIPE
        return super().read(answer, choices)

    def store(self, value: Any, answers: ConfigAnswers, without: Sequence[str] = ()) -> None:
        answers.choose_recipe(value)


class AboutRun(AboutFiles):
    """A question of `start`, asked if a folder is named.

    Args:
        question: the question.
    """

    def __init__(self, question: Question[RunAnswers]) -> None:
        self.question = question
        self.key = question.key
        self.text = question.text

    def _run(self, answers: ConfigAnswers) -> RunAnswers:
        assert answers.run is not None
        return answers.run

    def prompt(self, answers: ConfigAnswers) -> str:
        return self.question.prompt(self._run(answers))

    def applies(self, answers: ConfigAnswers) -> bool:
        if answers.run is None:
            return False
        if self.key == "model" and not answers.chooses_model:
            return False  # the loaded file has a model
        return self.question.applies(answers.run)

    def default(self, answers: ConfigAnswers) -> Any:
        return self.question.default(self._run(answers))

    def choices(self, answers: ConfigAnswers) -> Mapping[str, str]:
        return self.question.choices(self._run(answers))

    def help(self, choices: Mapping[str, str]) -> list[str]:
        return self.question.help(choices)

    def read(self, answer: str, choices: Mapping[str, str]) -> Any:
        return self.question.read(answer, choices)

    def store(self, value: Any, answers: ConfigAnswers, without: Sequence[str] = ()) -> None:
        run = self._run(answers)
        is_new = run.answered.get(self.key) != value
        self.question.store(value, run)
        if is_new:
            answers.propose()


def _usual_folders() -> Iterator[Path]:
    """The folders in which the user may have put the files."""
    yield from USUAL_FOLDERS
    if USUAL_PARENT.is_dir():
        yield from sorted(path for path in USUAL_PARENT.iterdir() if path.is_dir())


def _path(answer: str) -> Path:
    """The path in an answer; terminals put quotes around a folder that is dropped on them."""
    return Path(answer.strip("'\"")).expanduser()


GPU = Gpu()
RUN_QUESTIONS = tuple(AboutRun(question) for question in start.QUESTIONS)
QUESTIONS: Sequence[Question[ConfigAnswers]] = (
    Folder(),
    GPU,
    RecipeChoice(),
    *RUN_QUESTIONS,
    *SETTINGS,
)
