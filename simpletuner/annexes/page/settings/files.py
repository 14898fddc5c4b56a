"""Configs, dataset files and dataset folders of a project; nothing outside it.

GET returns an ETag. PUT requires it in If-Match and fails with 412 if the file has changed since;
that response contains the current content. A PUT without If-Match creates a file that does not
exist yet.

Config values are keyed by main names, however the file spells them. PUT changes the keys in the
request, removes keys whose value is null, and keeps all other keys and their order. Secrets are
shown as `{"secret": "set"}`; sending this back keeps the secret.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.draft import Draft, Judgement
from simpletuner.annexes.guide import about_flavour
from simpletuner.annexes.page.project import (
    EXAMPLE,
    LARGEST_BODY,
    Project,
    Refusal,
    checked_value,
    problems_json,
    project_of,
)
from simpletuner.atomic import why_not_writable, write_json
from simpletuner.config import sources
from simpletuner.config.datasets import parse_datasets, read_datasets
from simpletuner.config.json_reader import read_json
from simpletuner.config.schema import all_options, main_name
from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.file_names import CAPTION_SUFFIXES
from simpletuner.data.pictures import PICTURE_SUFFIXES
from simpletuner.errors import ConfigError, Problem, Problems
from simpletuner.hashing import hash_file
from simpletuner.redaction import REFERENCE, SECRET_NAME, hide, redact, redact_settings

SECRET = {"secret": "set"}
CHANGED = "has changed since it was opened. Nothing was saved: compare, then save again."
MOST_NAMES = 5000  # maximum entries of a folder; the page shows whether there are more
KINDS = (
    dict.fromkeys(CAPTION_SUFFIXES, "captions")
    | dict.fromkeys(PICTURE_SUFFIXES, "images")
    | dict.fromkeys(CLIP_SUFFIXES, "videos")
)
# Held between the comparison of a file with If-Match and its replacement.
_saving = threading.Lock()


@dataclass(frozen=True)
class Configuration:
    """Settings from a config file or from the page.

    Attributes:
        file: the config file, which may not exist yet.
        values: settings by main name.
        entries: entries of the dataset file; None if the page did not send them.
    """

    project: Project
    name: str
    file: Path
    values: dict[str, Any]
    entries: list[Any] | None = None

    @classmethod
    def saved(
        cls, project: Project, name: str, changes: Mapping[str, Any] = MappingProxyType({})
    ) -> Configuration:
        """The settings in the file of a config, with changes."""
        file = project.config_file(name)
        values = {main_name(key): value for key, value in settings_in(file).items()}
        return cls(project, name, file, {**values, **changes})

    @classmethod
    def sent(cls, project: Project, body: Mapping[str, Any]) -> Configuration:
        """The settings in a request, with secrets from the files, which browsers never receive.

        Raises:
            Refusal: the request is malformed.
        """
        name = str(body.get("config") or "config")
        file = project.config_file(name)
        try:
            saved = cls.saved(project, name)
        except ConfigError:  # the user is repairing its text on the page
            saved = cls(project, name, file, {})
        values = unmasked(checked_value(body, "values", dict), saved.values)
        sent = replace(saved, values=values)
        if body.get("datasets") is None:
            return sent
        # Of the dataset file that the sent values name.
        entries = unmasked(checked_value(body, "datasets", list), sent.saved_entries, "datasets")
        return replace(sent, entries=entries)

    @property
    def datasets(self) -> Path:
        """The path of the dataset file, whether or not it exists."""
        path = self.values.get("data_backend_config")
        if not isinstance(path, str):
            path = None
        return self.project.folder / sources.dataset_file(path, self.file.parent, Problems())

    @property
    def saved_entries(self) -> Any:
        """The content of the dataset file; None if it is outside the project or unreadable."""
        with suppress(ConfigError):
            return read(self.project.inside(self.datasets, packaged=True))
        return None

    @property
    def environment(self) -> Path:
        """The config.env beside the file."""
        return self.file.with_name("config.env")

    def judge(self) -> tuple[Judgement, Problems, Problems]:
        """The judgement of the settings, and two lists of problems.

        The first list has the paths outside the project, the second the problems of the datasets
        that the page sent. Paths outside the project and dataset folders are not accessed.
        """
        values, outside = self.project.without_outside(self.values)
        if self.environment.is_file():
            # Commands that use this config also read options from its config.env.
            variables = sources.read_env_file(self.environment, Problems())
            extra = variables.get(sources.EXTRA_ARGUMENTS, "")
            environment_settings = [
                *sources.read_env_layer(self.environment, Problems()).values,
                *sources.parse_arguments([], extra).settings,
            ]
            outside += self.project.without_outside(dict(environment_settings))[1]
        judgement = Draft(self.file).judge(values)
        problems = Problems()
        names = {"model_family": judgement.spec.name, "output_dir": judgement.config.run.output_dir}
        if self.entries is not None:
            datasets = parse_datasets(self.entries, Path(sources.DATASET_FILE), names, problems)
        elif self.project.may_access(str(self.datasets)):
            datasets = read_datasets(self.datasets, Problems(), placeholders=names)
        else:
            datasets = []
        paths = Problems(outside)
        self.project.check_dataset_paths(datasets, paths)
        return judgement, paths, problems

    def write(self, folder: Path) -> list[str]:
        """Write the settings into an empty folder; returns the arguments of a command for them."""
        write_json(folder / "config.json", self.values)
        if self.environment.is_file():
            # Commands read config.env beside the config.
            shutil.copy(self.environment, folder)
        datasets = self.datasets
        if self.entries is not None:
            datasets = folder / sources.DATASET_FILE
            write_json(datasets, self.entries)
        return [f"config_path={folder / 'config.json'}", f"data_backend_config={datasets}"]


def configs(request: Request) -> Response:
    """The configs of the project; unreadable ones have a `problem`."""
    project = project_of(request)
    entries: list[dict[str, str | None]] = []
    for name in project.config_names():
        try:
            path = project.config_file(name)
            settings_in(path)
            entries.append({"name": name, "path": shown(project, path), "problem": None})
        except ConfigError as error:
            # An unreadable config must not hide the other ones.
            entries.append({"name": name, "path": None, "problem": redact(str(error))})
    return JSONResponse(entries)


def examples(request: Request) -> Response:
    """The packaged configs, which can be viewed and run but not changed."""
    content = []
    for name in sources.example_names():
        settings = settings_in(sources.EXAMPLES / name / "config.json")
        model = {key: settings.get(key) for key in ("model_family", "model_flavour", "model_type")}
        content.append({"name": EXAMPLE + name, **model})
    return JSONResponse(content)


def config(request: Request) -> Response:
    """The settings and datasets of a config, as written."""
    project = project_of(request)
    name = request.path_params["name"]
    path = project.config_file(name)
    if not path.is_file():
        raise Refusal(404, f"There is no config {name!r} yet.")
    return in_file(path, lambda: config_json(Configuration.saved(project, name)))


def put_config(request: Request, body: dict[str, Any]) -> Response:
    """Save settings; drafts with problems are saved too, and the response lists the problems."""
    project = project_of(request)
    name = request.path_params["name"]
    path = writable(project, project.config_file(name))
    change = partial(with_values, checked_value(body, "values", dict))
    if body.get("whole") is not True:
        settings_in(path)  # raises if the content to keep is unreadable
    return replace_file(
        request, path, body, change, lambda: config_json(Configuration.saved(project, name))
    )


def datasets(request: Request) -> Response:
    """The entries of a config's dataset file, with their problems; `?config=NAME`."""
    saved = Configuration.saved(project_of(request), request.query_params.get("config", "config"))
    path = saved.project.inside(saved.datasets, packaged=True)
    return in_file(path, lambda: datasets_json(saved))


