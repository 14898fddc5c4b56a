"""The files of a dataset on the page: looked at, captioned, left out and taken back. Free of torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response

from simpletuner.annexes.captions import editing
from simpletuner.annexes.captions.library import Library, forget_listings
from simpletuner.annexes.page.control import Runs
from simpletuner.annexes.page.files import Configuration
from simpletuner.annexes.page.jobs import log_of, queue_of
from simpletuner.annexes.page.live import runs_of
from simpletuner.annexes.page.project import Project, Refusal, chosen_by, problems_json, project_of
from simpletuner.annexes.queue import RUNNING, WAITING, Job
from simpletuner.annexes.report.html import THUMBNAIL_SIDE, render, webp
from simpletuner.annexes.runs import ACTIVE, PROMPT, Run, printed
from simpletuner.config.datasets import DatasetConfig, read_datasets
from simpletuner.config.sources import EXAMPLES
from simpletuner.data.clips import CLIP_SUFFIXES, frames_of, is_clip, probe_clip
from simpletuner.data.discovery import is_readable
from simpletuner.data.entries import DataContext
from simpletuner.data.files import MediaError
from simpletuner.data.media import PICTURE_SUFFIXES
from simpletuner.distributed.world import usable_cores
from simpletuner.errors import Problem, Problems, UserError, result_of
from simpletuner.plan.build import settle_task
from simpletuner.plan.environment import why_not_writable

PAGE = 60
PAINTED_SIDE = 1024  # of a picture whose mask is painted; a latent position averages 8x8 pixels of it
FIRST = 5  # changes in a preview
FOR_EVER = {"Cache-Control": "private, max-age=31536000, immutable"}  # the address changes with the file
_decoding = threading.Semaphore(usable_cores())  # a picture may take hundreds of megabytes while it is decoded


def datasets_in(saved: Configuration) -> tuple[list[DatasetConfig], DataContext]:
    """The entries of a config's dataset file, and what their files depend on.

    Raises:
        Refusal: 422 if a path leads out of the project.
    """
    judgement, outside, _ = saved.judge()
    if outside:
        raise Refusal(422, outside)
    names = {"model_family": judgement.spec.name, "output_dir": judgement.config.run.output_dir}
    flavour, entries = settle_task(judgement.flavour, result_of(read_datasets(saved.datasets, placeholders=names)))
    return entries, DataContext.of(judgement.config, judgement.spec, flavour.task)


def opened(request: Request, asked: Mapping[str, Any]) -> Library:
    """The dataset that a request names by `config` and `dataset`, as it is saved.

    Raises:
        Refusal: 404 if there is none, 422 or 403 if it leads out of the project.
    """
    project, name = project_of(request), str(asked.get("dataset"))
    entries, context = datasets_in(Configuration.saved(project, str(asked.get("config") or "config")))
    for entry in map(context.fill, entries):
        if entry.id == name and entry.instance_data_dir:
            folder = project.inside(entry.instance_data_dir, packaged=True)
            if entry.type == "local" and not is_readable(folder):
                raise Refusal(404, f"{str(folder)!r} is not a folder, or cannot be read.")
            entry = entry.model_copy(update={"instance_data_dir": str(folder)})
            return Library(entry, entries, context, is_packaged=folder.is_relative_to(EXAMPLES))
    raise Refusal(404, f"The saved config has no dataset {name!r} with a folder; save your changes first.")


def show_files(request: Request) -> Response:
    """A page of the files of a dataset, as HTML: `?config=NAME&dataset=ID&words=TEXT&only=KIND&page=N`."""
    asked, library = request.query_params, opened(request, request.query_params)
    words, only, number = asked.get("words", ""), asked.get("only", ""), asked.get("page", "1")
    found, missed = library.find(words, only)
    pages = max(1, -(-len(found) // PAGE))
    page = min(max(1, int(number[:9]) if number.isdecimal() else 1), pages)
    files = library.show(found[PAGE * (page - 1) : PAGE * page])
    shown = {"words": words, "only": only, "found": len(found), "missed": missed, "page": page, "pages": pages}
    return HTMLResponse(render("page/library.html.jinja", part="all", library=library, files=files, **shown))


def card_html(library: Library, name: str) -> str:
    """The card of a file, as HTML."""
    return render("page/library.html.jinja", part="files", library=library, files=library.show([name]))


def name_in(library: Library, asked: Mapping[str, Any]) -> str:
    """The file that a request names.

    Raises:
        Refusal: 404 if it is not one of the dataset's.
    """
    if (name := asked.get("file")) not in library.listing.files:
        raise Refusal(404, f"{name!r} is not a file of {library.entry.id}.")
    return str(name)


def editable(request: Request, asked: Mapping[str, Any]) -> Library:
    """The dataset that a request names, if its captions can be edited.

    Raises:
        Refusal: as `opened`, and 403 if they cannot.
    """
    library = opened(request, asked)
    if library.locked:
        raise Refusal(403, library.locked)
    return library


def put_caption(request: Request, body: dict[str, Any]) -> Response:
    """Save a caption: `{"config", "dataset", "file", "text"}`, with the tag of what it said in If-Match."""
    library = editable(request, body)
    name, seen = name_in(library, body), request.headers.get("if-match", "").strip('"')
    path = project_of(request).inside(library.caption_path(name))
    try:
        editing.write_caption(path, str(body.get("text", "")), seen)
    except editing.ChangedMeanwhileError as error:
        return changed_meanwhile(library, name, error)
    if not seen:
        forget_listings()
    return after_change(request, body)


def changed_meanwhile(library: Library, name: str, error: editing.ChangedMeanwhileError) -> Response:
    """The answer to a change of what nobody has seen as it is now; the card has it."""
    return JSONResponse({"problems": problems_json([Problem("", str(error))]), "card": card_html(library, name)}, 412)


def put_excluded(request: Request, body: dict[str, Any]) -> Response:
    """Leave a file out, or take it back: `{"config", "dataset", "file", "out"}`."""
    library = opened(request, body)
    if library.fixed:
        raise Refusal(403, library.fixed)
    path = project_of(request).inside(library.root / library.entry.exclude_files)
    editing.exclude(library.entry, {name_in(library, body)}, path, out=body.get("out") is True)
    return after_change(request, body)


def after_change(request: Request, body: Mapping[str, Any], *notes: str, is_mask: bool = False) -> Response:
    """The card of a file that was changed, from when on that counts, and what else was changed for it."""
    library = opened(request, body)
    note = when_used(request, library, is_mask=is_mask)
    answer = {"card": card_html(library, body["file"]), "note": " ".join([note, *notes]), "others": bool(notes)}
    return JSONResponse(answer)


def when_used(request: Request, library: Library, *, is_mask: bool = False) -> str:
    """From when on training uses a change."""
    runs = runs_of(request)
    busy = [run.name for run in runs.all() if run.status()["status"] in ACTIVE and library.root in roots_of(runs, run)]
    if not busy:
        return "Saved. Training uses it from its next start on."
    # Captions were encoded before the first step; masks are not cached.
    until = "may use it at once" if is_mask else "trains with what it read at its start until it is started again"
    return f"Saved. {', '.join(busy)} {until}."


def roots_of(runs: Runs, run: Run) -> Iterator[Path]:
    """The folders of a run's datasets, as far as they are known."""
    with suppress(UserError, OSError):
        entries, _ = datasets_in(Configuration.saved(runs.project, run.config, run.settings))
        yield from (runs.project.inside(each.instance_data_dir) for each in entries if each.instance_data_dir)


