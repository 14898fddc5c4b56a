"""The files of a dataset on the page: viewing, captioning, masking, excluding and including."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from simpletuner.annexes.captions import editing
from simpletuner.annexes.captions.editing import ChangedMeanwhileError
from simpletuner.annexes.captions.library import Library, ShownFile
from simpletuner.annexes.captions.masks import fill_missing, write_mask
from simpletuner.annexes.page.project import Project, Refusal, problems_json, project_of
from simpletuner.annexes.page.runs.control import Runs
from simpletuner.annexes.page.runs.live import runs_of
from simpletuner.annexes.page.settings.files import Configuration, add_dataset, shown, writable
from simpletuner.annexes.report.html import THUMBNAIL_SIDE, render, webp
from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.runs.state import ACTIVE
from simpletuner.config.datasets import DatasetConfig, read_datasets
from simpletuner.config.sources import EXAMPLES
from simpletuner.data.clips import CLIP_SUFFIXES, frames_of, is_clip, probe_clip
from simpletuner.data.discovery import is_readable
from simpletuner.data.entries import DataContext
from simpletuner.data.files import MediaError
from simpletuner.data.pictures import PICTURE_SUFFIXES
from simpletuner.distributed.world import usable_cores
from simpletuner.errors import Problem, Problems, UserError
from simpletuner.planning.build import choose_task
from simpletuner.planning.entries import data_context

# Of the picture under a painted mask; a latent position averages 8x8 pixels of it.
PAINTED_SIDE = 1024
FIRST = 5  # changes shown in a preview
# For thumbnails, whose URL changes with the file.
CACHE_FOREVER = {"Cache-Control": "private, max-age=31536000, immutable"}
# Decoding a picture may take hundreds of megabytes.
_decoding = threading.Semaphore(usable_cores())


def datasets_in(saved: Configuration) -> tuple[list[DatasetConfig], DataContext]:
    """The entries of a config's dataset file, with their context.

    Raises:
        Refusal: 422 if a path leads out of the project.
    """
    judgement, outside, _ = saved.judge()
    if outside:
        raise Refusal(422, outside)
    names = {"model_family": judgement.spec.name, "output_dir": judgement.config.run.output_dir}
    entries = read_datasets(saved.datasets, Problems(), placeholders=names)
    flavour, entries = choose_task(judgement.flavour, entries)
    return entries, data_context(judgement.config, judgement.spec, flavour.task)


def open_dataset(request: Request, asked: Mapping[str, Any]) -> Library:
    """The saved dataset that a request names by `config` and `dataset`.

    Raises:
        Refusal: 404 if the dataset does not exist, 422 or 403 if its path leads out of the project.
    """
    project = project_of(request)
    name = str(asked.get("dataset"))
    saved = Configuration.saved(project, str(asked.get("config") or "config"))
    entries, context = datasets_in(saved)
    for entry in map(context.fill, entries):
        if entry.id == name and entry.instance_data_dir:
            folder = project.inside(entry.instance_data_dir, packaged=True)
            if entry.type == "local" and not is_readable(folder):
                raise Refusal(404, f"{str(folder)!r} is not a folder, or cannot be read.")
            entry = entry.model_copy(update={"instance_data_dir": str(folder)})
            is_packaged = folder.is_relative_to(EXAMPLES)
            return Library(entry, entries, context, is_packaged, project.may_show)
    raise Refusal(
        404, f"The saved config has no dataset {name!r} with a folder; save your changes first."
    )


def changed_file(library: Library, name: str) -> dict[str, Any]:
    """A file after a change: its card as HTML, and what the large view shows."""
    (file,) = library.show([name])
    card = render("page/settings/library.html.jinja", part="files", library=library, files=[file])
    return {"card": card, "file": written_file(library, file)}


def written_file(library: Library, file: ShownFile) -> dict[str, Any]:
    """A file as the large view shows it, with its caption."""
    return {
        "name": file.card.name,
        "title": file.name,
        "path": f"{library.root}/{file.card.name}",
        "stamp": file.stamp,
        "is_clip": file.is_clip,
        "text": file.text,
        "tag": file.tag,
        "locked": file.hidden or file.locked,
    }


def name_in(library: Library, asked: Mapping[str, Any]) -> str:
    """The name of the file in a request.

    Raises:
        Refusal: 404 if the dataset has no such file.
    """
    name = asked.get("file")
    if name not in library.listing.files:
        raise Refusal(404, f"{name!r} is not a file of {library.entry.id}.")
    return str(name)


def editable(request: Request, asked: Mapping[str, Any]) -> Library:
    """The dataset that a request names, if its captions can be edited.

    Raises:
        Refusal: as `open_dataset`, and 403 if captions are read-only.
    """
    library = open_dataset(request, asked)
    if library.locked:
        raise Refusal(403, library.locked)
    return library


def put_caption(request: Request, body: dict[str, Any]) -> Response:
    """Save a caption: `{"config", "dataset", "file", "text"}`.

    The tag of the replaced text is in If-Match.
    """
    library = editable(request, body)
    name = name_in(library, body)
    seen = request.headers.get("if-match", "").strip('"')
    path = project_of(request).inside(library.caption_path(name))
    try:
        editing.write_caption(path, str(body.get("text", "")), seen)
    except ChangedMeanwhileError as error:
        return changed_meanwhile(library, name, error)
    return after_change(request, body)


def changed_meanwhile(library: Library, name: str, error: ChangedMeanwhileError) -> Response:
    """The response to a change of a stale version, with a card of the current version."""
    return JSONResponse(
        {"problems": problems_json([Problem("", str(error))]), **changed_file(library, name)}, 412
    )


def put_excluded(request: Request, body: dict[str, Any]) -> Response:
    """Exclude or include a file: `{"config", "dataset", "file", "out"}`."""
    library = open_dataset(request, body)
    if library.fixed:
        raise Refusal(403, library.fixed)
    path = project_of(request).inside(library.root / library.entry.exclude_files)
    editing.exclude(library.entry, {name_in(library, body)}, path, out=body.get("out") is True)
    filled = mask_included(request, body)
    notes = [f"It got a white mask ({filled}), so it is learned whole."] if filled else []
    return after_change(request, body, *notes)


def mask_included(request: Request, body: Mapping[str, Any]) -> int:
    """Write white masks for files that are used by now and have none; returns their number."""
    library = open_dataset(request, body)
    if library.masks is None or library.unpaintable:
        return 0
    folder = project_of(request).inside(library.masks.instance_data_dir or "")
    return fill_missing(library, folder)


def after_change(
    request: Request, body: Mapping[str, Any], *notes: str, is_mask: bool = False
) -> Response:
    """The card of a changed file, with a note when training uses the change.

    Args:
        notes: about other files that changed with it.
    """
    library = open_dataset(request, body)
    note = when_used(request, library, is_mask=is_mask)
    answer = {
        **changed_file(library, body["file"]),
        "note": " ".join([note, *notes]),
        "others": bool(notes),
    }
    return JSONResponse(answer)


def when_used(request: Request, library: Library, *, is_mask: bool = False) -> str:
    """A note about the time at which training begins to use a change."""
    runs = runs_of(request)
    busy = []
    for run in runs.all():
        if run.status()["status"] in ACTIVE and library.root in roots_of(runs, run):
            busy.append(run.name)
    if not busy:
        return "Saved. Training will use it from its next start."
    # Captions were encoded before the first step; masks are not cached.
    effect = "keeps using the captions read at its start until it is restarted"
    if is_mask:
        effect = "may use it at once"
    return f"Saved. {', '.join(busy)} {effect}."


def roots_of(runs: Runs, run: Run) -> Iterator[Path]:
    """The folders of a run's datasets; none if its config is unknown or unreadable."""
    with suppress(UserError, OSError):
        entries, _ = datasets_in(Configuration.saved(runs.project, run.config, run.settings))
        for entry in entries:
            if entry.instance_data_dir:
                yield runs.project.inside(entry.instance_data_dir)


