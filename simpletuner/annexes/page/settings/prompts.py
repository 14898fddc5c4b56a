"""The preview prompts of a config as a list on the page, stored in its prompt library.

GET shows the list. PUT saves it under the rules of the page's other files (files.py): If-Match, and
412 if the file has changed since. What the planner would refuse is not saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from simpletuner.annexes.page.project import (
    EXAMPLE,
    Project,
    Refusal,
    checked_value,
    problems_json,
    project_of,
)
from simpletuner.annexes.page.runs.live import runs_of
from simpletuner.annexes.page.settings.files import (
    Configuration,
    etag,
    name_in_config,
    read,
    replace_file,
    shown,
    writable,
)
from simpletuner.annexes.report.html import render
from simpletuner.annexes.runs.state import ACTIVE
from simpletuner.config.json_reader import json_kind
from simpletuner.config.sources import resolve_alias
from simpletuner.config.types import as_user_text
from simpletuner.data.pictures import PICTURE_SUFFIXES
from simpletuner.errors import ConfigError, Problem, Problems, counted
from simpletuner.models.spec import PICTURE_TASKS
from simpletuner.planning.prompt_library import LIBRARY, PARSERS, find_picture, parse_library
from simpletuner.planning.prompts import BUILT_IN, file_safe, unique

FILE_NAME = "user_prompt_library.json"  # of a library that the page creates
NAME_LENGTH = 40  # characters of a prompt that become its name
LABELS = {"seed": "Seed", "resolution": "Size", "guidance": "Guidance", "picture": "Picture"}
TEXT_KEYS = ("name", "prompt", *PARSERS)


@dataclass(frozen=True)
class PromptFile:
    """The prompt library of a saved config.

    Attributes:
        path: of the file, which need not exist.
        is_named: whether the config names it; otherwise it is a file beside the config.
    """

    saved: Configuration
    path: Path
    is_named: bool

    @classmethod
    def of(cls, request: Request) -> PromptFile:
        """The library of the config in the request's query.

        Raises:
            Refusal: 404 if the config does not exist, 403 if the library is outside the project.
        """
        project = project_of(request)
        name = request.query_params.get("config", "config")
        saved = Configuration.saved(project, name)
        if not saved.file.is_file():
            raise Refusal(404, f"There is no config {name!r} yet: save it first.")
        named = saved.values.get(LIBRARY)
        if not isinstance(named, str) or not named.strip():
            return cls(saved, saved.file.with_name(FILE_NAME), is_named=False)
        path = project.inside(str(resolve_alias(named)), packaged=True)
        return cls(saved, path, is_named=True)

    @property
    def shown_path(self) -> str:
        """Its path, relative to the project."""
        return shown(self.saved.project, self.path)

    def read(self) -> dict[str, Any]:
        """Its content; empty if it does not exist.

        Raises:
            ConfigError: it is unreadable, or holds no object.
        """
        if not self.path.is_file():
            return {}
        content = read(self.path)
        if not isinstance(content, dict):
            message = f"{self.shown_path} must hold one object of names and prompts, not "
            raise ConfigError([Problem("", message + json_kind(content) + ".")])
        return content


def show_prompts(request: Request) -> Response:
    """The list as HTML: `?config=NAME`."""
    library = PromptFile.of(request)
    seen = etag(library.path) if library.path.is_file() else ""
    content: dict[str, Any] = {}
    damage: Sequence[Problem] = ()
    try:
        content = library.read()
    except ConfigError as error:
        damage = error.problems
    values = list_values(request, library, content)
    is_packaged = library.saved.name.startswith(EXAMPLE)
    html = render(
        "page/settings/prompts.html.jinja",
        library=library,
        rows=[prompt_row(name, value, library.saved.project) for name, value in content.items()],
        etag=seen,
        damage=problems_json(damage),
        is_packaged=is_packaged,
        **values,
    )
    return HTMLResponse(html)


def list_values(
    request: Request, library: PromptFile, content: Mapping[str, Any]
) -> dict[str, Any]:
    """Template values that come from the settings of the config, and its problems."""
    judgement, _, _ = library.saved.judge()
    validation = judgement.config.validation
    seed = validation.validation_seed
    if seed is None:
        seed = judgement.config.run.seed
    guidance = validation.validation_guidance
    flavour = judgement.flavour
    takes_pictures = flavour.task in PICTURE_TASKS or flavour.dataset_task in PICTURE_TASKS
    has_picture = any(isinstance(value, dict) and "picture" in value for value in content.values())
    named = str(library.saved.values.get(LIBRARY))
    # Sizes and guidance that the model cannot render, or that spoil its pictures.
    of_model = [in_words(each, named) for each in judgement.problems if each.where == LIBRARY]
    return {
        "seed": "" if seed is None else seed,
        "sizes": ", ".join(map(str, validation.validation_resolution or ())),
        "guidance": "" if guidance is None else f"{guidance:g}",
        "shows_pictures": takes_pictures or has_picture,
        "takes_pictures": takes_pictures,
        "problems": problems_json([*faults_of(library, content), *of_model]),
        "others": other_prompts(library, content),
        "busy": busy_runs(request, library.saved.name),
        "is_off": validation.validation_disable,
    }


def prompt_row(name: str, value: Any, project: Project) -> dict[str, Any]:
    """A prompt of the file as texts for its fields, with the URL of its picture."""
    entry = value if isinstance(value, dict) else {"prompt": value}
    row: dict[str, Any] = {"name": name}
    for key in ("prompt", *PARSERS):
        written = entry.get(key)
        row[key] = "" if written is None else as_user_text(written)
    row["picture_url"] = picture_url(row["picture"], project)
    return row


def picture_url(path: str, project: Project) -> str:
    """The URL of a thumbnail; empty for a file that the page may not show."""
    if not path or not project.may_show(Path(path)):
        return ""
    file = project.inside(path, packaged=True)
    if not file.is_file() or file.suffix.lower() not in PICTURE_SUFFIXES:
        return ""
    return f"/library/thumbnail?path={quote(str(file))}&stamp={file.stat().st_mtime_ns}"


def other_prompts(library: PromptFile, content: Mapping[str, Any]) -> list[str]:
    """What is rendered besides the prompts of the list, as sentences."""
    judgement, _, _ = library.saved.judge()
    validation = judgement.config.validation
    sentences = []
    if validation.validation_prompt:
        sentences.append(f"Preview Prompt: “{validation.validation_prompt}”")
    if validation.validation_prompt_library:
        sentences.append(f"the built-in list of {len(BUILT_IN)} prompts")
    omits_empty = validation.validation_disable_unconditional
    if omits_empty is None:
        omits_empty = bool(content or sentences)
    if not omits_empty:
        sentences.append("the empty prompt")
    return sentences


def busy_runs(request: Request, config: str) -> str:
    """The names of runs of a config that are at work."""
    busy = []
    for run in runs_of(request).all():
        if run.config == config and run.status()["status"] in ACTIVE:
            busy.append(run.name)
    return ", ".join(busy)


def put_prompts(request: Request, body: dict[str, Any]) -> Response:
    """Save the list: `{"prompts": [{"was": NAME, "name", "prompt", "seed", ...}]}`, as texts.

    `was` is the name of the entry in the file, whose other keys are kept; empty for a new one.
    """
    library = PromptFile.of(request)
    saved = library.saved
    sent = [row for row in checked_value(body, "prompts", list) if is_filled(row)]
    path = writable(saved.project, library.path)
    if not library.is_named:
        writable(saved.project, saved.file)  # raises before anything is written

    def change(content: Any) -> dict[str, Any]:
        return new_content(library, content if isinstance(content, dict) else {}, sent)

    note = note_of(request, library, len(sent))
    answer = replace_file(request, path, body, change, lambda: {"note": note})
    if answer.status_code == 200 and not library.is_named:
        name_in_config(saved, LIBRARY, library.shown_path)
    return answer


def is_filled(row: Any) -> bool:
    """Whether anything is written in a row.

    Raises:
        Refusal: 400 if it is not a row.
    """
    if not isinstance(row, dict) or not all(isinstance(row.get(key, ""), str) for key in TEXT_KEYS):
        raise Refusal(400, "prompts must be a list of objects of texts.")
    return any(row.get(key, "").strip() for key in TEXT_KEYS)


def note_of(request: Request, library: PromptFile, count: int) -> str:
    """What saving did, and when it takes effect."""
    sentences = [f"Saved {counted(count, 'prompt')} to {library.shown_path}."]
    if not library.is_named:
        sentences.append("The config names this file now.")
    busy = busy_runs(request, library.saved.name)
    if busy:
        sentences.append(
            f"{busy} keeps the prompts that it read when it started; "
            "the change counts when it is started or continued again."
        )
    else:
        sentences.append("The next start uses them.")
    return " ".join(sentences)


def new_content(
    library: PromptFile, before: Mapping[str, Any], sent: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """The new content of a library file.

    Raises:
        Refusal: 422 with everything that the planner would refuse, and repeated names.
    """
    problems = Problems()
    content: dict[str, Any] = {}
    taken = {row.get("name", "").strip() for row in sent}
    for row in sent:
        name = row.get("name", "").strip()
        if not name:
            name = unique(file_safe(row.get("prompt", "")[:NAME_LENGTH]), taken)
        if name in content:
            problems.error("", f"Two prompts are called {name!r}: give one another name.")
        content[name] = entry_of(row, before.get(row.get("was", "")))
    problems += faults_of(library, content)
    if problems.are_fatal:
        raise Refusal(422, problems)
    return content


def entry_of(row: Mapping[str, str], before: Any) -> Any:
    """The entry of a row, with the keys of the entry before that the page does not show."""
    own = {key: value_in_file(key, row.get(key, "")) for key in PARSERS}
    settings = {key: value for key, value in own.items() if value is not None}
    prompt = row.get("prompt", "")
    if not isinstance(before, dict):
        return {"prompt": prompt, **settings} if settings else prompt
    entry: dict[str, Any] = {}
    for key, value in before.items():
        if key not in PARSERS:
            entry[key] = value
        elif key in settings:
            # As it was spelled, unless it was changed.
            is_same = as_user_text(value) == row.get(key)
            entry[key] = value if is_same else settings[key]
    entry["prompt"] = prompt
    for key, value in settings.items():
        entry.setdefault(key, value)
    return entry


def value_in_file(key: str, text: str) -> Any:
    """The value of a setting for the file; None if it is empty, the text if it is wrong."""
    text = text.strip()
    if not text:
        return None
    if key in ("resolution", "picture"):
        return text
    try:
        number = PARSERS[key](text)
    except ValueError:
        return text  # reported by `faults_of`
    return int(number) if number == int(number) else number


def faults_of(library: PromptFile, content: Mapping[str, Any]) -> list[Problem]:
    """What the planner would say of a library, and pictures that the page may not open."""
    problems = Problems()
    path = library.shown_path
    project = library.saved.project
    for prompt in parse_library(path, content, problems):
        if prompt.picture is None:
            continue
        outside = Problems()
        project.check_path("", prompt.picture, outside)
        for problem in outside:
            problems.error("", f"'picture' of {prompt.nickname!r}: {problem.message}")
        if not outside:
            file = str(project.folder / prompt.picture)
            find_picture(path, prompt.nickname, file, problems)
    return [in_words(problem, path) for problem in problems]


def in_words(problem: Problem, path: str) -> Problem:
    """A problem of a library without its path, which the list names at its top, and its keys."""
    message = problem.message.removeprefix(f"{path}: ")
    for key, label in LABELS.items():
        start = f"{key!r} of "
        if message.startswith(start):
            message = f"{label} of {message.removeprefix(start)}"
    return Problem("", message, fatal=problem.fatal)