def put_datasets(request: Request, body: dict[str, Any]) -> Response:
    """Save the entries of a config's dataset file."""
    saved = Configuration.saved(project_of(request), request.query_params.get("config", "config"))
    path = writable(saved.project, saved.datasets)
    change = partial(unmasked, checked_value(body, "entries", list))
    return replace_file(request, path, body, change, lambda: datasets_json(saved))


def add_dataset(saved: Configuration, entry: Mapping[str, Any]) -> None:
    """Append an entry to a config's dataset file, unless it contains the entry."""
    path = writable(saved.project, saved.datasets)
    with _saving:
        entries = read(path)
        if entry not in entries:
            entries = [*entries, entry]
        write_json(path, entries)


def name_in_config(saved: Configuration, key: str, path: str) -> None:
    """Set a key of a saved config to the path of a file."""
    file = writable(saved.project, saved.file)
    with _saving:
        write_json(file, with_values({key: path}, read(file)))


def in_file(path: Path, content: Callable[[], dict[str, Any]]) -> Response:
    """The content of a file; of an unreadable one the problems, and its text for repair.

    The text is left out if it may contain secrets.
    """
    headers = {"ETag": etag(path)} if path.is_file() else None
    try:
        return JSONResponse(content(), headers=headers)
    except ConfigError as error:
        if isinstance(error, Refusal) or headers is None:
            raise
        text = path.read_bytes()[:LARGEST_BODY].decode(errors="replace")
        names = re.findall(r"[\w.-]+", text)
        is_secret = redact(text) != text or any(map(SECRET_NAME.search, names))
        damaged = {"problems": problems_json(error.problems), "text": None if is_secret else text}
        return JSONResponse(damaged, 422, headers)


