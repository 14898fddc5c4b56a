"""Routes of configs and dataset files, inside the project's folders only.

GET answers with an ETag. PUT wants it back in If-Match and is refused with 412 if the file has changed meanwhile; the
answer then holds what the file says now. A file that does not exist yet is created by a PUT without If-Match.

In the values of a config, a key is known by its main name, however the file spells it; PUT changes the keys it names,
removes those it names with null, and keeps all others and their order. Secrets are shown as `{"secret": "set"}`, and
stay what they are if this comes back.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletuner.annexes.page.folders import without_outside
from simpletuner.annexes.page.project import EXAMPLE, Project, Refusal, problems_json, project_of, read_object
from simpletuner.atomic import write_json
from simpletuner.config.datasets import read_datasets
from simpletuner.config.json_files import json_kind, read_json
from simpletuner.config.schema import main_name
from simpletuner.config.sources import EXAMPLES, dataset_file, example_names
from simpletuner.errors import Problem
from simpletuner.plan.draft import Draft
from simpletuner.redaction import REFERENCE, SECRET_NAME, hide, redact

SECRET = {"secret": "set"}
CHANGED = "has changed since it was opened. Nothing was saved: compare, then save again."
# Between the comparison of a file with If-Match and its replacement, no other request may replace it.
_saving = threading.Lock()


def routes() -> list[Route]:
    """Routes under /api/configs, and /api/datasets/plan."""
    return [
        Route("/api/configs/", configs),
        Route("/api/configs/examples", examples),
        Route("/api/configs/{name:path}", config),
        Route("/api/configs/{name:path}", put_config, methods=["PUT"]),
        Route("/api/datasets/plan", datasets),
        Route("/api/datasets/plan", put_datasets, methods=["PUT"]),
    ]


def configs(request: Request) -> Response:
    """The configs of the project; one that cannot be opened has a `problem`."""
    project = project_of(request)
    return JSONResponse([config_entry(project, name) for name in project.config_names()])


def config_entry(project: Project, name: str) -> dict[str, Any]:
    """A config in the list of all."""
    try:
        path = project.config_file(name)
        settings_in(path)
    except Refusal as refusal:
        return {"name": name, "path": None, "problem": redact(str(refusal))}
    return {"name": name, "path": shown(project, path), "problem": None}


def examples(request: Request) -> Response:
    """The packaged configs, which can be read and run but not saved."""
    keys = ("model_family", "model_flavour", "model_type")
    found = {name: settings_in(EXAMPLES / name / "config.json") for name in example_names()}
    return JSONResponse([{"name": EXAMPLE + name, **{key: found[name].get(key) for key in keys}} for name in found])


def config(request: Request) -> Response:
    """The settings and datasets of a config, as written."""
    project, name = project_of(request), request.path_params["name"]
    path = project.config_file(name)
    if not path.is_file():
        raise Refusal(404, f"There is no config {name!r} yet.")
    return JSONResponse(config_json(project, name, path), headers={"ETag": etag(path)})


async def put_config(request: Request) -> Response:
    """Save settings; what is wrong with them is answered, and does not keep a draft from being saved."""
    project, name = project_of(request), request.path_params["name"]
    path, values = writable(project, project.config_file(name)), (await read_object(request)).get("values")
    if not isinstance(values, dict):
        raise Refusal(400, [Problem("values", f"must be an object, not {json_kind(values)}.")])
    expected = request.headers.get("if-match")
    change, answer = partial(with_values, values), partial(config_json, project, name, path)
    return await run_in_threadpool(replace_file, path, expected, change, answer)


def datasets(request: Request) -> Response:
    """The entries of a config's dataset file, and what is wrong with them; `?config=NAME`."""
    project = project_of(request)
    path, settings = datasets_of(project, request.query_params.get("config", "config"))
    tag = {"ETag": etag(path)} if path.is_file() else {}
    return JSONResponse(datasets_json(project, readable(project, path), settings), headers=tag)


async def put_datasets(request: Request) -> Response:
    """Save the entries of a config's dataset file."""
    project, entries = project_of(request), (await read_object(request)).get("entries")
    path, settings = datasets_of(project, request.query_params.get("config", "config"))
    if not isinstance(entries, list):
        raise Refusal(400, [Problem("entries", f"must be a list, not {json_kind(entries)}.")])
    expected = request.headers.get("if-match")
    change, answer = partial(unmasked, entries), partial(datasets_json, project, path, settings)
    return await run_in_threadpool(replace_file, writable(project, path), expected, change, answer)


def replace_file(path: Path, expected: str | None, change: Callable[[Any], Any], answer: Callable[[], Any]) -> Response:
    """Replace the content of a JSON file by what `change` makes of it (of None if there is no file).

    The answer is 412 if its ETag is not the expected one.

    Raises:
        Refusal: 422 if the file is not JSON; it is kept then.
    """
    with _saving:
        current = etag(path) if path.is_file() else None
        if current != expected:
            content = {**answer(), "problems": problems_json([Problem("", f"{path.name} {CHANGED}")])}
            return JSONResponse(content, 412, {"ETag": current} if current else None)
        write_json(path, change(read(path) if current else None))
        return JSONResponse(answer(), headers={"ETag": etag(path)})


def etag(path: Path) -> str:
    """Identifies the content of a file."""
    return f'"{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}"'


