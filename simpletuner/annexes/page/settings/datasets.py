"""The page of `simpletuner dataset` for a saved config."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from simpletuner.annexes.captions.library import list_files
from simpletuner.annexes.page.project import SANDBOX, Refusal, chosen_by, project_of
from simpletuner.annexes.page.runs import control
from simpletuner.annexes.page.settings.files import Configuration
from simpletuner.annexes.page.settings.library import datasets_in
from simpletuner.errors import Problems
from simpletuner.redaction import redact


async def show_datasets(request: Request) -> Response:
    """The page of `simpletuner dataset` for a saved config: `?config=NAME`.

    Raises:
        Refusal: 422 for paths and links out of the project, or with the command's messages if it
            failed.
    """
    project = project_of(request)
    name = request.query_params.get("config", "config")
    saved = Configuration.saved(project, name)
    _, outside, _ = await run_in_threadpool(saved.judge)
    if not outside:
        await run_in_threadpool(links_out, saved, outside)
    if outside:
        raise Refusal(422, outside)
    with TemporaryDirectory(prefix="simpletuner-dataset-") as folder:
        page = Path(folder) / "dataset.html"
        config = chosen_by(name, project.config_file(name))
        command = [*control.PROGRAM, "dataset", "--cached", f"--out={page}", config]
        _, messages = await control.run_while_wanted(request, command, project.folder)
        if not page.is_file():
            raise Refusal(422, redact(messages.strip()))
        return HTMLResponse(page.read_bytes(), headers=SANDBOX)


def links_out(saved: Configuration, report: Problems) -> None:
    """Report every dataset whose files or captions are behind a link that leaves the project."""
    entries, context = datasets_in(saved)
    for entry in map(context.fill, entries):
        if entry.type != "local" or not entry.instance_data_dir:
            continue
        folder = Path(entry.instance_data_dir)
        listing = list_files(entry, context)
        names = sorted({*listing.files, *listing.captions.values(), *listing.metadata})
        linked = [name for name in names if not saved.project.may_show(folder / name)]
        if linked:
            more = ""
            if len(linked) > 1:
                more = f" (and {len(linked) - 1:,} more)"
            message = (
                f"{linked[0]}{more} is behind a link out of the project. Start the server with "
                "--root and its folder, or run `simpletuner dataset` in a terminal."
            )
            report.error(entry.id, message)
