"""My card: what a card can train, and a config to begin with."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.fitting.card_table import (
    ROWS,
    Answer,
    CardRow,
    CardTable,
    TriedSize,
    card_table,
)
from simpletuner.annexes.fitting.show_cards import assumptions, called, lacking_text
from simpletuner.annexes.page.project import Project, Refusal, project_of
from simpletuner.annexes.report import html
from simpletuner.annexes.start.recipe import read_example
from simpletuner.atomic import build_folder, unused_path, write_json
from simpletuner.budget.device import gigabytes
from simpletuner.config.device import ANY_CARD, HERE, AskedDevice, read_card_or_memory
from simpletuner.config.sources import DATASET_FILE
from simpletuner.errors import Problems
from simpletuner.reporting.wording import duration_text

# A table takes seconds to compute. What it depends on, besides the card, seldom changes.
KEPT = "private, max-age=300"
OTHER_CARD = "For any other, type its memory in GB."  # the page has no flags


def show_cards(request: Request) -> Response:
    """What the card in the query can train; without one, that of this machine.

    Raises:
        Refusal: 422 if the card is not known.
    """
    name = request.query_params.get("card", "").strip()
    table = card_table(asked_card(name))
    return HTMLResponse(_render(table), headers={"Cache-Control": KEPT})


def asked_card(name: str) -> AskedDevice:
    """A card by name, or by its memory in GB.

    Raises:
        Refusal: 422 if the card is not known.
    """
    if not name:
        return HERE
    reason = why_unknown(name)
    if reason:
        raise Refusal(422, reason)
    return read_card_or_memory(name, Problems())


def why_unknown(name: str) -> str:
    """Why a card is not known, with the nearest names; empty if it is known."""
    problems = Problems()
    read_card_or_memory(name, problems)
    sentence = " ".join(problem.message for problem in problems)
    return sentence.replace(ANY_CARD, OTHER_CARD)


def begin(request: Request, body: dict[str, Any]) -> Response:
    """Write a config for a row of the table: its example, with `offload: auto` and another size.

    The body is `{"model", "kind", "size"}`, as the table shows them.

    Raises:
        Refusal: 422 for a row or a size that the table does not have.
    """
    project = project_of(request)
    rows = {(row.model, row.kind): row for row in ROWS}
    row = rows.get((str(body.get("model")), str(body.get("kind"))))
    size = str(body.get("size"))
    if row is None or size not in row.sizes:
        raise Refusal(422, "There is no such model and size in the table.")
    name = unused_path(project.folder / "config" / row.example).name
    _write_config(project, name, row, TriedSize(size, row.sizes[size]))
    return JSONResponse({"config": name}, 201)


def _write_config(project: Project, name: str, row: CardRow, size: TriedSize) -> None:
    values = {**read_example(row.example), **row.settings_at(size)}
    values["data_backend_config"] = f"config/{name}/{DATASET_FILE}"
    values["output_dir"] = f"output/{name}"
    written = {key: value for key, value in values.items() if value is not None}
    with build_folder(project.new_config(name).parent) as folder:
        write_json(folder / "config.json", written)
        write_json(folder / DATASET_FILE, row.datasets_at(size))


def _render(table: CardTable) -> str:
    groups: dict[str, list[Answer]] = {}
    for answer in table.answers:
        groups.setdefault(answer.row.group, []).append(answer)
    return html.render(
        "page/new/card_table.html.jinja",
        table=table,
        groups=groups,
        called=called(table.device),
        assumed=assumptions(table),
        lacking=lacking_text,
        duration=duration_text,
        gigabytes=gigabytes,
    )