def replace_file(
    request: Request,
    path: Path,
    body: Mapping[str, Any],
    change: Callable[[Any], Any],
    answer: Callable[[], Any],
) -> Response:
    """Replace the content of a JSON file; 412 if its ETag differs from the request's.

    Args:
        body: has `"whole": true` if the request contains all of the content.
        change: returns the new content for the present one, which is None if the file is new or
            is replaced whole.
        answer: the content of the response.

    Raises:
        ConfigError: the file is not JSON, and the request contains only a part of it; the file is
            kept.
    """
    with _saving:
        # Both are None for a new file: a PUT that creates it has no If-Match.
        current = etag(path) if path.is_file() else None
        if current != request.headers.get("if-match"):
            problems = problems_json([Problem("", f"{path.name} {CHANGED}")])
            headers = {"ETag": current} if current else None
            return JSONResponse({**answer(), "problems": problems}, 412, headers)
        is_kept = current is not None and body.get("whole") is not True
        content = read(path) if is_kept else None
        write_json(path, change(content))
        return JSONResponse(answer(), headers={"ETag": etag(path)})


def etag(path: Path) -> str:
    """The ETag of a file."""
    # A hash of the content: times are coarse on some file systems, and saving the same content is
    # not a conflict.
    return f'"{hash_file(path)[:32]}"'


def read(path: Path) -> Any:
    """The JSON value in a file.

    Raises:
        ConfigError: the file is unreadable, or rewriting it would lose content.
    """
    report = Problems()
    content = read_json(path, report)
    report.raise_if_fatal()
    return content


def writable(project: Project, path: Path) -> Path:
    """The resolved path of a file, if the page may write it.

    Raises:
        Refusal: 403 if the file is packaged, outside the project, not JSON, or in a folder without
            permission.
    """
    if project.inside(path, packaged=True).is_relative_to(sources.EXAMPLES):
        raise Refusal(
            403,
            "This belongs to a packaged example; `simpletuner examples copy` makes an "
            "editable copy.",
        )
    # `data_backend_config` may name any file of the project: only JSON files are overwritten.
    if path.suffix != ".json":
        raise Refusal(
            403, f"{path.name!r} was not written: configs and dataset files end in .json."
        )
    reason = why_not_writable(path.parent)
    if reason:
        raise Refusal(403, [Problem("", reason)])
    return project.inside(path)


def shown(project: Project, path: Path) -> str:
    """A path for display, relative to the project's folder if it is inside."""
    if path.is_relative_to(project.folder):
        path = path.relative_to(project.folder)
    return str(path)


def config_json(saved: Configuration) -> dict[str, Any]:
    """A config as JSON for the page."""
    allowed, outside = saved.project.without_outside(saved.values)
    return {
        "name": saved.name,
        "path": shown(saved.project, saved.file),
        "values": masked(saved.values),
        "datasets": masked(saved.saved_entries),
        "dataset_path": shown(saved.project, saved.datasets),
        "problems": problems_json([*outside, *Draft(saved.file, allowed).judgement.problems]),
    }


def datasets_json(saved: Configuration) -> dict[str, Any]:
    """A dataset file as JSON for the page; the keys of problems begin with `FILE: ID`."""
    path = saved.project.inside(saved.datasets, packaged=True)
    problems = Problems()
    names = {key: str(saved.values.get(key)) for key in ("model_family", "output_dir")}
    read_datasets(path, problems, placeholders=names)
    entries = masked(read(path)) if path.is_file() else []
    return {
        "path": shown(saved.project, path),
        "entries": entries,
        "problems": problems_json(problems),
    }


def settings_in(path: Path) -> dict[str, Any]:
    """The settings in a config file, with keys as spelled there; empty if the file does not exist.

    Raises:
        ConfigError: the file is not a valid config.
    """
    if not path.is_file():
        return {}
    report = Problems()
    layer = sources.read_json_layer(path, report)
    report.raise_if_fatal()
    return dict(layer.values) if layer else {}


