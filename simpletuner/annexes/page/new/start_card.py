"""The start card: uploads of dropped files, and the questions and configs of `simpletuner start`.

Files are uploaded one per request and streamed into a folder of the project's `datasets`. A config
is written only when all questions are answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from anyio import from_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.captions.editing import BACKUP
from simpletuner.annexes.guide import examples_by_group
from simpletuner.annexes.languages.say import words_of_scripts
from simpletuner.annexes.page.new.drop_folder import (
    FOLDER,
    UNNAMED,
    begin_ledger,
    end_ledger,
    is_new,
    is_unnamed,
    note_dropped,
    settle,
)
from simpletuner.annexes.page.new.receive import (
    LARGEST_FILE,
    MOST_FILES,
    USED,
    ZIP,
    check_space,
    receive,
    safe_name,
)
from simpletuner.annexes.page.project import Project, Refusal, project_of, read_object
from simpletuner.annexes.page.runs import control
from simpletuner.annexes.page.runs.control import DISCONNECTED
from simpletuner.annexes.page.settings import files
from simpletuner.annexes.report.html import render
from simpletuner.annexes.start.left_out import LeftOut, find_left_out
from simpletuner.annexes.start.media_folder import (
    EXCLUDED,
    NOT_CHOSEN,
    MediaFolder,
    read_media_folder,
)
from simpletuner.annexes.start.new_run import FILES, NewRun, run_name
from simpletuner.annexes.start.recipe import (
    PURPOSES,
    RECIPES,
    TITLES,
    TRIGGER,
    find_models,
    writes_captions,
)
from simpletuner.annexes.start.sizes import SMALLEST_SIZE
from simpletuner.annexes.start.trigger import name_from, split_trigger, why_incomplete
from simpletuner.atomic import unused_path, writing_to
from simpletuner.config.device import CARD_NAMES
from simpletuner.data.file_names import UNREAD_CLIPS, UNREAD_PICTURES
from simpletuner.errors import Problem, UserError, counted, not_one_of

IDLE_SECONDS = 30.0  # timeout without data; an upload may take hours
LARGEST_SIZE = 2048  # resolution that the card can ask for
MOST_SKIPPED = 20  # skipped files that are listed


def show_new(request: Request) -> Response:
    """The place "New", with the empty card."""
    limits = {
        "suffixes": sorted({*USED, ZIP}),
        "unread": sorted(UNREAD_PICTURES | UNREAD_CLIPS),
        "files": MOST_FILES,
        "bytes": LARGEST_FILE,
    }
    html = render(
        "page/new/start.html.jinja",
        words=words_of_scripts("start"),
        limits=limits,
        trigger=TRIGGER,
        examples=examples_by_group(),
        cards=CARD_NAMES,
    )
    return HTMLResponse(html)


def look(request: Request, body: dict[str, Any]) -> Response:
    """The content of a folder, and its possible purposes and models.

    The body contains the `folder`, and the answers so far: `purpose`, `trigger` and `name`.
    """
    project = project_of(request)
    media = media_in(project, body)
    proposed = answered(project, media, body)
    models = {
        model: {"title": TITLES[example], "captions": writes_captions(example)}
        for model, example in find_models(media.kind).items()
    }
    skipped = skipped_in(media)
    content = {
        "folder": files.shown(project, media.folder),
        "name": proposed.name,
        "is_new": is_new(project.inside(str(body.get("folder") or "."))),
        "kind": media.kind,
        "described": media.describe(),
        "notes": [*media.notes(), *proposed.fit.page_notes()],
        "smaller": smaller_size(proposed),
        "size": size_in_words(proposed),
        "files": media.usable,
        "all": len(media.files.files) + len(media.excluded),
        "uncaptioned": len(media.uncaptioned),
        "held_out": proposed.held_out,
        "locked": media.captions.is_table,
        "skipped": skipped[:MOST_SKIPPED],
        "more_skipped": len(skipped[MOST_SKIPPED:]),
        "purposes": {purpose: RECIPES[purpose].title for purpose in PURPOSES[media.kind]},
        "purpose": proposed.purpose,
        "models": models,
    }
    return JSONResponse(content)


def skipped_in(media: MediaFolder) -> list[dict[str, str]]:
    """The files that are not used, other than those of systems and of the page."""
    skipped = []
    for file, (reason, explanation) in media.files.ignored.items():
        is_own = BACKUP.fullmatch(file) or file.rpartition("/")[2] == EXCLUDED
        if reason not in ("hidden", NOT_CHOSEN) and not is_own:
            skipped.append({"file": file, "reason": explanation})
    return skipped


def size_in_words(run: NewRun) -> str:
    """The size and length that are trained: `1024x1024`, `768x512, 61 frames (2.5 s)`."""
    size = f"{run.resolution}x{run.resolution}"
    if not run.media.holds_clips:
        return size
    frames = run.fit.frames
    seconds = frames / (run.spec.frame_rate or 1)
    return f"{size}, {counted(frames, 'frame')} ({seconds:.1f} s)"


def smaller_size(run: NewRun) -> int:
    """A resolution at which files that are left out as too small are trained; 0 for none."""
    fit = run.fit
    return fit.smallest if fit.small and fit.smallest < fit.resolution else 0


async def plan_proposed(request: Request) -> Response:
    """The plan of a proposed run, as `simpletuner plan --json` makes it of the written files.

    The body is that of `look` with a `model`.
    """
    body = await read_object(request)
    project = project_of(request)
    with TemporaryDirectory(prefix="simpletuner-start-") as folder:
        await run_in_threadpool(write_for_plan, project, body, Path(folder))
        paths = [f"{key}={folder}/{file}" for key, file in FILES.items()]
        command = [*control.PROGRAM, "plan", "--json", f"config_path={folder}/config.json", *paths]
        output, messages = await control.run_while_wanted(request, command, project.folder)
    return JSONResponse(control.document_in(output, messages, folder))


def write_for_plan(project: Project, body: dict[str, Any], folder: Path) -> None:
    """Write a proposed run to be planned; missing captions say nothing about the model."""
    run = answered(project, media_in(project, body), body)
    replace(run, captions=not run.media.uncaptioned).write(folder)


def write(request: Request, body: dict[str, Any]) -> Response:
    """Write the config of a run as `simpletuner start` does.

    The body is `{"folder", "purpose", "trigger", "model", "name"}`, `captions` to write missing
    captions before training, and `agreed` if many files may be left out.

    Raises:
        Refusal: 409 if the config exists, or if many files are left out and the user has not
            agreed; 422 for invalid answers.
    """
    project = project_of(request)
    media = media_in(project, body)
    run = answered(project, media, body)
    project.new_config(run.name)
    check_trigger(run, media)
    check_left_out(find_left_out(media, run), body)
    dropped = project.inside(str(body.get("folder") or "."))
    folder = settle(dropped, run.name)
    body = {**body, "folder": str(folder), "name": run.name}
    run = answered(project, media_in(project, body), body)
    try:
        run.save()  # of two concurrent requests, one fails
    except UserError:
        if folder != dropped:
            folder.rename(dropped)
        raise
    end_ledger(folder)
    written = {
        "config": run.name,
        "dataset": run.datasets()[0]["id"],
        # For written captions, which begin with these words unless the dataset prepends them.
        "trigger": run.phrase if run.captioned_as else "",
    }
    return JSONResponse(written, 201)


def check_trigger(run: NewRun, media: MediaFolder) -> None:
    """Refuse a subject of which the words do not say what it is.

    Raises:
        Refusal: 422.
    """
    if run.purpose == "edit":
        return  # it has no such words
    if media.words and run.trigger == media.words:
        return  # the words of a concept, as they were proposed
    reason = why_incomplete(run.purpose, run.trigger)
    if reason:
        raise Refusal(422, [Problem("trigger", reason)])


def check_left_out(left_out: LeftOut, body: dict[str, Any]) -> None:
    """Ask whether many files may be left out.

    Raises:
        Refusal: 422 if all would be, 409 if many would be and the user has not agreed.
    """
    if not left_out.trained:
        sentence = f"{left_out.describe()} Nothing would be trained."
        raise Refusal(422, [Problem("left_out", sentence)])
    if left_out.is_much and body.get("agreed") is not True:
        sentence = f"{left_out.describe()} {counted(left_out.trained, 'other')} would be trained."
        raise Refusal(409, [Problem("left_out", sentence)])


def media_in(project: Project, body: dict[str, Any]) -> MediaFolder:
    """The training files in the folder of a request.

    Raises:
        UserError: the folder contains no pictures or clips.
    """
    return read_media_folder(project.inside(str(body.get("folder") or ".")))


def answered(project: Project, media: MediaFolder, body: dict[str, Any]) -> NewRun:
    """The run described by the answers in a request; missing answers have the command's defaults.

    Raises:
        Refusal: 422 for a purpose or model that does not suit the files.
    """
    models = find_models(media.kind)
    purpose = one_of(PURPOSES[media.kind], body, "purpose")
    model = one_of([*models], body, "model")
    trigger = ""
    if purpose != "edit":
        trigger = str(body.get("trigger") or media.words).strip()
    captions_rest = body.get("captions") is True
    trained = media
    # Without captions, the words name all files; those of concepts name theirs.
    needs_captions = bool(media.captioned or media.sources) and not media.concepts
    if needs_captions and not captions_rest:
        trained = media.captioned_only()
    return NewRun(
        name=str(body.get("name") or proposed_name(project, body, trigger)).strip(),
        media=trained,
        purpose=purpose,
        trigger=trigger or ("" if purpose == "edit" else TRIGGER),
        example=models[model],
        captions=captions_rest or needs_captions,
        root=project.folder,
        settings=settings_in(body),
        writes_captions=captions_rest,
    )


def settings_in(body: dict[str, Any]) -> dict[str, Any]:
    """The settings in a request: a `resolution` for all files.

    Raises:
        Refusal: 422 if it is not a possible size.
    """
    resolution = body.get("resolution")
    if resolution is None:
        return {}
    if not isinstance(resolution, int) or not SMALLEST_SIZE <= resolution <= LARGEST_SIZE:
        message = f"must be a whole number from {SMALLEST_SIZE} to {LARGEST_SIZE}."
        raise Refusal(422, [Problem("resolution", message)])
    return {"resolution": resolution}


def proposed_name(project: Project, body: dict[str, Any], trigger: str) -> str:
    """A free name for a run: of its folder, or from its words if the folder has no name."""
    folder = project.inside(str(body.get("folder") or "."))
    name = run_name(folder)
    if is_unnamed(folder):
        word, _ = split_trigger(trigger)
        name = name_from(word) or name
    return unused_path(project.folder / "config" / name).name


def one_of(choices: Sequence[str], body: dict[str, Any], key: str) -> str:
    """The choice in a request, or else the first.

    Raises:
        Refusal: 422 if it is not one of the choices.
    """
    answer = str(body.get(key) or choices[0]).strip()
    if answer not in choices:
        raise Refusal(422, [Problem(key, not_one_of(answer, choices))])
    return answer


def new_folder(request: Request, body: dict[str, Any]) -> Response:
    """Create a folder for uploads: `{"name": NAME}`.

    The name is sanitised, and numbered if it exists.
    """
    name = safe_name(str(body.get("name", ""))) or UNNAMED
    path = project_of(request).inside(FOLDER) / run_name(Path(name))
    while True:
        folder = unused_path(path)
        with writing_to(folder), suppress(FileExistsError):  # created by a concurrent request
            folder.mkdir(parents=True)
            begin_ledger(folder)
            return JSONResponse({"name": folder.name, "folder": f"{FOLDER}/{folder.name}"}, 201)


async def put_file(request: Request) -> Response:
    """Save the body of a request as a file, or unpack it if it is a zip."""
    project = project_of(request)
    name = request.path_params["name"]
    folder = project.inside(FOLDER / name)
    if folder.parent != project.inside(FOLDER) or not folder.is_dir():
        raise Refusal(404, f"There is no folder {FOLDER}/{name}.")
    check_space(folder, int(request.headers.get("content-length", 0)))
    file = safe_name(request.path_params["file"])
    saved, skipped = await run_in_threadpool(receive, folder, file, chunks_of(request))
    await run_in_threadpool(note_dropped, folder, saved)
    reasons = [{"file": file, "reason": reason} for file, reason in skipped.items()]
    return JSONResponse({"saved": saved, "skipped": reasons}, 201)


def chunks_of(request: Request) -> Iterator[bytes]:
    """Iterate over the chunks of a body from a thread.

    Raises:
        Refusal: 408 after `IDLE_SECONDS` without data, 499 if the connection breaks.
    """
    stream = aiter(request.stream())

    async def next_part() -> bytes | None:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                return await anext(stream, None)
        except TimeoutError:
            raise Refusal(
                408, f"No data for {IDLE_SECONDS:g} s; the upload was discarded."
            ) from None
        except ClientDisconnect:
            raise Refusal(DISCONNECTED, "The connection broke.") from None

    while (part := from_thread.run(next_part)) is not None:
        yield part
