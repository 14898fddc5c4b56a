"""What a server serves: one project folder, and how it refuses what it must not do. Free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.config.json_files import json_kind, parse_json
from simpletuner.config.sources import EXAMPLES, example_names
from simpletuner.errors import ConfigError, Problem
from simpletuner.redaction import redact
from simpletuner.reporting.html import POLICY

EXAMPLE = "examples/"  # begins the names of packaged configs
# Pages of other commands hold their scripts, so they get an origin of their own: they can call nothing here.
SANDBOX = {"Content-Security-Policy": f"{POLICY}; sandbox allow-scripts allow-popups"}
# A report loads large clips from its folder, so it keeps its origin. Its policy lets it send nothing, open no window
# and embed no page.
SANDBOX_WITH_CLIPS = {"Content-Security-Policy": f"{POLICY}; sandbox allow-scripts allow-same-origin"}
CONFIG_NAME = re.compile(r"\w[\w.-]*")


class Refusal(ConfigError):
    """A request that is answered with problems instead of what it asked for.

    Args:
        status: the HTTP status.
        problems: what the answer lists; a text stands for one problem without a key.
    """

    def __init__(self, status: int, problems: str | Iterable[Problem]) -> None:
        self.status = status
        super().__init__([Problem("", problems)] if isinstance(problems, str) else problems)

    def answer(self, headers: Mapping[str, str] | None = None) -> Response:
        """The response that says so."""
        return JSONResponse({"problems": problems_json(self.problems)}, self.status, headers=headers)


def problems_json(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Problems as the page reads them, each once and without secrets."""
    # An unnamed source of settings leaves an empty note.
    return [
        {"key": problem.where, "message": redact(problem.message.removesuffix(" ()")), "fatal": problem.fatal}
        for problem in dict.fromkeys(problems)
    ]


@dataclass(frozen=True)
class Project:
    """The folder in which `simpletuner server` was started.

    Attributes:
        folder: the working directory of the runs; absolute and resolved.
        roots: further folders that the page may show, `--root`; absolute and resolved.
        run: the output folder of the run that the page is part of (`train --page`); such a page edits and starts
            nothing.
    """

    folder: Path
    roots: tuple[Path, ...] = ()
    run: Path | None = None

    def inside(self, path: str | Path, *, packaged: bool = False) -> Path:
        """The real path behind a path, relative ones from the project's folder; links are followed first.

        Args:
            packaged: packaged examples are allowed, too.

        Raises:
            Refusal: 403 if it lies outside the allowed folders.
        """
        try:
            found = (self.folder / Path(path).expanduser()).resolve()
        except (OSError, RuntimeError, ValueError):
            raise Refusal(400, f"{str(path)!r} is not a path.") from None
        if not any(map(found.is_relative_to, (self.folder, *self.roots, *([EXAMPLES] if packaged else [])))):
            raise Refusal(403, f"{str(path)!r} is outside the project; allow its folder with --root.")
        return found

    def config_file(self, name: str) -> Path:
        """The file of a config: `config`, `NAME` of config/NAME/config.json, or a packaged `examples/NAME`.

        Raises:
            Refusal: 404 if no config can have this name, 403 if it is a link to somewhere else.
        """
        example = name.removeprefix(EXAMPLE)
        if name.startswith(EXAMPLE) and example in example_names():
            return EXAMPLES / example / "config.json"
        if not CONFIG_NAME.fullmatch(name):
            raise Refusal(404, f"{name!r} is not the name of a config.")
        if name != "config":
            return self.inside(Path("config") / name / "config.json")
        first = self.inside("config.json")  # training prefers it, too
        return first if first.is_file() else self.inside("config/config.json")

    def config_names(self) -> list[str]:
        """The names of the configs that exist, also of those that may not be opened."""
        # Unlike Path.is_file, os.path.isfile raises nothing for a folder that may not be entered.
        found = filter(os.path.isfile, self.folder.glob("config/*/config.json"))
        has_main = any(os.path.isfile(self.folder / path) for path in ("config.json", "config/config.json"))  # noqa: PTH113
        named = sorted(path.parent.name for path in found)
        return [*(["config"] if has_main else []), *filter(CONFIG_NAME.fullmatch, named)]


def chosen_by(name: str, file: Path) -> str:
    """The argument with which a command uses a config."""
    return f"example={name.removeprefix(EXAMPLE)}" if name.startswith(EXAMPLE) else f"--config={file}"


def project_of(request: Request) -> Project:
    """The project that a request is about."""
    return cast(Project, request.app.state.project)


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        Refusal: 400 if it is none.
    """
    try:
        content = parse_json((await request.body()).decode())
    except ValueError as error:
        raise Refusal(400, f"The request is not usable JSON: {error}.") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"The request must be one JSON object, not {json_kind(content)}.")
    return content
