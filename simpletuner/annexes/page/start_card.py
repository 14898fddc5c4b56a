"""The start card: uploads of dropped files, and the questions and configs of `simpletuner start`.

Files are uploaded one per request and streamed into a folder of the project's `datasets`. A config
is written only when all questions are answered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from anyio import from_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.captions.editing import BACKUP
from simpletuner.annexes.guide import about_example
from simpletuner.annexes.page import files
from simpletuner.annexes.page.control import DISCONNECTED
from simpletuner.annexes.page.project import Project, Refusal, project_of
from simpletuner.annexes.page.receive import (
    LARGEST_FILE,
    MOST_FILES,
    USED,
    ZIP,
    check_space,
    receive,
    safe_name,
)
from simpletuner.annexes.start.media_folder import MediaFolder, read_media_folder
from simpletuner.annexes.start.new_run import FILES, NewRun, run_name
from simpletuner.annexes.start.recipe import PURPOSES, RECIPES, TRIGGER, find_models
from simpletuner.atomic import unused_path, writing_to
from simpletuner.config.sources import example_names
from simpletuner.data.file_names import UNREAD_CLIPS, UNREAD_PICTURES
from simpletuner.errors import Problem, not_one_of

FOLDER = Path("datasets")  # of uploads
IDLE_SECONDS = 30.0  # timeout without data; an upload may take hours
MOST_SKIPPED = 20  # skipped files that are listed
# Translations of the card's texts, by language and English text.
LANGUAGES = Path(__file__).parent / "static" / "languages.json"


def card_content(accepted: str) -> dict[str, Any]:
    """Template values of the empty card, in the browser's first language that has a translation."""
    tables = json.loads(LANGUAGES.read_text(encoding="utf-8"))
    language = choose_language(accepted, {*tables, "en"})
    words = tables.get(language, {})

    def say(text: str, **values: object) -> str:
        return words.get(text, text).format(**values)

    limits = {
        "suffixes": sorted({*USED, ZIP}),
        "unread": sorted(UNREAD_PICTURES | UNREAD_CLIPS),
        "files": MOST_FILES,
        "bytes": LARGEST_FILE,
    }
    demos_first = sorted(example_names(), key=lambda name: not name.startswith("demo"))
    return {
        "language": language,
        "words": words,
        "say": say,
        "limits": limits,
        "trigger": TRIGGER,
        "examples": {name: about_example(name) for name in demos_first},
    }


def choose_language(accepted: str, languages: set[str]) -> str:
    """The first language of an `Accept-Language` header that is available; else English."""
    for wish in accepted.split(","):
        tag = wish.partition(";")[0]  # without its weight, as in `de-CH;q=0.9`
        language = tag.partition("-")[0].strip().lower()
        if language in languages:
            return language
    return "en"


def look(request: Request, body: dict[str, Any]) -> Response:
    """The content of a folder, its possible purposes, and a draft for `POST /api/plan` per model.

    The body contains the `folder`, and the answers so far: `purpose`, `trigger` and `name`.
    """
    project = project_of(request)
    media = media_in(project, body)
    models = [*find_models(media.kind)]
    runs = {model: answered(project, media, {**body, "model": model}) for model in models}
    proposed = runs[models[0]]
    drafts: dict[str, Any] = {}
    for model, run in runs.items():
        # Without keys of files beside the config, which a draft's plan does not have.
        values = {key: value for key, value in run.config().items() if key not in FILES}
        drafts[model] = {"config": run.name, "values": values, "datasets": run.datasets()}
    ignored = [
        {"file": file, "reason": reason}
        for file, (_, reason) in media.files.ignored.items()
        if not BACKUP.fullmatch(file)
    ]
    content = {
        "folder": files.shown(project, media.folder),
        "name": proposed.name,
        "described": media.describe(),
        "notes": [*media.notes(), *proposed.fit.notes()],
        "files": len(media.captioned) + len(media.uncaptioned),
        "uncaptioned": len(media.uncaptioned),
        "held_out": proposed.held_out,
        "skipped": ignored[:MOST_SKIPPED],
        "more_skipped": len(ignored[MOST_SKIPPED:]),
        "purposes": {purpose: RECIPES[purpose].title for purpose in PURPOSES[media.kind]},
        "purpose": proposed.purpose,
        "drafts": drafts,
    }
    return JSONResponse(content)


def write(request: Request, body: dict[str, Any]) -> Response:
    """Write the config of a run as `simpletuner start` does.

    The body is `{"folder", "purpose", "trigger", "model", "name"}`.

    Raises:
        Refusal: 409 if the config exists, 422 for invalid answers.
    """
    project = project_of(request)
    run = answered(project, media_in(project, body), body)
    project.new_config(run.name)
    run.save()  # of two concurrent requests, one fails
    return JSONResponse({"config": run.name}, 201)


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
    free_name = unused_path(project.folder / "config" / run_name(media.folder)).name
    trigger = ""
    if purpose != "edit":
        trigger = str(body.get("trigger") or media.words or TRIGGER).strip()
    # Files of a concept without captions are captioned by its words.
    has_captions = bool(media.captioned) and not media.concepts
    return NewRun(
        name=str(body.get("name") or free_name).strip(),
        media=media,
        purpose=purpose,
        trigger=trigger,
        example=models[model],
        captions=body.get("captions") is True or has_captions,
        root=project.folder,
    )


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
    name = safe_name(str(body.get("name", ""))) or "my-files"
    path = project_of(request).inside(FOLDER) / run_name(Path(name))
    while True:
        folder = unused_path(path)
        with writing_to(folder), suppress(FileExistsError):  # created by a concurrent request
            folder.mkdir(parents=True)
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
