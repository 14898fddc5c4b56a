"""The files of a dataset on the page: viewing, captioning, masking, excluding and including.

Masks are PNG files in a dataset of masks beside the pictures. Training needs a mask for every file, so the first
painted mask adds white masks for all other files, which are still learned whole. Only a client that has read the
current mask can replace it.
"""

from __future__ import annotations

import base64
import binascii
import io
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response

from simpletuner.annexes.captions import library as captions
from simpletuner.annexes.captions.library import LINKED, ChangedMeanwhileError, Library, inspected, stamp_of
from simpletuner.annexes.page.control import Runs
from simpletuner.annexes.page.files import Configuration, add_dataset, shown, writable
from simpletuner.annexes.page.jobs import queue_of
from simpletuner.annexes.page.live import runs_of
from simpletuner.annexes.page.project import Project, Refusal, chosen_by, problems_json, project_of
from simpletuner.annexes.page.queue import RUNNING, WAITING, Job
from simpletuner.annexes.report.html import THUMBNAIL_SIDE, render, webp
from simpletuner.annexes.runs.console import PROMPT, printed
from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.runs.state import ACTIVE
from simpletuner.atomic import write_atomically
from simpletuner.config.datasets import DatasetConfig, read_datasets
from simpletuner.config.sources import EXAMPLES
from simpletuner.config.types import Size
from simpletuner.data.clips import CLIP_SUFFIXES, frames_of, is_clip, probe_clip
from simpletuner.data.dataset import is_stretched
from simpletuner.data.discovery import is_readable, scan
from simpletuner.data.entries import DataContext
from simpletuner.data.file_names import composed, index_partners, pair_key, partners_of
from simpletuner.data.files import MediaError
from simpletuner.data.pictures import PICTURE_SUFFIXES, decode
from simpletuner.distributed.world import usable_cores
from simpletuner.errors import Problem, Problems, UserError
from simpletuner.planning.build import settle_task
from simpletuner.planning.environment import why_not_writable

PAGE = 60
PAINTED_SIDE = 1024  # of the picture under a painted mask; a latent position averages 8x8 pixels of it
FIRST = 5  # changes shown in a preview
FOR_EVER = {"Cache-Control": "private, max-age=31536000, immutable"}  # the URL changes with the file
_decoding = threading.Semaphore(usable_cores())  # decoding a picture may take hundreds of megabytes


def datasets_in(saved: Configuration) -> tuple[list[DatasetConfig], DataContext]:
    """The entries of a config's dataset file, with their context.

    Raises:
        Refusal: 422 if a path leads out of the project.
    """
    judgement, outside, _ = saved.judge()
    if outside:
        raise Refusal(422, outside)
    names = {"model_family": judgement.spec.name, "output_dir": judgement.config.run.output_dir}
    flavour, entries = settle_task(judgement.flavour, read_datasets(saved.datasets, Problems(), placeholders=names))
    return entries, DataContext.of(judgement.config, judgement.spec, flavour.task)


def opened(request: Request, asked: Mapping[str, Any]) -> Library:
    """The saved dataset that a request names by `config` and `dataset`.

    Raises:
        Refusal: 404 if the dataset does not exist, 422 or 403 if its path leads out of the project.
    """
    project, name = project_of(request), str(asked.get("dataset"))
    entries, context = datasets_in(Configuration.saved(project, str(asked.get("config") or "config")))
    for entry in map(context.fill, entries):
        if entry.id == name and entry.instance_data_dir:
            folder = project.inside(entry.instance_data_dir, packaged=True)
            if entry.type == "local" and not is_readable(folder):
                raise Refusal(404, f"{str(folder)!r} is not a folder, or cannot be read.")
            entry = entry.model_copy(update={"instance_data_dir": str(folder)})
            is_packaged = folder.is_relative_to(EXAMPLES)
            return Library(entry, entries, context, is_packaged, project.may_show)
    raise Refusal(404, f"The saved config has no dataset {name!r} with a folder; save your changes first.")


