"""The project that a server serves, and refusals of requests.

The page accesses only paths below the project and `--root`, and packaged examples. Paths in
settings and datasets are checked before they are accessed. Only weights may be anywhere: the page
neither shows nor changes them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.report.html import POLICY, encodable
from simpletuner.config.datasets import PATH_KEYS, DatasetConfig
from simpletuner.config.json_reader import json_kind, parse_json
from simpletuner.config.load import Layer, canonical
from simpletuner.config.option import JSON_OR_FILE
from simpletuner.config.schema import all_options
from simpletuner.config.sources import CONFIG_NAME, EXAMPLES, example_names, resolve_alias
from simpletuner.config.types import parse_path
from simpletuner.errors import ConfigError, Problem, Problems
from simpletuner.planning.prompt_library import LIBRARY, read_library
from simpletuner.redaction import redact

EXAMPLE = "examples/"  # prefix of the names of packaged configs
# Pages of other commands contain scripts. In a separate origin, these cannot call this server.
SANDBOX = {"Content-Security-Policy": f"{POLICY}; sandbox allow-scripts allow-popups"}
# A report loads large clips from its folder, so it keeps its origin. Its policy forbids requests,
# windows and frames.
SANDBOX_WITH_CLIPS = {
    "Content-Security-Policy": f"{POLICY}; sandbox allow-scripts allow-same-origin"
}
LARGEST_BODY = 2 * 2**20
BODY_SECONDS = 20.0  # timeout of a request's body
UPLOADS = "/api/uploads/"  # prefix of the URLs of uploads, which are neither JSON nor small
MAIN_FILES = ("config.json", "config/config.json")
WEIGHTS = ("_name_or_path", "init_lora")  # suffixes of keys that name weights


class Refusal(ConfigError):
    """A request is refused; the response lists problems.

    Args:
        status: the HTTP status.
        problems: the listed problems; a text is a single problem without a key.
    """

    def __init__(self, status: int, problems: str | Iterable[Problem]) -> None:
        self.status = status
        super().__init__([Problem("", problems)] if isinstance(problems, str) else problems)

    def answer(self, headers: Mapping[str, str] | None = None) -> Response:
        """The response."""
        return JSONResponse(
            {"problems": problems_json(self.problems)}, self.status, headers=headers
        )


def problems_json(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Problems as JSON for the page, without duplicates and secrets."""
    # An unnamed source of settings leaves an empty note.
    return [
        {**problem.to_json(), "message": encodable(redact(problem.message.removesuffix(" ()")))}
        for problem in dict.fromkeys(problems)
    ]