def with_values(values: Mapping[str, Any], content: Any) -> Any:
    """The content of a config file with changed settings; None removes one.

    Keys keep the spelling of the file.
    """
    content = {} if content is None else content
    settings = sources.unwrapped(content)
    for key, value in values.items():
        # Changes all spellings of a key, since a stale alias would contradict the new value.
        spellings = [name for name in settings if main_name(name) == main_name(key)]
        for name in spellings or [key]:
            settings[name] = unmasked(value, settings.get(name), key)
            if value is None:
                del settings[name]
    return content


def masked(value: Any, name: str = "") -> Any:
    """A value with its secrets replaced by `SECRET`.

    References such as `{env:HF_TOKEN}` are not secret.
    """
    if isinstance(value, dict):
        return {key: masked(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner, name) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON cannot represent it
    if not isinstance(value, str) or not value or REFERENCE.fullmatch(value):
        return value
    is_secret = SECRET_NAME.search(name) or redact(value) != value
    return SECRET if is_secret else value


def unmasked(value: Any, old: Any, key: str = "") -> Any:
    """Replace every `SECRET` in a value by the file's secret; entries of lists are matched by id.

    Raises:
        Refusal: 422 if the file has no such secret.
    """
    if value == SECRET:
        if masked(old, key) != SECRET:
            raise Refusal(422, [Problem(key, "was to be kept, but is not set; enter it again.")])
        # The response may quote it in a problem.
        hide(old)
        return old
    if isinstance(value, dict):
        old_values = old if isinstance(old, dict) else {}
        return {name: unmasked(inner, old_values.get(name), name) for name, inner in value.items()}
    if isinstance(value, list):
        return [
            unmasked(inner, counterpart(inner, index, old), key)
            for index, inner in enumerate(value)
        ]
    return value


def counterpart(entry: Any, index: int, old: Any) -> Any:
    """The entry of an old list with the id of an entry; if it has no id, with its index.

    None if there is no such entry.
    """
    old_entries = old if isinstance(old, list) else []
    if isinstance(entry, dict) and "id" in entry:
        # By id, since the page may have moved or removed entries.
        for old_entry in old_entries:
            if isinstance(old_entry, dict) and old_entry.get("id") == entry["id"]:
                return old_entry
        return None
    return old_entries[index] if index < len(old_entries) else None


def validate(request: Request, body: dict[str, Any]) -> Response:
    """The problems of settings, effective values other than defaults, and keys without effect."""
    sent = Configuration.sent(project_of(request), body)
    judgement, outside, of_datasets = sent.judge()
    options = all_options()
    effective = {
        key: value for key, value in judgement.config.flat.items() if value != options[key].default
    }
    # A key with an error is not greyed: the user has to change it.
    invalid = {problem.where for problem in judgement.problems if problem.fatal}
    greyed = {key: reason for key, reason in judgement.without_effect.items() if key not in invalid}
    content = {
        "problems": problems_json([*outside, *judgement.problems, *of_datasets]),
        "effective": redact_settings(effective),
        "family": judgement.spec.name,
        "flavour": judgement.flavour.name,
        "flavours": {flavour.name: about_flavour(flavour) for flavour in judgement.spec.flavours},
        "greyed": greyed,
    }
    return JSONResponse(content)


def browse(request: Request) -> Response:
    """The subfolders of a folder, and how many files of which kind it has: `?path=FOLDER`."""
    project = project_of(request)
    folder = project.inside(request.query_params.get("path", "."))
    if not folder.is_dir():
        raise Refusal(404, f"{str(folder)!r} is not a folder.")
    try:
        with os.scandir(folder) as scan:
            # One more than is listed, which shows that there are more.
            entries = list(islice(scan, MOST_NAMES + 1))
    except OSError as error:
        raise Refusal(403, f"{str(folder)!r} cannot be read: {error.strerror}.") from None
    visible = [entry for entry in entries[:MOST_NAMES] if not entry.name.startswith(".")]
    suffixes = [Path(entry.name).suffix.lower() for entry in visible if entry.is_file()]
    roots = (project.folder, *project.roots)
    content = {
        "path": str(folder),
        # The page may not show the parent of a root.
        "parent": None if folder in roots else str(folder.parent),
        "roots": [str(root) for root in roots],
        "folders": sorted(entry.name for entry in visible if entry.is_dir()),
        "files": Counter(KINDS.get(suffix, "others") for suffix in suffixes),
        "complete": len(entries) <= MOST_NAMES,
    }
    return JSONResponse(content)
