"""Routes of configs and dataset files, inside the project's folders only.

GET answers with an ETag. PUT wants it back in If-Match and is refused with 412 if the file has changed meanwhile; the
answer then holds what the file says now. A file that does not exist yet is created by a PUT without If-Match.

In the values of a config, a key is known by its main name, however the file spells it; PUT changes the keys it names,
removes those it names with null, and keeps all others and their order. Secrets are shown as `{"secret": "set"}`, and
stay what they are if this comes back.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletuner.atomic import write_json
from simpletuner.config.datasets import read_datasets
from simpletuner.config.json_files import json_kind, read_json
from simpletuner.config.locate import EXAMPLES, dataset_file, example_names, resolve_alias
from simpletuner.config.schema import option_names
from simpletuner.errors import Problem
from simpletuner.plan.draft import Draft
from simpletuner.redaction import REFERENCE, SECRET_NAME, redact
from simpletuner.server.project import EXAMPLE, Project, Refusal, problems_json, project_of, read_object

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
    """The configs of the project."""
    project = project_of(request)
    names = project.config_names()
    return JSONResponse([{"name": name, "path": shown(project.config_file(name), project)} for name in names])


def examples(request: Request) -> Response:
    """The packaged configs, which can be read and run but not saved."""
    wanted = ("model_family", "model_flavour", "model_type")
    found = []
    for name in example_names():
        content = json.loads((EXAMPLES / name / "config.json").read_text(encoding="utf-8"))
        found.append({"name": EXAMPLE + name, **{key: content.get(key) for key in wanted}})
    return JSONResponse(found)


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

    def change(content: Any) -> Any:
        settings = {} if content is None else settings_of(content)
        replace_values(settings, values)
        return settings if content is None else content  # settings may be a part of the content

    def answer() -> dict[str, Any]:
        return config_json(project, name, path)

    return await run_in_threadpool(save, path, request.headers.get("if-match"), change, answer)


def datasets(request: Request) -> Response:
    """The entries of a config's dataset file, and what is wrong with them; `?config=NAME`."""
    project = project_of(request)
    path, settings = dataset_path(request)
    return JSONResponse(datasets_json(project, path, settings), headers={"ETag": etag(path)} if path.is_file() else {})


async def put_datasets(request: Request) -> Response:
    """Save the entries of a config's dataset file."""
    project = project_of(request)
    path, settings = dataset_path(request)
    entries = (await read_object(request)).get("entries")
    if not isinstance(entries, list):
        raise Refusal(400, [Problem("entries", f"must be a list, not {json_kind(entries)}.")])

    def change(content: Any) -> Any:
        return unmasked(entries, content, "entries")

    def answer() -> dict[str, Any]:
        return datasets_json(project, path, settings)

    return await run_in_threadpool(save, writable(project, path), request.headers.get("if-match"), change, answer)


def save(path: Path, expected: str | None, change: Callable[[Any], Any], answer: Callable[[], Any]) -> Response:
    """Replace the content of a JSON file by what `change` makes of it (of None if there is no file).

    Raises:
        Refusal: 412 if its ETag is not the expected one, 422 if the file is not JSON; it is kept then.
    """
    with _saving:
        current = etag(path) if path.is_file() else None
        if current != expected:
            headers = {"ETag": current} if current else None
            content = {**answer(), "problems": problems_json([Problem("", f"{path.name} {CHANGED}")])}
            return JSONResponse(content, 412, headers)
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


def writable(project: Project, path: Path) -> Path:
    """The file itself, if it may be written.

    Raises:
        Refusal: 403 if it is packaged or outside the project.
    """
    if path.is_relative_to(EXAMPLES):
        raise Refusal(403, "This belongs to a packaged example; `simpletuner examples copy` makes one to change.")
    return project.inside(path)


def shown(path: Path, project: Project) -> str:
    """A path as people write it in the project."""
    return str(path.relative_to(project.folder)) if path.is_relative_to(project.folder) else str(path)