def read(path: Path) -> Any:
    """The JSON value in a file.

    Raises:
        Refusal: 422 if it is not readable, or would lose something when written again.
    """
    problems: list[Problem] = []
    content = read_json(path, problems)
    if any(problem.fatal for problem in problems):
        raise Refusal(422, problems)
    return content


def readable(project: Project, path: Path) -> Path:
    """The file itself, if it may be shown: packaged, or inside the project.

    Raises:
        Refusal: 403 if it is elsewhere.
    """
    return project.inside(path, packaged=True)


def writable(project: Project, path: Path) -> Path:
    """The file itself, if it may be written.

    Raises:
        Refusal: 403 if it is packaged, outside the project, or another kind of file.
    """
    if readable(project, path).is_relative_to(EXAMPLES):
        raise Refusal(403, "This belongs to a packaged example; `simpletuner examples copy` makes one to change.")
    if path.suffix != ".json":
        raise Refusal(403, f"{path.name!r} is not written: configs and dataset files end in .json.")
    return project.inside(path)


def shown(project: Project, path: Path) -> str:
    """A path as people write it in the project."""
    return str(path.relative_to(project.folder)) if path.is_relative_to(project.folder) else str(path)


def config_json(project: Project, name: str, path: Path) -> dict[str, Any]:
    """A config as the page reads it."""
    file, values = datasets_of(project, name)
    allowed, outside = without_outside(project, values)
    return {
        "name": name,
        "path": shown(project, path),
        "values": masked(values),
        "datasets": masked(entries_in(project, file)),
        "dataset_path": shown(project, file),
        "problems": problems_json([*outside, *Draft(path, allowed).judgement.problems]),
    }


def datasets_of(project: Project, name: str) -> tuple[Path, dict[str, Any]]:
    """The dataset file of a config, wherever it is, and the config's settings by their main names."""
    path = project.config_file(name)
    values = values_in(path)
    return dataset_path(project, path, values), values


def dataset_path(project: Project, config: Path, values: Mapping[str, Any]) -> Path:
    """The dataset file of the settings of a config, wherever it is."""
    given = values.get("data_backend_config")
    return project.folder / dataset_file(given if isinstance(given, str) else None, config.parent, [])


def entries_in(project: Project, path: Path) -> Any:
    """What a dataset file holds; None if it may not be shown, or is not readable."""
    with suppress(Refusal):
        return read(readable(project, path))
    return None


def datasets_json(project: Project, path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A dataset file as the page reads it; a problem's key begins with `FILE: ID`."""
    problems: list[Problem] = []
    read_datasets(path, problems, placeholders={key: str(settings.get(key)) for key in ("model_family", "output_dir")})
    entries = masked(read(path)) if path.is_file() else []
    return {"path": shown(project, path), "entries": entries, "problems": problems_json(problems)}


def settings_in(path: Path) -> dict[str, Any]:
    """The settings in a config file as it spells them; none if there is no file."""
    return unwrapped(read(path)) if path.is_file() else {}


def values_in(path: Path) -> dict[str, Any]:
    """The settings in a config file by their main names; none if there is no file."""
    return {main_name(key): value for key, value in settings_in(path).items()}


def unwrapped(content: Any) -> dict[str, Any]:
    """The settings in the content of a config file, which may be wrapped.

    Raises:
        Refusal: 422 if it holds none.
    """
    if isinstance(content, dict) and "_metadata" in content and isinstance(content.get("config"), dict):
        content = content["config"]
    if not isinstance(content, dict):
        raise Refusal(422, f"The file must hold one JSON object, not {json_kind(content)}.")
    return content


def with_values(values: Mapping[str, Any], content: Any) -> Any:
    """The content of a config file with keys set, added or (None) removed, each under the spelling that it has."""
    content = {} if content is None else content
    settings = unwrapped(content)
    for key, value in values.items():
        for name in [name for name in settings if main_name(name) == main_name(key)] or [key]:
            settings[name] = unmasked(value, settings.get(name), key)
            if value is None:
                del settings[name]
    return content


def masked(value: Any, name: str = "") -> Any:
    """A value with its secrets replaced by `SECRET`; references such as `{env:HF_TOKEN}` are none."""
    if isinstance(value, dict):
        return {key: masked(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner, name) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    if not isinstance(value, str) or not value or REFERENCE.fullmatch(value):
        return value
    return SECRET if SECRET_NAME.search(name) or redact(value) != value else value


def unmasked(value: Any, old: Any, key: str = "") -> Any:
    """A value with every `SECRET` in it replaced by what the file has there; entries of lists are found by their id.

    Raises:
        Refusal: 422 if the file has no secret there.
    """
    if value == SECRET:
        if masked(old, key) != SECRET:
            raise Refusal(422, [Problem(key, "was to stay what it is, but is not set; enter it again.")])
        hide(old)
        return old
    if isinstance(value, dict):
        known = old if isinstance(old, dict) else {}
        return {name: unmasked(inner, known.get(name), name) for name, inner in value.items()}
    if isinstance(value, list):
        return [unmasked(inner, counterpart(inner, place, old), key) for place, inner in enumerate(value)]
    return value


def counterpart(entry: Any, place: int, old: Any) -> Any:
    """The entry of an old list with the same id, else at the same place; None if there is none."""
    entries = old if isinstance(old, list) else []
    if isinstance(entry, dict) and "id" in entry:
        return next((each for each in entries if isinstance(each, dict) and each.get("id") == entry["id"]), None)
    return entries[place] if place < len(entries) else None
