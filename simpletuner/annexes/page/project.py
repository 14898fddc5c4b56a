"""What a server serves: one project folder, and how it refuses what it must not do. Free of torch.

A page touches paths below the project and `--root`, and packaged examples. Settings and datasets are looked at before
anything that they name is. Only weights may lie anywhere: nothing in their files is shown or changed.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.report.html import POLICY
from simpletuner.config.datasets import PATH_KEYS, DatasetConfig
from simpletuner.config.load import Layer, canonical
from simpletuner.config.option import JSON_OR_FILE
from simpletuner.config.schema import all_options
from simpletuner.config.sources import EXAMPLES, example_names, resolve_alias
from simpletuner.config.values import json_kind, parse_json, parse_path
from simpletuner.errors import ConfigError, Problem, result_of
from simpletuner.redaction import redact

EXAMPLE = "examples/"  # begins the names of packaged configs
# Pages of other commands contain scripts. In an origin of their own, these cannot call this server.
SANDBOX = {"Content-Security-Policy": f"{POLICY}; sandbox allow-scripts allow-popups"}
# A report loads large clips from its folder, so it keeps its origin. Its policy lets it send nothing, open no window
# and embed no page.
SANDBOX_WITH_CLIPS = {"Content-Security-Policy": f"{POLICY}; sandbox allow-scripts allow-same-origin"}
LARGEST_BODY = 2 * 2**20
BODY_SECONDS = 20.0  # a request has to be complete by then
UPLOADS = "/api/uploads/"  # begins the addresses of files, which are neither JSON nor small
CONFIG_NAME = re.compile(r"\w([\w.-]|[^\x00-\xa0\s])*")  # \w lacks the vowel signs of Devanagari
WEIGHTS = ("_name_or_path", "init_lora")  # ends of keys


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
        """The response."""
        return JSONResponse({"problems": problems_json(self.problems)}, self.status, headers=headers)


def problems_json(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Problems as the page reads them, without repetitions and secrets."""
    # An unnamed source of settings leaves an empty note.
    return [
        {**problem.to_json(), "message": redact(problem.message.removesuffix(" ()"))}
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
            real = (self.folder / Path(path).expanduser()).resolve()
        except (OSError, RuntimeError, ValueError):
            raise Refusal(400, f"{str(path)!r} is not a path.") from None
        if not any(map(real.is_relative_to, (self.folder, *self.roots, *([EXAMPLES] if packaged else [])))):
            raise Refusal(403, f"{str(path)!r} is outside the project; allow its folder with --root.")
        return real

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

    def new_config(self, name: str) -> Path:
        """The file of a config that is about to be written.

        Raises:
            Refusal: 422 if a new config cannot have this name, 409 if there is a folder of this name.
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
        """The names of all configs, including those that may not be opened."""
        # Unlike Path.is_file, os.path.isfile raises nothing for a folder that may not be entered.
        files = filter(os.path.isfile, self.folder.glob("config/*/config.json"))
        has_main = any(os.path.isfile(self.folder / path) for path in ("config.json", "config/config.json"))  # noqa: PTH113
        named = sorted(path.parent.name for path in files)
        return [*(["config"] if has_main else []), *filter(CONFIG_NAME.fullmatch, named)]

    def check_path(self, where: str, value: object) -> Iterator[Problem]:
        """A problem if a value is a path that the page may not touch; lists and objects are none."""
        if not isinstance(value, str) or value.lstrip()[:1] in ("[", "{"):
            return
        try:
            self.inside(str(resolve_alias(value)), packaged=True)
        except Refusal as refusal:
            yield Problem(where, refusal.problems[0].message)

    def without_outside(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """The settings whose paths the page may touch, and a problem for every path that it may not."""
        kept, problems = dict[str, Any](), list[Problem]()
        for key, value in values.items():
            known = result_of(canonical(Layer("", [(key, value)]))).items()
            outside = [each for name, path in known if name in path_keys() for each in self.check_path(name, path)]
            problems += outside
            kept |= {} if outside else {key: value}
        return kept, problems

    def check_dataset_paths(self, entries: Iterable[DatasetConfig]) -> Iterator[Problem]:
        """A problem for each path of a dataset that the page may not touch."""
        for entry in entries:
            # Of the hub's datasets, `owner/name` is a path inside the project, too.
            for key in (*PATH_KEYS, "caption_filter_list", "dataset_name"):
                yield from self.check_path(f"{entry.id}.{key}", vars(entry)[key])
            if entry.parquet is not None:
                yield from self.check_path(f"{entry.id}.parquet.path", entry.parquet.path)


@cache
def path_keys() -> frozenset[str]:
    """The settings that name a file or folder, weights aside."""
    paths = (each for each in all_options().values() if parse_path in each.parsers or each.form == JSON_OR_FILE)
    return frozenset(each.name for each in paths if not each.name.endswith(WEIGHTS))


def chosen_by(name: str, file: Path) -> str:
    """The argument with which a command uses a config."""
    return f"example={name.removeprefix(EXAMPLE)}" if name.startswith(EXAMPLE) else f"--config={file}"


def project_of(request: Request) -> Project:
    """The project that a request is about."""
    return request.app.state.runs.project


def wanted(body: Mapping[str, Any], key: str, kind: type[dict] | type[list]) -> Any:
    """What a request has under a key, an object or a list.

    Raises:
        Refusal: 400 if it is something else.
    """
    if not isinstance(value := body.get(key), kind):
        raise Refusal(400, [Problem(key, f"must be {json_kind(kind())}, not {json_kind(value)}.")])
    return value


def too_large(most: int = LARGEST_BODY) -> Refusal:
    """What a larger body is answered with."""
    return Refusal(413, f"The request is larger than {most // 2**20:,} MB.")


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request.

    Raises:
        Refusal: 400 if it is none, 413 if it is too large, announced or not, 408 if it is too slow.
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
        raise Refusal(400, f"The request is not usable JSON: {error}.") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"The request must be one JSON object, not {json_kind(content)}.")
    return content
