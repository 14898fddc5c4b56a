"""What training would make of settings, saved or not: their problems, their plan, and the files of their datasets."""

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
from simpletuner.annexes.page.project import (
    SANDBOX,
    Project,
    Refusal,
    chosen_by,
    problems_json,
    project_of,
    read_object,
    wanted,
)
from simpletuner.atomic import write_json
from simpletuner.config.arguments import EXTRA_ARGUMENTS, parse_arguments
from simpletuner.config.datasets import read_datasets
from simpletuner.config.locate import DATASET_FILE, read_env_file, read_env_layer
from simpletuner.errors import Problem
from simpletuner.plan.draft import Draft, Judgement
from simpletuner.redaction import redact, redact_settings

GONE = 499  # what nginx answers to a client that has left; nobody reads it
LOOK = 0.25  # seconds between two looks whether the client still waits
PROGRAM = (sys.executable, "-m", "simpletuner")


@dataclass(frozen=True)
class Unsaved:
    """Settings as the page has them.

    Attributes:
        file: where they will be saved.
        values: by canonical key.
        entries: of the dataset file; None if the page did not send them.
    """

    project: Project
    file: Path
    values: dict[str, Any]
    entries: list[Any] | None = None

    @classmethod
    def saved(cls, project: Project, name: str, changes: Mapping[str, Any] = MappingProxyType({})) -> Unsaved:
        """What the files of a config say, with some settings changed."""
        file = project.config_file(name)
        return cls(project, file, {**values_in(file), **changes})

    @classmethod
    def of(cls, project: Project, body: Mapping[str, Any]) -> Unsaved:
        """What a request holds, with the secrets that only the files know.

        Raises:
            Refusal: it is not of the right kind.
        """
        file = project.config_file(str(body.get("config") or "config"))
        known = values_in(file)
        values = {key: unmasked(value, known.get(key), key) for key, value in wanted(body, "values", dict).items()}
        if body.get("datasets") is None:
            return cls(project, file, values)
        old = entries_in(project, dataset_path(project, file, values))
        return cls(project, file, values, unmasked(wanted(body, "datasets", list), old, "datasets"))

    @property
    def datasets(self) -> Path:
        """The dataset file, whether or not it exists."""
        return dataset_path(self.project, self.file, self.values)

    @property
    def environment(self) -> Path:
        """The config.env beside the file."""
        return self.file.with_name("config.env")

    def judge(self) -> tuple[Judgement, list[Problem], list[Problem]]:
        """What training would make of the settings, paths that the page may not touch, and problems of the datasets
        that the page sent.

        What lies outside the project is not looked at, and no folder of a dataset is looked into.
        """
        values, outside = self.project.without_outside(self.values)
        if self.environment.is_file():
            extra = read_env_file(self.environment, []).get(EXTRA_ARGUMENTS, "")
            beside = [*read_env_layer(self.environment, []).values, *parse_arguments([], [], extra).settings]
            outside += self.project.without_outside(dict(beside))[1]
        judgement, problems = Draft(self.file).judge(values), list[Problem]()
        names = {"model_family": judgement.spec.name, "output_dir": judgement.config.run.output_dir}
        with TemporaryDirectory() as folder:
            path = self.write_datasets(Path(folder))
            is_allowed = self.entries is not None or not [*self.project.check_path("data_backend_config", str(path))]
            datasets = read_datasets(path, problems, placeholders=names) if is_allowed else []
            problems = [replace(each, where=each.where.replace(f"{folder}/", "")) for each in problems]
        outside += self.project.check_dataset_paths(datasets)
        return judgement, outside, [] if self.entries is None else problems

    def write_datasets(self, folder: Path) -> Path:
        """The file of the datasets, written into a folder if the page sent them."""
        if self.entries is None:
            return self.datasets
        write_json(folder / DATASET_FILE, self.entries)
        return folder / DATASET_FILE

    def write(self, folder: Path) -> list[str]:
        """Write them into an empty folder; returns the arguments that make a command use them."""
        write_json(folder / "config.json", self.values)
        if self.environment.is_file():
            shutil.copy(self.environment, folder)
        return [f"config_path={folder / 'config.json'}", f"data_backend_config={self.write_datasets(folder)}"]


def validate(request: Request, body: dict[str, Any]) -> Response:
    """The problems, the effective values, and the keys without effect that are not errors: those must be changed."""
    judgement, outside, of_datasets = Unsaved.of(project_of(request), body).judge()
    wrong = {problem.where for problem in judgement.problems if problem.fatal}
    content = {
        "problems": problems_json([*outside, *judgement.problems, *of_datasets]),
        "effective": redact_settings(judgement.config.flat()),
        "family": judgement.spec.name,
        "flavour": judgement.flavour.name,
        "flavours": list(judgement.spec.flavour_names),
        "greyed": {key: reason for key, reason in judgement.without_effect.items() if key not in wrong},
    }
    return JSONResponse(content)


async def plan_unsaved(request: Request) -> Response:
    """The document of `simpletuner plan --json` for settings that need not be saved.

    `device_memory_gb` plans for another GPU. Remote datasets are planned from the files that are here; with `fetch` the
    others are downloaded first. The plan is made by a process of its own, which ends as soon as the client no longer
    waits: the page asks again after every change.
    """
    body, project = await read_object(request), project_of(request)
    unsaved = await run_in_threadpool(Unsaved.of, project, body)
    _, outside, _ = await run_in_threadpool(unsaved.judge)
    if outside:
        return JSONResponse({"ok": False, "problems": problems_json(outside)})
    with TemporaryDirectory(prefix="simpletuner-plan-") as folder:
        command = [*PROGRAM, "plan", "--json", *unsaved.write(Path(folder))]
        if body.get("fetch") is not True:
            command.append("--cached")
        if body.get("device_memory_gb") is not None:
            command.append(f"plan_device_memory_gb={body['device_memory_gb']}")
        output, messages = await run_while_wanted(request, command, project.folder)
    return JSONResponse(document_in(output, messages, folder))


async def show_datasets(request: Request) -> Response:
    """The page of `simpletuner dataset`, of a saved config: `?config=NAME`.

    Raises:
        Refusal: 422 if it leads out of the project, or with what the command said if it made no page.
    """
    project, name = project_of(request), request.query_params.get("config", "config")
    _, outside, _ = await run_in_threadpool(Unsaved.saved(project, name).judge)
    if outside:
        raise Refusal(422, outside)
    with TemporaryDirectory(prefix="simpletuner-dataset-") as folder:
        page, config = Path(folder) / "dataset.html", chosen_by(name, project.config_file(name))
        command = [*PROGRAM, "dataset", "--cached", f"--out={page}", config]
        _, messages = await run_while_wanted(request, command, project.folder)
        if not page.is_file():
            raise Refusal(422, redact(messages.strip()))
        return HTMLResponse(page.read_bytes(), headers=SANDBOX)


async def run_while_wanted(request: Request, command: Sequence[str], folder: Path) -> tuple[str, str]:
    """What a command prints, and its messages.

    Raises:
        Refusal: the client has left, which ends the command.
    """
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=pipe, stderr=pipe)
    reading = asyncio.create_task(child.communicate())
    try:
        while not (await asyncio.wait([reading], timeout=LOOK))[0]:
            if await request.is_disconnected():
                raise Refusal(GONE, "The client has left.")
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