@dataclass(frozen=True)
class Project:
    """The folder in which `simpletuner server` was started.

    Attributes:
        folder: the working directory of the runs; absolute and resolved.
        roots: further folders that the page may show, `--root`; absolute and resolved.
        run: the output folder of the run that serves the page (`train --page`); such a page cannot
            edit files or start runs.
    """

    folder: Path
    roots: tuple[Path, ...] = ()
    run: Path | None = None

    def inside(self, path: str | Path, *, packaged: bool = False) -> Path:
        """Resolve a path, relative to the project's folder and following links.

        Args:
            packaged: also allow packaged examples.

        Raises:
            Refusal: 403 if the path is outside the allowed folders.
        """
        try:
            real = (self.folder / Path(path).expanduser()).resolve()
        except (OSError, RuntimeError, ValueError):
            raise Refusal(400, f"{str(path)!r} is not a path.") from None
        allowed = [self.folder, *self.roots]
        if packaged:
            allowed.append(EXAMPLES)
        if not any(real.is_relative_to(folder) for folder in allowed):
            raise Refusal(
                403, f"{str(path)!r} is outside the project; allow its folder with --root."
            )
        return real

    def may_show(self, path: Path) -> bool:
        """Whether a path, following links, is inside the allowed folders or a packaged example."""
        try:
            self.inside(path, packaged=True)
        except Refusal:
            return False
        return True

    def config_file(self, name: str) -> Path:
        """The file of a config, which need not exist.

        Args:
            name: `config`, the `NAME` of config/NAME/config.json, or a packaged `examples/NAME`.

        Raises:
            Refusal: 404 if the name is invalid, 403 if it is a link out of the project.
        """
        example = name.removeprefix(EXAMPLE)
        if name.startswith(EXAMPLE) and example in example_names():
            return EXAMPLES / example / "config.json"
        if not CONFIG_NAME.fullmatch(name):
            raise Refusal(404, f"{name!r} is not the name of a config.")
        if name != "config":
            return self.inside(Path("config") / name / "config.json")
        first = self.inside("config.json")  # takes precedence, as in training
        return first if first.is_file() else self.inside("config/config.json")

    def new_config(self, name: str) -> Path:
        """The file of a config to create.

        Raises:
            Refusal: 422 if the name is invalid, 409 if a folder of this name exists.
        """
        if name == "config":
            raise Refusal(422, "'config' is the name of config/config.json; choose another.")
        if not CONFIG_NAME.fullmatch(name):
            raise Refusal(422, f"{name!r} cannot name a config: use letters, digits and . _ -")
        file = self.config_file(name)
        if file.parent.exists():
            raise Refusal(409, f"There is a config {name!r} already.")
        return file

    def config_names(self) -> list[str]:
        """The names of all configs, including unreadable ones."""
        # Unlike Path.is_file, os.path.isfile does not raise for an inaccessible folder.
        files = filter(os.path.isfile, self.folder.glob("config/*/config.json"))
        named = sorted(path.parent.name for path in files)
        names = list(filter(CONFIG_NAME.fullmatch, named))
        main_files = [self.folder / path for path in MAIN_FILES]
        if any(map(os.path.isfile, main_files)):
            names.insert(0, "config")
        return names

    def may_access(self, value: object) -> bool:
        """Whether a value is not a path, or a path that may be accessed."""
        report = Problems()
        self.check_path("", value, report)
        return not report

    def check_path(self, where: str, value: object, report: Problems) -> None:
        """Check that a value, if it is a path, may be accessed; lists and objects are not paths."""
        if not isinstance(value, str) or value.lstrip()[:1] in ("[", "{"):
            return
        try:
            self.inside(str(resolve_alias(value)), packaged=True)
        except Refusal as refusal:
            report.error(where, refusal.problems[0].message)

    def without_outside(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """The settings without the paths that the page may not access, and problems of these."""
        allowed: dict[str, Any] = {}
        problems = Problems()
        for key, value in values.items():
            outside = Problems()
            # By its main name, since the key may be an alias.
            for name, path in canonical(Layer("", [(key, value)]), Problems()).items():
                if name in path_keys():
                    self.check_path(name, path, outside)
                if name == LIBRARY and isinstance(path, str) and not outside:
                    self._check_pictures(self.folder / Path(path).expanduser(), outside)
            if not outside:
                allowed[key] = value
            problems += outside
        return allowed, problems

    def _check_pictures(self, library: Path, report: Problems) -> None:
        """Report every picture of a prompt library that the page may not access."""
        if not library.is_file():
            return
        for prompt in read_library(library, Problems()):
            outside = Problems()
            self.check_path(LIBRARY, prompt.picture, outside)
            for problem in outside:
                where = f"{library.name}: 'picture' of {prompt.nickname!r}"
                report.error(LIBRARY, f"{where}: {problem.message}")

    def check_dataset_paths(self, entries: Iterable[DatasetConfig], report: Problems) -> None:
        """Report every dataset path that the page may not access."""
        for entry in entries:
            # A hub dataset's `owner/name` is checked as a path inside the project.
            for key in (*PATH_KEYS, "caption_filter_list", "dataset_name"):
                self.check_path(f"{entry.id}.{key}", vars(entry)[key], report)
            if entry.parquet is not None:
                self.check_path(f"{entry.id}.parquet.path", entry.parquet.path, report)


@cache
def path_keys() -> frozenset[str]:
    """The settings that name a file or folder, except weights."""
    keys = set()
    for option in all_options().values():
        is_path = parse_path in option.parsers or option.form == JSON_OR_FILE
        if is_path and not option.name.endswith(WEIGHTS):
            keys.add(option.name)
    return frozenset(keys)


def chosen_by(name: str, file: Path) -> str:
    """The argument with which a command uses a config."""
    if name.startswith(EXAMPLE):
        return f"example={name.removeprefix(EXAMPLE)}"
    return f"--config={file}"


def project_of(request: Request) -> Project:
    """The project of a request."""
    return request.app.state.runs.project


def checked_value(body: Mapping[str, Any], key: str, kind: type[dict] | type[list]) -> Any:
    """The value of a key in a request, an object or a list.

    Raises:
        Refusal: 400 if the value has another type.
    """
    value = body.get(key)
    if not isinstance(value, kind):
        raise Refusal(400, [Problem(key, f"must be {json_kind(kind())}, not {json_kind(value)}.")])
    return value


def too_large(most: int = LARGEST_BODY) -> Refusal:
    """The refusal of a body larger than `most` bytes."""
    return Refusal(413, f"The request is larger than {most // 2**20:,} MB.")


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        Refusal: 400 if the body is not a JSON object, 413 if it is too large, 408 if it is too
            slow.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST_BODY:
                    raise too_large()
        content = parse_json(body.decode())
    except TimeoutError:
        raise Refusal(408, f"The request took longer than {BODY_SECONDS:g} s to arrive.") from None
    except ValueError as error:
        raise Refusal(400, f"The request {error}.") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"The request must be a JSON object, not {json_kind(content)}.")
    return content
