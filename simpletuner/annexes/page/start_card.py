"""The start card: what `simpletuner start` asks and writes, on the page. Nothing is written before the config is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.captions.editing import BACKUP
from simpletuner.annexes.guide import about_example
from simpletuner.annexes.page import files
from simpletuner.annexes.page.project import Project, Refusal, project_of
from simpletuner.annexes.start.material import Material
from simpletuner.annexes.start.receive import LARGEST_FILE, MOST_FILES, USED, ZIP
from simpletuner.annexes.start.recipe import FILES, TRIGGER, Recipe, Start, run_name
from simpletuner.atomic import free_path
from simpletuner.config.sources import example_names
from simpletuner.errors import Problem, did_you_mean

MOST_SKIPPED = 20  # named
# Texts of the card by language and English text.
LANGUAGES = Path(__file__).parent / "static" / "languages.json"


def card_content(accepted: str) -> dict[str, Any]:
    """What the card shows before any file is there, in the first language that a browser accepts and that is there."""
    tables = json.loads(LANGUAGES.read_text(encoding="utf-8"))
    wanted = (each.partition(";")[0].partition("-")[0].strip().lower() for each in accepted.split(","))
    language = next((each for each in wanted if each in {*tables, "en"}), "en")
    words = tables.get(language, {})

    def say(text: str, **values: object) -> str:
        return words.get(text, text).format(**values)

    limits = {"suffixes": sorted({*USED, ZIP}), "files": MOST_FILES, "bytes": LARGEST_FILE}
    examples = sorted(example_names(), key=lambda name: not name.startswith("demo"))
    told = {"language": language, "words": words, "say": say, "limits": limits, "trigger": TRIGGER}
    return {**told, "examples": {name: about_example(name) for name in examples}}


def look(request: Request, body: dict[str, Any]) -> Response:
    """What a folder holds, what can be learned from it, and for each model a draft as `POST /api/plan` takes it.

    The body names the `folder`, and what has been answered of `purpose`, `trigger` and `name`.
    """
    project, drafts = project_of(request), dict[str, Any]()
    material = material_in(project, body)
    for model in material.models:
        start = answered(project, material, {**body, "model": model.removesuffix("-lora")})
        # The plan of a draft has no files beside its config.
        values = {key: value for key, value in start.config().items() if key not in FILES}
        drafts[model.removesuffix("-lora")] = {"config": start.name, "values": values, "datasets": start.datasets()}
    others = {file: reason for file, (_, reason) in material.files.ignored.items() if not BACKUP.fullmatch(file)}
    ignored = [{"file": file, "reason": reason} for file, reason in others.items()]
    content = {
        "folder": files.shown(project, material.folder),
        "name": start.name,
        "described": material.describe(),
        "files": len(material.captioned) + len(material.uncaptioned),
        "uncaptioned": len(material.uncaptioned),
        "held_out": start.held_out,
        "skipped": ignored[:MOST_SKIPPED],
        "more_skipped": len(ignored[MOST_SKIPPED:]),
        "purposes": {purpose: Recipe.of(purpose).title for purpose in material.purposes},
        "purpose": start.purpose,
        "drafts": drafts,
    }
    return JSONResponse(content)


def write(request: Request, body: dict[str, Any]) -> Response:
    """Write the config of a run as `simpletuner start` does: `{"folder", "purpose", "trigger", "model", "name"}`.

    Raises:
        Refusal: 409 if there is a config of this name, 422 for answers that cannot be used.
    """
    project = project_of(request)
    start = answered(project, material_in(project, body), body)
    project.new_config(start.name)
    start.save()  # of two at once, one fails
    return JSONResponse({"config": start.name}, 201)


def material_in(project: Project, body: dict[str, Any]) -> Material:
    """What the folder of a request holds.

    Raises:
        UserError: nothing that can be trained on.
    """
    return Material.of(project.inside(str(body.get("folder") or ".")), mixed=True)


def answered(project: Project, material: Material, body: dict[str, Any]) -> Start:
    """The run that the answers in a request describe; what is left open is taken as the command takes it.

    Raises:
        Refusal: 422 for a purpose or model that the files cannot have.
    """
    models = {model.removesuffix("-lora"): model for model in material.models}
    purpose, model = one_of(material.purposes, body, "purpose"), one_of([*models], body, "model")
    free = free_path(project.folder / "config" / run_name(material.folder)).name
    return Start(
        name=str(body.get("name") or free).strip(),
        material=material,
        purpose=purpose,
        trigger=str(body.get("trigger") or TRIGGER).strip() if purpose != "edit" else "",
        example=models[model],
        captions=body.get("captions") is True or bool(material.captioned),
        root=project.folder,
    )


def one_of(choices: Sequence[str], body: dict[str, Any], key: str) -> str:
    """The choice that a request names, else the first.

    Raises:
        Refusal: 422 if it is none of them.
    """
    answer = str(body.get(key) or choices[0]).strip()
    if answer not in choices:
        hint = did_you_mean(answer, choices)
        raise Refusal(422, [Problem(key, f"{answer!r} is not one of: {', '.join(choices)}.{hint}")])
    return answer