def edit(request: Request, body: dict[str, Any]) -> Response:
    """Change all captions: `{"config", "dataset"}` with `find` and `replace`, `trigger`, or `undo`.

    The answer is a preview, whose `digest` has to come back as `seen` for the changes to be made.
    """
    library, project = editable(request, body), project_of(request)
    files = {name: project.inside(library.root / name) for name in sorted(library.listing.captions.values())}
    changes, unreadable = editing.changes_of(files, edit_in(library, body))
    digest = editing.digest_of(changes)
    preview = {
        "count": len(changes),
        "first": [{"name": each.name, "before": each.before, "after": each.after} for each in changes[:FIRST]],
        "emptied": sum(not each.after for each in changes),
        "unreadable": unreadable[:FIRST],
        "digest": digest,
    }
    if body.get("seen") is None:
        return JSONResponse(preview)
    if body["seen"] != digest:
        message = "The captions have changed since the preview. Nothing was saved."
        return JSONResponse({**preview, "problems": problems_json([Problem("", message)])}, 412)
    backup = editing.apply(changes, library.root)
    return JSONResponse({"count": len(changes), "backup": backup, "note": when_used(request, library)})


def edit_in(library: Library, body: Mapping[str, Any]) -> editing.Edit:
    """The edit that a request asks for.

    Raises:
        Refusal: 422 if it asks for none.
    """
    find, trigger, undo = (str(body.get(key) or "") for key in ("find", "trigger", "undo"))
    if find:
        return editing.replacing(find, str(body.get("replace") or ""))
    if trigger.strip():
        return editing.prefixing(trigger, whole=library.entry.disable_multiline_split)
    if not editing.BACKUP.fullmatch(undo):
        raise Refusal(422, "Enter a text to find, or a trigger word.")
    problems = Problems()
    restored = problems.take(editing.restoring(library.root / undo))
    problems.raise_if_fatal()
    return restored


