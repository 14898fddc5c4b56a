"""Requests about the files of a drop: showing, captioning, leaving out and discarding them.

A file that is left out is named in a list in its folder, which training reads. It is never deleted.
Only a folder that the page itself filled, and that no run uses yet, can be discarded.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.captions import editing
from simpletuner.annexes.captions.editing import ChangedMeanwhileError
from simpletuner.annexes.page.new.drop_files import LEFT_OUT, DroppedFiles, dropped_files
from simpletuner.annexes.page.new.drop_folder import LEDGER, is_new, strangers_in
from simpletuner.annexes.page.new.start_card import answered, media_in
from simpletuner.annexes.page.project import Project, Refusal, problems_json, project_of
from simpletuner.annexes.start.media_folder import EXCLUDED, MediaFolder
from simpletuner.config.datasets import DatasetConfig
from simpletuner.errors import Problem, shorten

PAGE = 60  # files in an answer
LOOK_SECONDS = 1.5  # spent on decoding in a request


def show_drop(request: Request, body: dict[str, Any]) -> Response:
    """A page of the files, and the number of files with each fault.

    The body is `{"folder", "kind", "from"}` with the answers so far. Files are looked at for one or
    two seconds, those of the page first; the request is repeated until `looked` is `all`.
    """
    project = project_of(request)
    start = _whole_number(body, "from")
    kind = str(body.get("kind") or "")
    files = _files(project, body, start=start)
    names = files.of_kind(kind)
    content = {
        "files": [files.shown(project, name) for name in names[start : start + PAGE]],
        "found": len(names),
        "counts": files.counts(),
        "looked": len(files.looks),
        "all": len(files.names),
    }
    return JSONResponse(content)


def _whole_number(body: dict[str, Any], key: str) -> int:
    """A number in a request, at least 0.

    Raises:
        Refusal: 400 if it is not a whole number.
    """
    number = body.get(key, 0)
    if not isinstance(number, int) or number < 0:
        raise Refusal(400, [Problem(key, "must be a whole number, 0 or more.")])
    return number


def _files(
    project: Project, body: dict[str, Any], *, start: int = 0, seconds: float = LOOK_SECONDS
) -> DroppedFiles:
    """The files of the folder in a request, those of a page first."""
    media = media_in(project, body)
    first = sorted((*media.files.files, *media.excluded))[start : start + PAGE]
    return dropped_files(project, media, answered(project, media, body), first, seconds)


def put_out(request: Request, body: dict[str, Any]) -> Response:
    """Leave files out of training, or take them in again.

    The body is `{"folder", "out"}` with the names of `files` or a `kind` of fault.

    Raises:
        Refusal: 404 for a file that the folder does not have, 409 for a kind before all files have
            been looked at.
    """
    project = project_of(request)
    names = body.get("files")
    if isinstance(names, list):
        files = _files(project, body, seconds=0)
    else:
        files = _files(project, body)
        if not files.is_complete:
            raise Refusal(409, "Not all files have been looked at yet.")
        names = files.of_kind(str(body.get("kind") or LEFT_OUT))
    unknown = {*map(str, names)} - {*files.names}
    if unknown:
        raise Refusal(404, f"The folder has no file {sorted(unknown)[0]!r}.")
    by_folder: dict[Path, set[str]] = defaultdict(set)
    for name in names:
        folder, inner = dataset_folder(files.media, name)
        by_folder[folder].add(inner)
    for folder, inner_names in by_folder.items():
        config = DatasetConfig(id="files", instance_data_dir=str(folder))
        path = project.inside(folder / EXCLUDED)
        editing.exclude(config, inner_names, path, out=body.get("out") is True)
    return JSONResponse({"changed": len(names)})


def dataset_folder(media: MediaFolder, name: str) -> tuple[Path, str]:
    """The folder of the dataset that trains a file, and the file's name below it."""
    for concept in media.concepts:
        if name.startswith(f"{concept.folder}/"):
            return media.folder / concept.folder, name.removeprefix(f"{concept.folder}/")
    return media.folder, name


def put_words(request: Request, body: dict[str, Any]) -> Response:
    """Save a caption: `{"folder", "file", "text"}`; the tag of the replaced text is in If-Match.

    Raises:
        Refusal: 404 for an unknown file, 403 if its caption cannot be edited.
    """
    project = project_of(request)
    name = str(body.get("file"))
    files = _files(project, body, seconds=0)
    if name not in files.names:
        raise Refusal(404, f"The folder has no file {name!r}.")
    locked = files.shown(project, name)["locked"]
    if locked:
        raise Refusal(403, locked)
    seen = request.headers.get("if-match", "").strip('"')
    text = str(body.get("text", ""))
    try:
        editing.write_caption(project.inside(files.caption_file(name)), text, seen)
    except ChangedMeanwhileError as error:
        current = files.shown(project, name)
        problems = problems_json([Problem("", str(error))])
        return JSONResponse({"problems": problems, "file": current}, 412)
    return JSONResponse({"file": _files(project, body, seconds=0).shown(project, name)})


def discard(request: Request, body: dict[str, Any]) -> Response:
    """Delete the copies that were dropped into a folder: `{"folder"}`.

    Raises:
        Refusal: 409 if a run may use them, or if other files lie there.
    """
    folder = project_of(request).inside(str(body.get("folder") or "."))
    if not is_new(folder):
        raise Refusal(409, f"{folder.name} was not just dropped here, so it is kept.")
    strangers = strangers_in(folder)
    if strangers:
        raise Refusal(409, f"{folder.name} also holds {shorten(strangers, 3)}, so it is kept.")
    # First out of sight, so that a run cannot begin with half of the files.
    hidden = folder.with_name(f"{LEDGER}-{folder.name}")
    folder.rename(hidden)
    shutil.rmtree(hidden)
    return JSONResponse({})
