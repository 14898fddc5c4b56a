"""Archiving runs on the page, bringing them back, and deleting archived ones."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.project import Project, Refusal
from simpletuner.annexes.page.runs import archive
from simpletuner.annexes.page.runs.contents import Contents
from simpletuner.annexes.page.runs.control import Runs, refuse_if_busy
from simpletuner.annexes.page.runs.live import chosen, runs_of
from simpletuner.annexes.page.runs.queue import RUNNING, WAITING, Queue
from simpletuner.annexes.report import html
from simpletuner.annexes.runs.folder import as_text
from simpletuner.annexes.runs.run import Run
from simpletuner.config.sources import read_config_file
from simpletuner.errors import Problems, UserError, shorten
from simpletuner.planning.lock import LOCK_FILE
from simpletuner.reporting.wording import size_text

FOREIGN_SHOWN = 20  # files of the user that are listed
NOT_HERE = "This page belongs to a run; to archive or delete runs, use `simpletuner server`."


def post_archive(request: Request, body: dict[str, Any]) -> Response:
    """Archive a run: `{"run": ID}`. The answer has the run's new id and folder."""
    runs, run = _asked(request, body)
    queue = _queue_of(request)
    with runs.starting_nothing():
        _check_unused(queue, run)
        if archive.is_archived(run.folder):
            raise Refusal(409, f"{run.name} is archived already.")
        _check_alone(runs, run)
        runs.project.inside(run.folder.parent / archive.ARCHIVE)  # which may be a link
        archived = _moved(runs, run, archive.archive(run.folder))
    queue.drop_ended(str(run.folder))
    return JSONResponse(archived)


def post_bring_back(request: Request, body: dict[str, Any]) -> Response:
    """Move an archived run to where it was: `{"run": ID}`; the answer is as of `post_archive`."""
    runs, run = _asked(request, body)
    with runs.starting_nothing():
        _check_archived(run, "brought back")
        _check_unused(_queue_of(request), run)
        runs.project.inside(archive.home_of(run.folder))
        return JSONResponse(_moved(runs, run, archive.bring_back(run.folder)))


def post_delete(request: Request, body: dict[str, Any]) -> Response:
    """Delete an archived run: `{"run": ID, "confirmed": DIGEST}`.

    The digest is the one of `show_contents`, so that only what the user has seen is deleted.
    """
    runs, run = _asked(request, body)
    confirmed = str(body.get("confirmed") or "")
    with runs.starting_nothing():
        _check_archived(run, "deleted")
        _check_unused(_queue_of(request), run)
        try:
            contents = archive.delete(run.folder, confirmed)
        except UserError as error:
            raise Refusal(409, str(error)) from None
        runs.forget(run)
    return JSONResponse({"files": len(contents.files), "bytes": contents.bytes})


def show_contents(request: Request) -> Response:
    """What deleting an archived run would lose, as HTML."""
    run = chosen(request)
    _check_archived(run, "deleted")

    def draw() -> str:
        contents = Contents.of(run.folder)
        return html.render(
            "page/runs/archive.html.jinja",
            run=run,
            folder=as_text(run.folder),
            contents=contents,
            size=size_text(contents.bytes),
            most=FOREIGN_SHOWN,
            users=users_of(runs_of(request).project, archive.home_of(run.folder), run.folder),
        )

    return HTMLResponse(draw_part("Delete", draw))


def users_of(project: Project, *folders: Path) -> list[str]:
    """The configs that name a file in one of the folders, as `name (key)`; not as output folder."""
    users = []
    for name in project.config_names():
        try:
            settings = read_config_file(project.config_file(name), Problems()).values
        except (UserError, OSError):
            continue
        for key, value in settings:
            is_path = isinstance(value, str) and key.lstrip("-") != "output_dir"
            if is_path and any(_is_below(project, value, folder) for folder in folders):
                users.append(f"{name} ({key})")
    return users


def _is_below(project: Project, value: str, folder: Path) -> bool:
    """Whether a setting is the path of a folder, or of something in it."""
    try:
        return project.inside(value).is_relative_to(folder)
    except Refusal:
        return False


def _asked(request: Request, body: dict[str, Any]) -> tuple[Runs, Run]:
    """All runs, and the one that a request names.

    Raises:
        Refusal: 403 on the page of a run, 404 if there is no such run.
    """
    runs = runs_of(request)
    if runs.project.run is not None:
        raise Refusal(403, NOT_HERE)
    return runs, runs.find(str(body.get("run") or ""))


def _queue_of(request: Request) -> Queue:
    return request.app.state.runner.queue


def _moved(runs: Runs, run: Run, folder: Path) -> dict[str, Any]:
    """The answer about a run that was moved, and the configs that name files of its old folder."""
    runs.forget(run)
    moved = runs.at(folder)
    shown = folder
    if folder.is_relative_to(runs.project.folder):
        shown = folder.relative_to(runs.project.folder)
    return {
        "run": moved.id,
        "name": moved.name,
        "folder": as_text(shown),
        "used_by": users_of(runs.project, run.folder),
    }


def _check_archived(run: Run, what: str) -> None:
    """Check that a run is archived.

    Args:
        what: is asked for: `deleted` or `brought back`.

    Raises:
        Refusal: 409 if it is not.
    """
    if not archive.is_archived(run.folder):
        raise Refusal(409, f"{run.name} is not archived. Only archived runs can be {what}.")


def _check_unused(queue: Queue, run: Run) -> None:
    """Check that nothing trains in a run's folder, here or elsewhere, and no job waits for it.

    Raises:
        Refusal: 404 if the folder does not exist, 409 if it is in use.
    """
    if not run.folder.is_dir():
        raise Refusal(404, f"{run.name} has no folder: it was never started.")
    refuse_if_busy(run)
    owner = run.owner
    if owner is not None and owner.host != socket.gethostname():
        raise Refusal(
            409,
            f"{run.folder} is in use by {owner}, or was left by it. If that run is over, delete "
            f"{run.folder / LOCK_FILE} first.",
        )
    for job in queue.read():
        if job.state in (WAITING, RUNNING) and Path(job.folder) == run.folder:
            state = "waits" if job.state == WAITING else "runs"
            raise Refusal(409, f"{job.title} {state} in the queue; remove it there first.")


def _check_alone(runs: Runs, run: Run) -> None:
    """Check that a run's folder holds nothing else that would be moved with it.

    Raises:
        Refusal: 409 if it holds other runs, configs or the project, or is the archive.
    """
    project = runs.project
    if project.folder.is_relative_to(run.folder):
        raise Refusal(409, f"{run.folder} is the folder of the project, so it stays.")
    others = [other for other in (*runs.all(), *runs.archived()) if other is not run]
    inside = [as_text(other.folder) for other in others if other.folder.is_relative_to(run.folder)]
    for name in project.config_names():
        file = project.config_file(name)
        if file.is_relative_to(run.folder):
            inside.append(as_text(file))
    if inside:
        raise Refusal(409, f"{run.folder} also holds {shorten(inside, 3)}, so it stays.")
    if run.folder.name == archive.ARCHIVE:
        raise Refusal(409, f"{run.folder} is the archive of the runs beside it.")
