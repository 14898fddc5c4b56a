"""The start card: uploads of dropped files, and the questions and configs of `simpletuner start`.

Files are uploaded one per request and streamed into a folder of the project's `datasets`. A config is written only when
all questions are answered.
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

from simpletuner.annexes.captions.library import BACKUP
from simpletuner.annexes.guide import about_example
from simpletuner.annexes.page import files
from simpletuner.annexes.page.control import GONE
from simpletuner.annexes.page.project import Project, Refusal, project_of
from simpletuner.annexes.start.receive import LARGEST_FILE, MOST_FILES, USED, ZIP, check_space, receive, safe_name
from simpletuner.annexes.start.recipe import FILES, TRIGGER, Material, Recipe, Start, run_name
from simpletuner.atomic import free_path, writing_to
from simpletuner.config.sources import example_names
from simpletuner.data.file_names import UNREAD_CLIPS, UNREAD_PICTURES
from simpletuner.errors import Problem, not_one_of

MOST_SKIPPED = 20  # skipped files that are listed
# Translations of the card's texts, by language and English text.
LANGUAGES = Path(__file__).parent / "static" / "languages.json"


def card_content(accepted: str) -> dict[str, Any]:
    """Template values of the empty card, in the browser's first language that has a translation."""
    tables = json.loads(LANGUAGES.read_text(encoding="utf-8"))
    wanted = (each.partition(";")[0].partition("-")[0].strip().lower() for each in accepted.split(","))
    language = next((each for each in wanted if each in {*tables, "en"}), "en")
    words = tables.get(language, {})

    def say(text: str, **values: object) -> str:
        return words.get(text, text).format(**values)

    unread = sorted(UNREAD_PICTURES | UNREAD_CLIPS)
    limits = {"suffixes": sorted({*USED, ZIP}), "unread": unread, "files": MOST_FILES, "bytes": LARGEST_FILE}
    examples = sorted(example_names(), key=lambda name: not name.startswith("demo"))
    shown = {"language": language, "words": words, "say": say, "limits": limits, "trigger": TRIGGER}
    return {**shown, "examples": {name: about_example(name) for name in examples}}


def look(request: Request, body: dict[str, Any]) -> Response:
    """The content of a folder, possible purposes, and for every model a draft for `POST /api/plan`.

    The body contains the `folder`, and the answers so far: `purpose`, `trigger` and `name`.
    """
    project, drafts = project_of(request), dict[str, Any]()
    material = material_in(project, body)
    starts = {model: answered(project, material, {**body, "model": model}) for model in material.models}
    proposed = starts[next(iter(material.models))]
    for model, start in starts.items():
        # Without keys of files beside the config, which a draft's plan does not have.
        values = {key: value for key, value in start.config().items() if key not in FILES}
        drafts[model] = {"config": start.name, "values": values, "datasets": start.datasets()}
    others = {file: reason for file, (_, reason) in material.files.ignored.items() if not BACKUP.fullmatch(file)}
    ignored = [{"file": file, "reason": reason} for file, reason in others.items()]
    content = {
        "folder": files.shown(project, material.folder),
        "name": proposed.name,
        "described": material.describe(),
        "notes": [*material.notes(), *proposed.fit.notes()],
        "files": len(material.captioned) + len(material.uncaptioned),
        "uncaptioned": len(material.uncaptioned),
        "held_out": proposed.held_out,
        "skipped": ignored[:MOST_SKIPPED],
        "more_skipped": len(ignored[MOST_SKIPPED:]),
        "purposes": {purpose: Recipe.of(purpose).title for purpose in material.purposes},
        "purpose": proposed.purpose,
        "drafts": drafts,
    }
    return JSONResponse(content)


def write(request: Request, body: dict[str, Any]) -> Response:
    """Write the config of a run as `simpletuner start` does: `{"folder", "purpose", "trigger", "model", "name"}`.

    Raises:
        Refusal: 409 if the config exists, 422 for invalid answers.
    """
    project = project_of(request)
    start = answered(project, material_in(project, body), body)
    project.new_config(start.name)
    start.save()  # of two concurrent requests, one fails
    return JSONResponse({"config": start.name}, 201)


def material_in(project: Project, body: dict[str, Any]) -> Material:
    """The training files in the folder of a request.

    Raises:
        UserError: the folder contains no pictures or clips.
    """
    return Material.of(project.inside(str(body.get("folder") or ".")))


def answered(project: Project, material: Material, body: dict[str, Any]) -> Start:
    """The run described by the answers in a request; missing answers have the command's defaults.

    Raises:
        Refusal: 422 for a purpose or model that does not suit the files.
    """
    purpose, model = one_of(material.purposes, body, "purpose"), one_of([*material.models], body, "model")
    free = free_path(project.folder / "config" / run_name(material.folder)).name
    return Start(
        name=str(body.get("name") or free).strip(),
        material=material,
        purpose=purpose,
        trigger=str(body.get("trigger") or material.words or TRIGGER).strip() if purpose != "edit" else "",
        example=material.models[model],
        # Files of a concept without captions are captioned by its words.
        captions=body.get("captions") is True or (bool(material.captioned) and not material.concepts),
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


FOLDER = Path("datasets")
IDLE_SECONDS = 30.0  # timeout without data; an upload may take hours


def new_folder(request: Request, body: dict[str, Any]) -> Response:
    """Create a folder for uploads: `{"name": NAME}`; the name is sanitised, and numbered if it exists."""
    wanted = project_of(request).inside(FOLDER) / run_name(Path(safe_name(str(body.get("name", ""))) or "my-files"))
    while True:
        folder = free_path(wanted)
        with writing_to(folder), suppress(FileExistsError):  # created by a concurrent request
            folder.mkdir(parents=True)
            return JSONResponse({"name": folder.name, "folder": f"{FOLDER}/{folder.name}"}, 201)


async def put_file(request: Request) -> Response:
    """Save the body of a request as a file, or unpack a zip; the response lists saved and skipped files."""
    folder, name = project_of(request).inside(FOLDER / request.path_params["name"]), request.path_params["file"]
    if folder.parent != project_of(request).inside(FOLDER) or not folder.is_dir():
        raise Refusal(404, f"There is no folder {FOLDER}/{request.path_params['name']}.")
    check_space(folder, int(request.headers.get("content-length", 0)))
    saved, skipped = await run_in_threadpool(receive, folder, safe_name(name), following(request))
    reasons = [{"file": file, "reason": reason} for file, reason in skipped.items()]
    return JSONResponse({"saved": saved, "skipped": reasons}, 201)


def following(request: Request) -> Iterator[bytes]:
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
            raise Refusal(408, f"No data for {IDLE_SECONDS:g} s; the upload was discarded.") from None
        except ClientDisconnect:
            raise Refusal(GONE, "The connection broke.") from None

    while (part := from_thread.run(next_part)) is not None:
        yield part
