"""The results of a run on the page: curves, previews, LoRA files, samples and sweep."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse

from simpletuner.annexes.adapters.forms import other_form
from simpletuner.annexes.page.live import chosen, drawing, runs_of
from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.project import Project, Refusal, project_of
from simpletuner.annexes.report import html
from simpletuner.annexes.report.html import PreviewGrid, build_grid, pages_of, steps_of
from simpletuner.annexes.report.sheet import PAGE as SHEET_PAGE
from simpletuner.annexes.report.sheet import SWEEP_FOLDER, Sheet, samples_in
from simpletuner.annexes.runs.run import Run
from simpletuner.errors import UserError
from simpletuner.headers import join_header, read_head
from simpletuner.planning.checkpoint_folder import PIPELINE_FOLDER, find_checkpoints, result_step
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    REPORT_FILE,
    MediaRecord,
    describe_damage,
    read_media,
)
from simpletuner.weights import lora_names
from simpletuner.weights.lora_names import LORA_FILE

# Not compressed by the server: that would be slow, and hide the size from the browser.
BINARY = "application/octet-stream"
PART = 1 << 20  # bytes of a download that are in memory
SAMPLES_FOLDER = "samples"  # of the page's samples, in the output folder


def address(run: Run, path: str) -> str:
    """The URL of a preview, which changes when the file does; empty if the file is missing."""
    file = run.folder / path
    if not file.is_file():
        return ""
    return f"/media/{run.id}/{quote(path)}?{file.stat().st_mtime_ns}"


def draw(run: Run, part: str, title: str, values: Callable[[], dict[str, Any]]) -> str:
    """A part of a run's view as HTML.

    Args:
        values: computes the template values; an error becomes a notice in place of the part.
    """
    return draw_part(
        title, lambda: html.render("page/results.html.jinja", part=part, run=run, **values())
    )


def show_curves(request: Request) -> Response:
    """The curves of a run, overlaid with the curves of another run: `?beside=ID`."""
    run = chosen(request)
    name = request.query_params.get("beside")
    compared = runs_of(request).find(name) if name else None

    def values() -> dict[str, Any]:
        beside = {compared.name: compared.metrics} if compared else {}
        return html.curves(run.metrics, beside=beside)

    with drawing:
        return HTMLResponse(draw(run, "curves", "Curves", values))


def grid_of(run: Run, records: Sequence[MediaRecord], below: str = ".") -> PreviewGrid:
    """A grid of pictures loaded by URL.

    Args:
        below: the folder in the run's folder to which the paths of the records are relative.
    """

    def source(record: MediaRecord) -> str:
        return address(run, f"{below}/{record.path}".removeprefix("./"))

    return build_grid(records, run.folder, source)


def show_previews(request: Request) -> Response:
    """Previews of a run: a selection or a page of all (`?page=3`), and unfinished ones."""
    run = chosen(request)
    page = request.query_params.get("page", "")
    return HTMLResponse(draw(run, "previews", "Previews", lambda: previews(run, page)))


def previews(run: Run, page: str) -> dict[str, Any]:
    """Template values for the previews of a run."""
    records = read_media(run.folder / MEDIA_FILE)
    pages = {str(number): content for number, content in enumerate(pages_of(records))}
    shown = records
    if page in pages:
        _title, shown = pages[page]
    return {
        "grid": grid_of(run, shown),
        "pages": pages,
        "page": page,
        "growing": unfinished(run),
        "steps": steps_of([records]),
        "damage": describe_damage(run.folder / MEDIA_FILE),
    }


def unfinished(run: Run) -> list[dict[str, Any]]:
    """The previews that a run is sampling at present."""
    with suppress(OSError, UserError):  # a damaged lock, which the status reports
        verdict = run.judge()
        if verdict.status == "running":
            previews = verdict.history.growing.values()
            return [{**preview, "source": address(run, preview["path"])} for preview in previews]
    return []


def show_pair(request: Request) -> Response:
    """The previews of two steps: `?before=0&after=300`."""
    run = chosen(request)
    steps = {request.query_params.get(key) for key in ("before", "after")}

    def values() -> dict[str, Any]:
        records = read_media(run.folder / MEDIA_FILE)
        return {"grid": grid_of(run, [record for record in records if str(record.step) in steps])}

    return HTMLResponse(draw(run, "pair", "Before and after", values))


def show_results(request: Request) -> Response:
    """The results of a run: files and how to use them, its samples and its sweep."""
    run = chosen(request)
    parts = [
        draw(run, "result", "Result", lambda: result(run)),
        draw(run, "samples", "Samples", lambda: samples(run)),
        draw(run, "sweep", "Checkpoints compared", lambda: sweep(run, project_of(request))),
    ]
    return HTMLResponse("".join(parts))


def result(run: Run) -> dict[str, Any]:
    """Template values for the files of a run, and how to use them."""
    folder = run.folder
    step = result_step(folder, "lora")
    saves, _incomplete = find_checkpoints(folder)
    checkpoints = [save for save in saves if (save.path / LORA_FILE).is_file()]
    file: Path | None = None
    megabytes = 0.0
    if step is not None:
        file = folder / LORA_FILE
        megabytes = file.stat().st_size / 1e6
    elif checkpoints:
        file = checkpoints[-1].path / LORA_FILE
    form = ""
    obstacle = ""
    if file is not None:
        form, obstacle = other_form(file)
    pipeline = folder / PIPELINE_FOLDER
    return {
        "name": file_name(run),
        "step": step,
        "size": megabytes,
        "form": form,
        "obstacle": obstacle,
        "other_name": file_name(run, form=form),
        "pipeline": pipeline if pipeline.is_dir() else None,
        "checkpoints": [checkpoint.step for checkpoint in checkpoints],
        "program": html.program_in(folder / REPORT_FILE),
    }


def samples(run: Run) -> dict[str, Any]:
    """Template values for the samples of a run."""
    records = samples_in(run.folder / SAMPLES_FOLDER)
    return {"sampled": grid_of(run, records, SAMPLES_FOLDER)}


def sweep(run: Run, project: Project) -> dict[str, Any]:
    """Template values for the compared checkpoints of a run."""
    sheet = Sheet.read(run.folder / SWEEP_FOLDER, run.name, run.metrics)
    return {
        "sheet": sheet,
        "swept": grid_of(run, sheet.records, SWEEP_FOLDER),
        "earlier_sheet": "" if sheet.records else earlier_sheet(run, project),
    }


def earlier_sheet(run: Run, project: Project) -> str:
    """The contact sheet of an earlier version, outside the output folder; empty without one."""
    path = Path(SAMPLES_FOLDER) / f"sweep-{run.folder.name}" / SHEET_PAGE
    return str(path) if (project.folder / path).is_file() else ""


def file_name(run: Run, step: str = "", form: str = "") -> str:
    """The name under which a browser saves a LoRA, more specific than `pytorch_lora_weights`."""
    parts = [re.sub(r"[^\w.-]+", "-", run.name)]
    if step:
        parts.append(f"step{step}")
    if form:
        parts.append(form)
    return f"{'-'.join(parts)}.safetensors"


def send_lora(request: Request) -> Response:
    """The LoRA of a run or checkpoint, original or converted: `?step=100&form=comfyui`."""
    run = chosen(request)
    step = request.query_params.get("step", "")
    form = request.query_params.get("form", "")
    path = find_lora(run, step)
    response = FileResponse(path, filename=file_name(run, step, form), media_type=BINARY)
    if not form:
        return response
    possible_form, obstacle = other_form(path)
    if obstacle:
        raise Refusal(404, obstacle)
    if form != possible_form:
        raise Refusal(
            404,
            f"form: {form!r} is not {possible_form}; the file can be converted only to that.",
        )
    # The forms differ only in the header, which names the tensors.
    file = path.open("rb")
    header = read_head(file)[1]
    head = join_header(lora_names.rename(header, possible_form), b"")
    tensor_bytes = os.fstat(file.fileno()).st_size - file.tell()
    length = len(head) + tensor_bytes
    headers = {**response.headers, "accept-ranges": "none", "content-length": str(length)}
    return StreamingResponse(_in_parts(head, file), headers=headers)


def find_lora(run: Run, step: str) -> Path:
    """The LoRA of a run, or of its checkpoint of a step.

    Raises:
        Refusal: 404 if there is no such file.
    """
    folders = [run.folder]
    missing = f"{run.name} has no LoRA."
    if step:
        saves, _incomplete = find_checkpoints(run.folder)
        folders = [save.path for save in saves if str(save.step) == step]
        missing = f"{run.name} has no LoRA of step {step}."
    # Of two checkpoints of a step, the last one is the regular one.
    file = folders[-1] / LORA_FILE if folders else None
    if file is None or not file.is_file():
        raise Refusal(404, missing)
    return file


def _in_parts(head: bytes, rest: BinaryIO) -> Iterator[bytes]:
    """A header, then the rest of a file, which is closed at the end."""
    with rest:
        yield head
        while part := rest.read(PART):
            yield part


VIEWS = {
    "curves": show_curves,
    "previews": show_previews,
    "pair": show_pair,
    "results": show_results,
}
