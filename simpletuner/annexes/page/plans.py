"""What other commands say, each in a process of its own: the plan of unsaved settings, the files of the datasets."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.page.files import dataset_path, entries_in, unmasked, values_in
from simpletuner.annexes.page.folders import check_dataset_paths, check_path, without_outside
from simpletuner.annexes.page.project import (
    SANDBOX,
    Project,
    Refusal,
    chosen_by,
    problems_json,
    project_of,
    read_object,
)
from simpletuner.atomic import write_json
from simpletuner.config.datasets import read_datasets
from simpletuner.config.json_files import json_kind
from simpletuner.config.sources import DATASET_FILE, EXTRA_ARGUMENTS, parse_arguments, read_env_file, read_env_layer
from simpletuner.errors import Problem
from simpletuner.plan.draft import Draft, Judgement
from simpletuner.redaction import redact

GONE = 499  # what nginx answers to a client that has left; nobody reads it
LOOK = 0.25  # seconds between two looks whether the client still waits
ENVIRONMENT = "config.env"


@dataclass(frozen=True)
class Unsaved:
    """Settings as the page has them.

    Attributes:
        file: where they will be saved.
        values: by canonical key.
        entries: of the dataset file; None if the page did not send them.
        datasets: the dataset file, whether or not it exists.
    """

    file: Path
    values: dict[str, Any]
    entries: list[Any] | None
    datasets: Path

    @classmethod
    def saved(cls, project: Project, name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Unsaved:
        """What the files of a config say, with some settings changed."""
        file = project.config_file(name)
        values = {**values_in(file), **changes}
        return cls(file, values, None, dataset_path(project, file, values))

    @classmethod
    def of(cls, project: Project, body: Mapping[str, Any]) -> Unsaved:
        """What a request holds, with the secrets that only the files know.

        Raises:
            Refusal: it is not of the right kind.
        """
        file = project.config_file(str(body.get("config") or "config"))
        values, entries = body.get("values"), body.get("datasets")
        if not isinstance(values, dict) or not isinstance(entries, list | None):
            message = f"must be an object and datasets a list, not {json_kind(values)} and {json_kind(entries)}."
            raise Refusal(400, [Problem("values", message)])
        known = values_in(file)
        values = {key: unmasked(value, known.get(key), key) for key, value in values.items()}
        path = dataset_path(project, file, values)
        if entries is not None:
            entries = unmasked(entries, entries_in(project, path), "datasets")
        return cls(file, values, entries, path)

    def judge(self, project: Project) -> tuple[Judgement, list[Problem], list[Problem]]:
        """What training would make of the settings, paths that the page may not touch, and problems of the datasets.

        What lies outside the project is not looked at, and no folder of a dataset is looked into.
        """
        values, outside = without_outside(project, self.values)
        if self.environment.is_file():
            extra = read_env_file(self.environment, []).get(EXTRA_ARGUMENTS, "")
            beside = [*read_env_layer(self.environment, []).values, *parse_arguments([], [], extra).settings]
            outside += without_outside(project, dict(beside))[1]
        judgement, problems = Draft(self.file).judge(values), list[Problem]()
        names = {"model_family": judgement.spec.name, "output_dir": judgement.config.run.output_dir}
        with TemporaryDirectory() as folder:
            path = self.datasets
            if self.entries is not None:
                path = Path(folder) / DATASET_FILE
                write_json(path, self.entries)
            is_allowed = self.entries is not None or not [*check_path(project, "data_backend_config", str(path))]
            entries = read_datasets(path, problems, placeholders=names) if is_allowed else []
            problems = [replace(each, where=each.where.replace(f"{folder}/", "")) for each in problems]
        return judgement, [*outside, *check_dataset_paths(project, entries)], problems

    @property
    def environment(self) -> Path:
        """The config.env beside the file."""
        return self.file.with_name(ENVIRONMENT)

    def write(self, folder: Path) -> list[str]:
        """Write them into an empty folder; returns the arguments that make a command use them."""
        write_json(folder / "config.json", self.values)
        if self.environment.is_file():
            shutil.copy(self.environment, folder)
        datasets = self.datasets
        if self.entries is not None:
            datasets = folder / DATASET_FILE
            write_json(datasets, self.entries)
        return [f"config_path={folder / 'config.json'}", f"data_backend_config={datasets}"]


async def plan_unsaved(request: Request) -> Response:
    """The document of `simpletuner plan --json` for settings that need not be saved.

    `device_memory_gb` plans for another GPU. Remote datasets are planned from the files that are here; with `fetch` the
    others are downloaded first. The plan is made by a process of its own, which ends as soon as the client no longer
    waits: the page asks again after every change.
    """
    body, project = await read_object(request), project_of(request)
    unsaved = await run_in_threadpool(Unsaved.of, project, body)
    _, outside, _ = await run_in_threadpool(unsaved.judge, project)
    if outside:
        return JSONResponse({"ok": False, "problems": problems_json(outside)})
    with TemporaryDirectory(prefix="simpletuner-plan-") as name:
        command = [sys.executable, "-m", "simpletuner", "plan", "--json", *unsaved.write(Path(name))]
        if body.get("fetch") is not True:
            command.append("--cached")
        if body.get("device_memory_gb") is not None:
            command.append(f"plan_device_memory_gb={body['device_memory_gb']}")
        printed = await run_while_wanted(request, command, project.folder)
    return Response(status_code=GONE) if printed is None else JSONResponse(document_in(*printed, name))


async def show_datasets(request: Request) -> Response:
    """The page of `simpletuner dataset`, of a saved config: `?config=NAME`.

    Raises:
        Refusal: 422 if it leads out of the project, or with what the command said if it made no page.
    """
    project, name = project_of(request), request.query_params.get("config", "config")
    chosen = chosen_by(name, project.config_file(name))
    _, outside, _ = await run_in_threadpool(Unsaved.saved(project, name).judge, project)
    if outside:
        raise Refusal(422, outside)
    with TemporaryDirectory(prefix="simpletuner-dataset-") as folder:
        page = Path(folder) / "dataset.html"
        command = [sys.executable, "-m", "simpletuner", "dataset", "--cached", f"--out={page}", chosen]
        printed = await run_while_wanted(request, command, project.folder)
        if printed is None:
            return Response(status_code=GONE)
        if not page.is_file():
            raise Refusal(422, redact(printed[1].strip()))
        return HTMLResponse(page.read_bytes(), headers=SANDBOX)


async def run_while_wanted(request: Request, command: Sequence[str], folder: Path) -> tuple[str, str] | None:
    """What a command prints, and its messages; None if the client leaves, which ends the command."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=pipe, stderr=pipe)
    reading = asyncio.create_task(child.communicate())
    try:
        while not (await asyncio.wait([reading], timeout=LOOK))[0]:
            if await request.is_disconnected():
                return None
        output, messages = reading.result()
        return output.decode(errors="replace"), messages.decode(errors="replace")
    finally:
        if child.returncode is None:
            child.kill()
            await reading


def document_in(output: str, messages: str, folder: str) -> dict[str, Any]:
    """The document that the command printed, without the names of its temporary files."""
    try:
        document: dict[str, Any] = json.loads(output.replace(f" ({folder}/config.json)", "").replace(f"{folder}/", ""))
        document["problems"] = [{**each, "message": redact(each["message"])} for each in document["problems"]]
        return document
    except json.JSONDecodeError:
        last = redact(messages.strip().rpartition("\n")[2])
        return {"ok": False, "problems": [{"key": "", "message": f"The plan failed: {last}", "fatal": True}]}