def show_files(request: Request) -> Response:
    """A page of the files of a dataset, as HTML: `?config=NAME&dataset=ID&words=TEXT&only=KIND&page=N`."""
    asked, library = request.query_params, opened(request, request.query_params)
    words, only, number = asked.get("words", ""), asked.get("only", ""), asked.get("page", "1")
    names, missed = library.find(words, only)
    pages = max(1, -(-len(names) // PAGE))
    page = min(max(1, int(number[:9]) if number.isdecimal() else 1), pages)
    files = library.show(names[PAGE * (page - 1) : PAGE * page])
    shown = {"words": words, "only": only, "found": len(names), "missed": missed, "page": page, "pages": pages}
    return HTMLResponse(render("page/library.html.jinja", part="all", library=library, files=files, **shown))


def card_html(library: Library, name: str) -> str:
    """The card of a file, as HTML."""
    return render("page/library.html.jinja", part="files", library=library, files=library.show([name]))


def name_in(library: Library, asked: Mapping[str, Any]) -> str:
    """The name of the file in a request.

    Raises:
        Refusal: 404 if the dataset has no such file.
    """
    if (name := asked.get("file")) not in library.listing.files:
        raise Refusal(404, f"{name!r} is not a file of {library.entry.id}.")
    return str(name)


def editable(request: Request, asked: Mapping[str, Any]) -> Library:
    """The dataset that a request names, if its captions can be edited.

    Raises:
        Refusal: as `opened`, and 403 if captions are read-only.
    """
    library = opened(request, asked)
    if library.locked:
        raise Refusal(403, library.locked)
    return library


def put_caption(request: Request, body: dict[str, Any]) -> Response:
    """Save a caption: `{"config", "dataset", "file", "text"}`, with the tag of the replaced text in If-Match."""
    library = editable(request, body)
    name, seen = name_in(library, body), request.headers.get("if-match", "").strip('"')
    path = project_of(request).inside(library.caption_path(name))
    try:
        captions.write_caption(path, str(body.get("text", "")), seen)
    except ChangedMeanwhileError as error:
        return changed_meanwhile(library, name, error)
    return after_change(request, body)


def changed_meanwhile(library: Library, name: str, error: ChangedMeanwhileError) -> Response:
    """The response to a change of a stale version, with a card of the current version."""
    return JSONResponse({"problems": problems_json([Problem("", str(error))]), "card": card_html(library, name)}, 412)


def put_excluded(request: Request, body: dict[str, Any]) -> Response:
    """Exclude or include a file: `{"config", "dataset", "file", "out"}`."""
    library = opened(request, body)
    if library.fixed:
        raise Refusal(403, library.fixed)
    path = project_of(request).inside(library.root / library.entry.exclude_files)
    captions.exclude(library.entry, {name_in(library, body)}, path, out=body.get("out") is True)
    filled = mask_included(request, body)
    notes = [f"It got a white mask ({filled}), so it is learned whole."] if filled else []
    return after_change(request, body, *notes)


def mask_included(request: Request, body: Mapping[str, Any]) -> int:
    """Write white masks for files that are used by now and have none; returns their number."""
    library = opened(request, body)
    if library.masks is None or library.unpaintable:
        return 0
    folder = project_of(request).inside(library.masks.instance_data_dir or "")
    with _painting:
        return fill_white(library, folder, without_mask(library, folder, masks_in(folder)))


def after_change(request: Request, body: Mapping[str, Any], *notes: str, is_mask: bool = False) -> Response:
    """The card of a changed file, with notes: when training uses the change, and other files changed with it."""
    library = opened(request, body)
    note = when_used(request, library, is_mask=is_mask)
    answer = {"card": card_html(library, body["file"]), "note": " ".join([note, *notes]), "others": bool(notes)}
    return JSONResponse(answer)


def when_used(request: Request, library: Library, *, is_mask: bool = False) -> str:
    """A note that says when training begins to use a change."""
    runs = runs_of(request)
    busy = [run.name for run in runs.all() if run.status()["status"] in ACTIVE and library.root in roots_of(runs, run)]
    if not busy:
        return "Saved. Training will use it from its next start."
    # Captions were encoded before the first step; masks are not cached.
    until = "may use it at once" if is_mask else "keeps using the captions read at its start until it is restarted"
    return f"Saved. {', '.join(busy)} {until}."


def roots_of(runs: Runs, run: Run) -> Iterator[Path]:
    """The folders of a run's datasets; none if its config is unknown or unreadable."""
    with suppress(UserError, OSError):
        entries, _ = datasets_in(Configuration.saved(runs.project, run.config, run.settings))
        yield from (runs.project.inside(each.instance_data_dir) for each in entries if each.instance_data_dir)


def edit(request: Request, body: dict[str, Any]) -> Response:
    """Change all captions: `{"config", "dataset"}` with `find` and `replace`, `trigger`, or `undo`.

    The response is a preview. To apply the changes, repeat the request with its `digest` as `seen`.
    """
    library = editable(request, body)
    files = dict[str, Path]()
    linked = list[str]()
    for name in sorted({*library.listing.captions.values()}):
        path = library.root / name
        if library.may_show(path):
            files[name] = path.resolve()
        else:
            linked.append(name)
    changes, unreadable = captions.changes_of(files, edit_in(library, body))
    digest = captions.digest_of(changes)
    preview = {
        "count": len(changes),
        "first": [{"name": each.name, "before": each.before, "after": each.after} for each in changes[:FIRST]],
        "emptied": sum(not each.after for each in changes),
        "unreadable": unreadable[:FIRST],
        "linked": linked[:FIRST],
        "digest": digest,
    }
    if body.get("seen") is None:
        return JSONResponse(preview)
    if body["seen"] != digest:
        message = "The captions have changed since the preview. Nothing was saved."
        return JSONResponse({**preview, "problems": problems_json([Problem("", message)])}, 412)
    backup = captions.apply(changes, library.root)
    return JSONResponse({"count": len(changes), "backup": backup, "note": when_used(request, library)})


def edit_in(library: Library, body: Mapping[str, Any]) -> captions.Edit:
    """The edit in a request.

    Raises:
        Refusal: 422 if the request contains no edit.
    """
    find, trigger, undo = (str(body.get(key) or "") for key in ("find", "trigger", "undo"))
    if find:
        return captions.replacing(find, str(body.get("replace") or ""))
    if trigger.strip():
        return captions.prefixing(trigger, whole=library.entry.disable_multiline_split)
    if not captions.BACKUP.fullmatch(undo):
        raise Refusal(422, "Enter a text to find, or a trigger word.")
    report = Problems()
    edit = captions.restoring(library.root / undo, report)
    report.raise_if_fatal()
    return edit


def start_captioning(request: Request, body: dict[str, Any]) -> Response:
    """Queue a job that captions files without captions: `{"config", "dataset", "style", "trigger"}`."""
    library, project, name = editable(request, body), project_of(request), str(body.get("config") or "config")
    if (job := captioning_job(request)) and job.state in (WAITING, RUNNING):
        raise Refusal(409, "A captioning job is already running or queued.")
    folder = project.inside(library.context.output_dir)
    if problem := why_not_writable("output_dir", folder):
        raise Refusal(403, [problem])
    folder.mkdir(parents=True, exist_ok=True)
    options = [f"--{key}={body[key]}" for key in ("dataset", "style", "trigger") if body.get(key)]
    options.append(chosen_by(name, project.config_file(name)))
    queue_of(request).add("caption", str(folder), config=name, options=options)
    return JSONResponse({}, 202)


def captioning_state(request: Request) -> Response:
    """The state of the captioning job: its id, dataset and output."""
    if (job := captioning_job(request)) is None:
        return JSONResponse({"running": False})
    message = job.message or "Waiting in the queue on the tab Run."
    if job.state == RUNNING:
        message = printed(job.log).rpartition(PROMPT)[2].partition("\n")[2].strip()
    dataset, is_running = job.options[0].removeprefix("--dataset="), job.state in (WAITING, RUNNING)
    return JSONResponse({"job": job.id, "dataset": dataset, "running": is_running, "message": message})


def captioning_job(request: Request) -> Job | None:
    """The newest job that writes captions."""
    captioning = [job for job in queue_of(request).read() if job.command == "caption"]
    return captioning[-1] if captioning else None


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
    """A thumbnail of a picture, or of a clip's first frame: `?path=FILE&stamp=TEXT`; larger with `&large=1`."""
    file = media_file(project_of(request), request.query_params.get("path", ""))
    side = PAINTED_SIDE if "large" in request.query_params else THUMBNAIL_SIDE
    try:
        with _decoding:
            frame = next(iter(frames_of(file, 1, 1.0, probe_clip(file) if is_clip(file) else None)))
            return Response(webp(frame, side), media_type="image/webp", headers=FOR_EVER)
    except MediaError as error:
        raise Refusal(422, f"{file.name} {error}.") from None


def send_original(request: Request) -> Response:
    """The original picture or clip, with support for ranges, which players need: `?path=FILE`."""
    return FileResponse(media_file(project_of(request), request.query_params.get("path", "")))


DATA_URI = "data:image/png;base64,"
WHITE_SIDE = 128  # pixels of the shorter side of a white mask, enough to keep the aspect ratio of its file
MOST_FILLED = 5000
# Held between the comparison of a mask with If-Match and its replacement.
_painting = threading.Lock()


def put_mask(request: Request, body: dict[str, Any]) -> Response:
    """Save a mask: `{"config", "dataset", "file", "mask"}`, a PNG file as a data URI, with the stamp of the replaced
    mask in If-Match. The first mask adds a dataset of masks to the dataset file."""
    library, project = opened(request, body), project_of(request)
    if library.unpaintable:
        raise Refusal(403, library.unpaintable)
    name, seen = name_in(library, body), request.headers.get("if-match", "").strip('"')
    saved = Configuration.saved(project, str(body.get("config") or "config"))
    if library.masks is None:
        writable(project, saved.datasets)  # raises before a mask is written that cannot be referenced
    entry = library.masks.model_dump() if library.masks else entry_of_masks(project, library)
    try:
        folder = project.inside(entry["instance_data_dir"])
        filled = write_mask(library, folder, name, str(body.get("mask", "")), seen)
    except ChangedMeanwhileError as error:
        return changed_meanwhile(library, name, error)
    notes = [f"Other files got white masks ({filled}), so they are still learned whole."] if filled else []
    if library.masks is None:
        add_dataset(saved, entry)
        notes.append(f"{shown(project, saved.datasets)} has a new dataset, {entry['id']}.")
    return after_change(request, body, *notes, is_mask=True)


def entry_of_masks(project: Project, library: Library) -> dict[str, Any]:
    """A new entry for the masks of a dataset."""
    ids, name = {entry.id for entry in library.entries}, f"{library.entry.id}-masks"
    while name in ids:
        name += "-2"
    folder = shown(project, project.inside(library.root.with_name(f"{library.root.name}_masks")))
    kind = {"type": "local", "dataset_type": "conditioning", "conditioning_type": "mask"}
    return {"id": name, **kind, "source_dataset_id": library.entry.id, "instance_data_dir": folder}


def write_mask(library: Library, folder: Path, name: str, sent: str, seen: str) -> int:
    """Write the mask of a file, and white masks for all files without a mask; returns the number of white masks.

    Args:
        folder: the folder of the masks.
        sent: a PNG file as a data URI.
        seen: the stamp of the replaced mask; empty if there was none.

    Raises:
        ChangedMeanwhileError: the mask has changed since.
        UserError: the mask does not match the file, or too many files have no mask.
    """
    facts = inspected(library.root, [name])[name]
    if facts.problem is not None:
        raise UserError(f"{name} {facts.problem}.")
    content = _as_png(_received(sent, facts.picture_size))
    with _painting:
        present = masks_in(folder)
        before = mask_of(name, present)
        path = mask_path(library, folder, name, before)
        if path.suffix.lower() != ".png":
            raise UserError(f"{path} is a mask in another format: move it away, or convert it to PNG.")
        if (stamp_of(inspected(folder, [before])[before]) if before else "") != seen:
            raise ChangedMeanwhileError(f"{path.name} has changed since it was opened. It was not overwritten.")
        bare = without_mask(library, folder, [*present, path.relative_to(folder).as_posix()])
        write_atomically(path, content)
        return fill_white(library, folder, bare)


def masks_in(folder: Path) -> Sequence[str]:
    """The names of the masks in a folder."""
    return scan(folder, PICTURE_SUFFIXES | CLIP_SUFFIXES).files if folder.is_dir() else ()


def mask_of(name: str, masks: Iterable[str]) -> str:
    """The mask of a file, by the rule of training; empty if it has none."""
    partners = partners_of(name, index_partners(masks))
    return partners[0] if partners else ""


def mask_name(library: Library, name: str, before: str = "") -> str:
    """The name of a file's mask: after the whole file name where other files have its stem, as `cat.jpg.png`.

    Args:
        before: the present mask, which is replaced unless it is also that of another file.
    """
    is_shared = library.files_by_pair_key[pair_key(name)] > 1
    if before and (not is_shared or composed(name) in (composed(before), pair_key(before))):
        return before
    return f"{name}.png" if is_shared else str(PurePosixPath(name).with_suffix(".png"))


def mask_path(library: Library, folder: Path, name: str, before: str = "") -> Path:
    """The path of a file's mask; see `mask_name`.

    Raises:
        UserError: it is behind a link out of the project.
    """
    path = folder / mask_name(library, name, before)
    if not library.may_show(path):
        raise UserError(f"{path} {LINKED}.")
    return path


def without_mask(library: Library, folder: Path, masks: Sequence[str]) -> list[str]:
    """The used files that have no mask.

    Raises:
        UserError: too many files have none, or one would be written behind a link out of the project.
    """
    index = index_partners(masks)
    used = (file for file in library.listing.files if file not in library.excluded)
    bare = [file for file in used if not partners_of(file, index)]
    if len(bare) > MOST_FILLED:
        message = f"{len(bare):,} files have no mask in {folder}, and every file needs one. Add masks first"
        raise UserError(f"{message}: the page creates at most {MOST_FILLED:,} white masks.")
    for file in bare:
        mask_path(library, folder, file)
    return bare


def fill_white(library: Library, folder: Path, files: Sequence[str]) -> int:
    """Write white masks, with which files are learned whole; returns their number."""
    facts = inspected(library.root, files)
    sizes = {file: fact.picture_size for file, fact in facts.items() if fact.problem is None}
    for file, size in sizes.items():
        factor = max(1, min(size) // WHITE_SIDE)
        white = Image.new("L", (size[0] // factor, size[1] // factor), 255)
        write_atomically(folder / mask_name(library, file), _as_png(white), durable=False)
    return len(sizes)


def _received(sent: str, size: Size) -> Image.Image:
    """Decode the mask in a data URI, for a file of a size.

    Raises:
        UserError: the mask is not a picture, has another aspect ratio, or is black.
    """
    try:
        mask = decode(base64.b64decode(sent.removeprefix(DATA_URI), validate=True), "black").convert("L")
    except binascii.Error:
        raise UserError("The mask is not sent as a data URI of a PNG file.") from None
    except MediaError as error:
        raise UserError(f"The mask {error}.") from None
    if is_stretched(size, mask.size):
        painted, original = ("x".join(map(str, sides)) for sides in (mask.size, size))
        raise UserError(f"The mask is {painted} and its file {original}: the aspect ratios differ.")
    if mask.getbbox() is None:
        raise UserError("The mask is black: nothing would be learned from the file. Exclude the file instead.")
    return mask


def _as_png(mask: Image.Image) -> bytes:
    buffer = io.BytesIO()
    mask.save(buffer, "PNG")
    return buffer.getvalue()