def start_captioning(request: Request, body: dict[str, Any]) -> Response:
    """Let a job wait that captions the files without one: `{"config", "dataset", "style", "trigger"}`."""
    library, project, name = editable(request, body), project_of(request), str(body.get("config") or "config")
    if (job := captioning_job(request)) and job.state in (WAITING, RUNNING):
        raise Refusal(409, "Captions are being written, or wait for it in the queue.")
    folder = project.inside(library.context.output_dir)
    if problem := why_not_writable("output_dir", folder):
        raise Refusal(403, [problem])
    folder.mkdir(parents=True, exist_ok=True)
    options = [f"--{key}={body[key]}" for key in ("dataset", "style", "trigger") if body.get(key)]
    options.append(chosen_by(name, project.config_file(name)))
    queue_of(request).add("caption", str(folder), config=name, options=options)
    return JSONResponse({}, 202)


def captioning_state(request: Request) -> Response:
    """Whether captions are being written, for which dataset, by which job, and what it prints."""
    if (job := captioning_job(request)) is None:
        return JSONResponse({"running": False})
    forget_listings()
    said = printed(log_of(job)).rpartition(PROMPT)[2].partition("\n")[2].strip()
    message = job.message or "Waits for its turn in the queue on the tab Run." if job.state == WAITING else said
    dataset = job.options[0].removeprefix("--dataset=")
    is_running = job.state in (WAITING, RUNNING)
    return JSONResponse({"job": job.id, "dataset": dataset, "running": is_running, "message": message})


def captioning_job(request: Request) -> Job | None:
    """The newest job that writes captions."""
    return next((job for job in reversed(queue_of(request).read()) if job.command == "caption"), None)


def media_file(project: Project, path: str) -> Path:
    """A picture or clip of the project.

    Raises:
        Refusal: 403 if it lies outside, 404 if it is none.
    """
    file = project.inside(path, packaged=True)
    if file.suffix.lower() not in PICTURE_SUFFIXES | CLIP_SUFFIXES or not file.is_file():
        raise Refusal(404, f"There is no picture or clip {path!r}.")
    return file


def send_thumbnail(request: Request) -> Response:
    """A small picture of a file, of a clip its first frame: `?path=FILE&stamp=TEXT`; a larger one with `&large=1`."""
    file = media_file(project_of(request), request.query_params.get("path", ""))
    side = PAINTED_SIDE if "large" in request.query_params else THUMBNAIL_SIDE
    try:
        with _decoding:
            frame = next(iter(frames_of(file, 1, 1.0, probe_clip(file) if is_clip(file) else None)))
            return Response(webp(frame, side), media_type="image/webp", headers=FOR_EVER)
    except MediaError as error:
        raise Refusal(422, f"{file.name} {error}.") from None


def send_original(request: Request) -> Response:
    """A picture or clip itself; ranges are answered, which players need: `?path=FILE`."""
    return FileResponse(media_file(project_of(request), request.query_params.get("path", "")))
