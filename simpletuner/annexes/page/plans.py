"""What training would make of settings, saved or not: their problems, their plan, and the files of their datasets."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.guide import about_flavour
from simpletuner.annexes.page.files import Configuration
from simpletuner.annexes.page.project import SANDBOX, Refusal, chosen_by, problems_json, project_of, read_object
from simpletuner.config.schema import all_options
from simpletuner.redaction import redact, redact_settings

GONE = 499  # what nginx answers to a client that has left; nobody reads it
LOOK = 0.25  # seconds between two looks whether the client still waits
PROGRAM = (sys.executable, "-m", "simpletuner")


def validate(request: Request, body: dict[str, Any]) -> Response:
    """The problems, the effective values that are not the defaults of their keys, and the keys without effect that are
    not errors: those must be changed."""
    judgement, outside, of_datasets = Configuration.sent(project_of(request), body).judge()
    defaults = {key: option.default for key, option in all_options().items()}
    effective = {key: value for key, value in judgement.config.flat.items() if value != defaults[key]}
    wrong = {problem.where for problem in judgement.problems if problem.fatal}
    content = {
        "problems": problems_json([*outside, *judgement.problems, *of_datasets]),
        "effective": redact_settings(effective),
        "family": judgement.spec.name,
        "flavour": judgement.flavour.name,
        "flavours": {flavour.name: about_flavour(flavour) for flavour in judgement.spec.flavours},
        "greyed": {key: reason for key, reason in judgement.without_effect.items() if key not in wrong},
    }
    return JSONResponse(content)


async def plan_unsaved(request: Request) -> Response:
    """The document of `simpletuner plan --json` for settings that need not be saved.

    `device_memory_gb` and `device` plan for another GPU. Remote datasets are planned from the files that are here; with
    `fetch` the others are downloaded first. The plan is made by a process of its own, which ends as soon as the client
    no longer waits: the page asks again after every change.
    """
    body, project = await read_object(request), project_of(request)
    unsaved = await run_in_threadpool(Configuration.sent, project, body)
    _, outside, _ = await run_in_threadpool(unsaved.judge)
    if outside:
        return JSONResponse({"ok": False, "problems": problems_json(outside)})
    with TemporaryDirectory(prefix="simpletuner-plan-") as folder:
        command = [*PROGRAM, "plan", "--json", *unsaved.write(Path(folder))]
        if body.get("fetch") is not True:
            command.append("--cached")
        for sent, key in (("device_memory_gb", "plan_device_memory_gb"), ("device", "plan_device")):
            if body.get(sent) is not None:
                command.append(f"{key}={body[sent]}")
        output, messages = await run_while_wanted(request, command, project.folder)
    return JSONResponse(document_in(output, messages, folder))


async def show_datasets(request: Request) -> Response:
    """The page of `simpletuner dataset`, of a saved config: `?config=NAME`.

    Raises:
        Refusal: 422 if it leads out of the project, or with what the command said if it made no page.
    """
    project, name = project_of(request), request.query_params.get("config", "config")
    _, outside, _ = await run_in_threadpool(Configuration.saved(project, name).judge)
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
            # Plans write nothing that a kill could damage.
            child.kill()
            await reading


def document_in(output: str, messages: str, folder: str) -> dict[str, Any]:
    """The document that the command printed, without the names of its temporary files."""
    try:
        document: dict[str, Any] = json.loads(
            output.replace(f" ({folder}/config.json)", "").replace(f"{folder}/", "").replace(" (command line)", "")
        )
        document["problems"] = [{**each, "message": redact(each["message"])} for each in document["problems"]]
        return document
    except json.JSONDecodeError:
        last = redact(messages.strip().rpartition("\n")[2])
        return {"ok": False, "problems": [{"key": "", "message": f"The plan failed: {last}", "fatal": True}]}
