"""The job of the queue that writes missing captions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.captions.address import Address, api_key, is_trusted, read_address
from simpletuner.annexes.page.project import Refusal, chosen_by, project_of
from simpletuner.annexes.page.runs.jobs import queue_of
from simpletuner.annexes.page.runs.queue import RUNNING, WAITING, Job
from simpletuner.annexes.page.settings.library import editable
from simpletuner.annexes.runs.console import PROMPT, output_end
from simpletuner.atomic import why_not_writable
from simpletuner.errors import Problem, UserError


def start_captioning(request: Request, body: dict[str, Any]) -> Response:
    """Queue a job that captions files without captions.

    The body is `{"config", "dataset", "style", "trigger"}`, and for a server instead of the
    checkpoint `address`, `model`, and `send` if pictures may leave this machine.
    """
    library = editable(request, body)
    project = project_of(request)
    name = str(body.get("config") or "config")
    job = captioning_job(request)
    if job is not None and job.state in (WAITING, RUNNING):
        raise Refusal(409, "A captioning job is already running or queued.")
    server = server_options(body)
    folder = project.inside(library.context.output_dir)
    if reason := why_not_writable(folder):
        raise Refusal(403, [Problem("output_dir", reason)])
    folder.mkdir(parents=True, exist_ok=True)
    options = [f"--{key}={body[key]}" for key in ("dataset", "style", "trigger") if body.get(key)]
    options += server
    options.append(chosen_by(name, project.config_file(name)))
    queue_of(request).add("caption", str(folder), config=name, options=options)
    return JSONResponse({}, 202)


def server_options(body: Mapping[str, Any]) -> list[str]:
    """The options of a captioning server in a request; empty for the checkpoint."""
    if not body.get("address"):
        return []
    address = allowed_address(body)
    options = [f"--address={address.url}"]
    if body.get("model"):
        options.append(f"--model={body['model']}")
    if not address.is_local:
        options.append("--send-to-network")
    # Otherwise any visitor of the page could have the key sent to a server of theirs.
    if not is_trusted(address):
        options.append("--without-key")
    return options


def allowed_address(body: Mapping[str, Any]) -> Address:
    """The captioning server in a request.

    Raises:
        Refusal: 422 if it is not an address, 409 if pictures would leave this machine without the
            user's consent.
    """
    try:
        address = read_address(str(body.get("address")))
    except UserError as error:
        raise Refusal(422, [Problem("address", str(error))]) from None
    try:
        address.check_consent(may_send=body.get("send") is True, remedy="")
    except UserError as error:
        raise Refusal(409, [Problem("send", str(error))]) from None
    return address


def list_models(request: Request, body: dict[str, Any]) -> Response:
    """The models that a captioning server offers: `{"address", "send"}`."""
    # The client takes 0.1 s to import.
    from simpletuner.annexes.captions.server import CaptionClient

    address = allowed_address(body)
    key = api_key() if is_trusted(address) else ""
    return JSONResponse({"models": CaptionClient(address, key).models() or []})


def captioning_state(request: Request) -> Response:
    """The state of the captioning job: its id, config, dataset and output."""
    job = captioning_job(request)
    if job is None:
        return JSONResponse({"running": False})
    message = job.message or "Waiting in the queue on the tab Run."
    if job.state == RUNNING:
        _, _, newest = output_end(job.log).rpartition(PROMPT)
        _command, _, output = newest.partition("\n")
        message = output.strip()
    state = {
        "job": job.id,
        "config": job.config,
        "dataset": job.options[0].removeprefix("--dataset="),
        "running": job.state in (WAITING, RUNNING),
        "message": message,
    }
    return JSONResponse(state)


def captioning_job(request: Request) -> Job | None:
    """The newest job that writes captions."""
    captioning = [job for job in queue_of(request).read() if job.command == "caption"]
    return captioning[-1] if captioning else None