def edit(request: Request, body: dict[str, Any]) -> Response:
    """Change all captions: `{"config", "dataset"}` with `find` and `replace`, `trigger`, or `undo`.

    The response is a preview. To apply the changes, repeat the request with its `digest` as `seen`.
    """
    library = editable(request, body)
    files: dict[str, Path] = {}
    linked: list[str] = []
    for name in sorted({*library.listing.captions.values()}):
        path = library.root / name
        if library.may_show(path):
            files[name] = path.resolve()
        else:
            linked.append(name)
    changes, unreadable = editing.changes_of(files, edit_in(library, body))
    digest = editing.digest_of(changes)
    first = [
        {"name": change.name, "before": change.before, "after": change.after}
        for change in changes[:FIRST]
    ]
    preview = {
        "count": len(changes),
        "first": first,
        "emptied": len([change for change in changes if not change.after]),
        "unreadable": unreadable[:FIRST],
        "linked": linked[:FIRST],
        "digest": digest,
    }
    if body.get("seen") is None:
        return JSONResponse(preview)
    if body["seen"] != digest:
        message = "The captions have changed since the preview. Nothing was saved."
        return JSONResponse({**preview, "problems": problems_json([Problem("", message)])}, 412)
    backup = editing.apply(changes, library.root)
    note = when_used(request, library)
    return JSONResponse({"count": len(changes), "backup": backup, "note": note})