def config_json(project: Project, name: str, path: Path) -> dict[str, Any]:
    """A config as the page reads it."""
    settings = settings_of(read(path)) if path.is_file() else {}
    values = {canonical(key): value for key, value in settings.items()}
    found = project.folder / dataset_file(text_of(values.get("data_backend_config")), path.parent, [])
    return {
        "name": name,
        "path": shown(path, project),
        "values": masked(values),
        "datasets": masked(read(found)) if found.is_file() and allowed(project, found) else None,
        "dataset_path": shown(found, project),
        "problems": problems_json(Draft(path, settings).judgement.problems),
    }


def dataset_path(request: Request) -> tuple[Path, dict[str, Any]]:
    """The dataset file of the config that a request names, and the config's settings."""
    project = project_of(request)
    path = project.config_file(request.query_params.get("config", "config"))
    settings = settings_of(read(path)) if path.is_file() else {}
    values = {canonical(key): value for key, value in settings.items()}
    file = project.folder / dataset_file(text_of(values.get("data_backend_config")), path.parent, [])
    if not allowed(project, file):
        project.inside(file)
    return file, values


def datasets_json(project: Project, path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A dataset file as the page reads it; a problem's key begins with `FILE: ID`."""
    problems: list[Problem] = []
    names = {key: text_of(settings.get(key)) or f"{{{key}}}" for key in ("model_family", "output_dir")}
    read_datasets(path, problems, placeholders=names)
    entries = masked(read(path)) if path.is_file() else []
    return {"path": shown(path, project), "entries": entries, "problems": problems_json(problems)}


def allowed(project: Project, path: Path) -> bool:
    """Whether a dataset file may be shown: packaged, or inside the project."""
    try:
        return path.is_relative_to(EXAMPLES) or bool(project.inside(path))
    except Refusal:
        return False


def text_of(value: Any) -> str | None:
    """A text with packaged paths resolved; None for everything else."""
    return resolve_alias(value) if isinstance(value, str) and value else None


def settings_of(content: Any) -> dict[str, Any]:
    """The settings in the content of a config file, which may be wrapped.

    Raises:
        Refusal: 422 if it holds none.
    """
    if isinstance(content, dict) and "_metadata" in content and isinstance(content.get("config"), dict):
        content = content["config"]
    if not isinstance(content, dict):
        raise Refusal(422, f"The file must hold one JSON object, not {json_kind(content)}.")
    return content


def canonical(key: str) -> str:
    """The main name of a key; unknown keys stay as they are."""
    option = option_names().get(key.removeprefix("--").replace("-", "_"))
    return option.name if option else key


def replace_values(settings: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set, add or (None) remove keys in place, each under the spelling that the file has."""
    written: dict[str, list[str]] = {}
    for key in settings:
        written.setdefault(canonical(key), []).append(key)
    for key, value in values.items():
        for name in written.get(canonical(key), [key]):
            if value is None:
                settings.pop(name, None)
            else:
                settings[name] = unmasked(value, settings.get(name), key)


def masked(value: Any, name: str = "") -> Any:
    """A value with its secrets replaced by `SECRET`; references such as `{env:HF_TOKEN}` are none."""
    if isinstance(value, dict):
        return {key: masked(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner, name) for inner in value]
    if not isinstance(value, str) or not value or REFERENCE.fullmatch(value):
        return value
    return SECRET if SECRET_NAME.search(name) or redact(value) != value else value


def unmasked(value: Any, old: Any, key: str) -> Any:
    """A value with every `SECRET` in it replaced by what the file has there; entries of lists are found by their id.

    Raises:
        Refusal: 422 if the file has nothing there.
    """
    if value == SECRET:
        if masked(old, key) != SECRET:
            raise Refusal(422, [Problem(key, "was to stay what it is, but is not set; enter it again.")])
        return old
    if isinstance(value, dict):
        known = old if isinstance(old, dict) else {}
        return {name: unmasked(inner, known.get(name), name) for name, inner in value.items()}
    if isinstance(value, list):
        return [unmasked(inner, counterpart(inner, place, old), key) for place, inner in enumerate(value)]
    return value


def counterpart(entry: Any, place: int, old: Any) -> Any:
    """The entry of an old list with the same id, else at the same place; None if there is none."""
    entries: Sequence[Any] = old if isinstance(old, list) else []
    name = entry.get("id") if isinstance(entry, dict) else None
    if name is not None:
        return next((each for each in entries if isinstance(each, dict) and each.get("id") == name), None)
    return entries[place] if place < len(entries) else None