def edit_in(library: Library, body: Mapping[str, Any]) -> editing.Edit:
    """The edit in a request.

    Raises:
        Refusal: 422 if the request contains no edit.
    """
    find, trigger, undo = (str(body.get(key) or "") for key in ("find", "trigger", "undo"))
    if find:
        return editing.replacing(find, str(body.get("replace") or ""))
    if trigger.strip():
        return editing.prefixing(trigger, whole=library.entry.disable_multiline_split)
    if not editing.BACKUP.fullmatch(undo):
        raise Refusal(422, "Enter a text to find, or a trigger word.")
    report = Problems()
    edit = editing.restoring(library.root / undo, report)
    report.raise_if_fatal()
    return edit


def media_file(project: Project, path: str) -> Path:
    """The path of a picture or clip of the project.

    Raises:
        Refusal: 403 if it is outside the project, 404 if it is not a picture or clip.
    """
    file = project.inside(path, packaged=True)
    if file.suffix.lower() not in PICTURE_SUFFIXES | CLIP_SUFFIXES or not file.is_file():
        raise Refusal(404, f"There is no picture or clip {path!r}.")
    return file


def send_thumbnail(request: Request) -> Response:
    """A thumbnail of a picture, or of a clip's first frame: `?path=FILE&stamp=TEXT`.

    It is larger with `&large=1`.
    """
    file = media_file(project_of(request), request.query_params.get("path", ""))
    side = PAINTED_SIDE if "large" in request.query_params else THUMBNAIL_SIDE
    try:
        with _decoding:
            facts = probe_clip(file) if is_clip(file) else None
            frame = next(iter(frames_of(file, 1, 1.0, facts)))
            return Response(webp(frame, side), media_type="image/webp", headers=CACHE_FOREVER)
    except MediaError as error:
        raise Refusal(422, f"{file.name} {error}.") from None


def send_original(request: Request) -> Response:
    """The original picture or clip, with support for ranges, which players need: `?path=FILE`."""
    return FileResponse(media_file(project_of(request), request.query_params.get("path", "")))


def put_mask(request: Request, body: dict[str, Any]) -> Response:
    """Save a mask, a PNG file as a data URI: `{"config", "dataset", "file", "mask"}`.

    The stamp of the replaced mask is in If-Match. The first mask adds a dataset of masks to the
    dataset file.
    """
    library = open_dataset(request, body)
    project = project_of(request)
    if library.unpaintable:
        raise Refusal(403, library.unpaintable)
    name = name_in(library, body)
    seen = request.headers.get("if-match", "").strip('"')
    saved = Configuration.saved(project, str(body.get("config") or "config"))
    if library.masks is not None:
        entry = library.masks.model_dump()
    else:
        # Raises before a mask is written that the dataset file cannot name.
        writable(project, saved.datasets)
        entry = entry_of_masks(project, library)
    try:
        folder = project.inside(entry["instance_data_dir"])
        filled = write_mask(library, folder, name, str(body.get("mask", "")), seen)
    except ChangedMeanwhileError as error:
        return changed_meanwhile(library, name, error)
    notes = []
    if filled:
        notes.append(f"Other files got white masks ({filled}), so they are still learned whole.")
    if library.masks is None:
        add_dataset(saved, entry)
        notes.append(f"{shown(project, saved.datasets)} has a new dataset, {entry['id']}.")
    return after_change(request, body, *notes, is_mask=True)


def entry_of_masks(project: Project, library: Library) -> dict[str, Any]:
    """A new entry for the masks of a dataset."""
    ids = {entry.id for entry in library.entries}
    name = f"{library.entry.id}-masks"
    while name in ids:
        name += "-2"
    folder = project.inside(library.root.with_name(f"{library.root.name}_masks"))
    return {
        "id": name,
        "type": "local",
        "dataset_type": "conditioning",
        "conditioning_type": "mask",
        "source_dataset_id": library.entry.id,
        "instance_data_dir": shown(project, folder),
    }
