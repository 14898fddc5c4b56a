"""What a run has made: curves, beside those of another; all previews; sweep, samples and files. Free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse

from simpletuner.annexes.page.jobs import FOLDERS
from simpletuner.annexes.page.live import address, chosen, drawing, runs_of
from simpletuner.annexes.page.project import Refusal
from simpletuner.annexes.report import html
from simpletuner.annexes.report.html import PreviewGrid, build_grid, pages_of, steps_of
from simpletuner.annexes.report.sheet import Sheet, samples_in
from simpletuner.annexes.runs import Run
from simpletuner.headers import join_header, read_head, read_header
from simpletuner.models import lora_keys
from simpletuner.models.lora_keys import LORA_FILE, PREFIXES, LoraForm
from simpletuner.models.registry import FAMILIES
from simpletuner.reporting.metrics import MEDIA_FILE, REPORT_FILE, MediaRecord, read_media
from simpletuner.training.manifest import PIPELINE_FOLDER, find_checkpoints, result_step

AS_IT_IS = "application/octet-stream"  # compressed, it would take long, and its browser could not show how long
PART = 1 << 20


def run_part(part: str, run: Run, **values: Any) -> Response:
    """A part of a run's view, as HTML."""
    return HTMLResponse(html.render("page/results.html.jinja", part=part, run=run, **values))


def show_curves(request: Request) -> Response:
    """The curves of a run; those of another over them: `?beside=ID`."""
    run, name = chosen(request), request.query_params.get("beside")
    others = [runs_of(request).find(name)] if name else []
    with drawing:
        return run_part("curves", run, **html.curves(run.metrics, beside={each.name: each.metrics for each in others}))


def grid_of(run: Run, records: Sequence[MediaRecord], below: str = ".") -> PreviewGrid:
    """A grid of pictures that the page loads; their paths are relative to a folder of the run."""
    return build_grid(records, run.folder, lambda record: address(run, f"{below}/{record.path}".removeprefix("./")))


def show_previews(request: Request) -> Response:
    """Previews of a run, a selection or all of a page: `?page=3`; those being sampled come with their progress."""
    run, page = chosen(request), request.query_params.get("page", "")
    state, _, story = run.judge()
    records = read_media(run.folder / MEDIA_FILE)
    pages = {str(number): each for number, each in enumerate(pages_of(records))}
    growing = [{**each, "source": address(run, each["path"])} for each in story.growing.values()]
    return run_part(
        "previews", run, grid=grid_of(run, pages[page][1] if page in pages else records), pages=pages, page=page,
        growing=growing if state == "running" else [], steps=steps_of([records]),
    )  # fmt: skip


def show_pair(request: Request) -> Response:
    """The previews of two steps: `?before=0&after=300`."""
    run, asked = chosen(request), {request.query_params.get(key) for key in ("before", "after")}
    records = [each for each in read_media(run.folder / MEDIA_FILE) if str(each.step) in asked]
    return run_part("pair", run, grid=grid_of(run, records))


def show_results(request: Request) -> Response:
    """What a run has left: its files and how to use them, its sweep and its samples."""
    run = chosen(request)
    folder, step = run.folder, result_step(run.folder, "lora")
    checkpoints = [each for each in find_checkpoints(folder)[0] if (each.path / LORA_FILE).is_file()]
    files = [folder / LORA_FILE] if step is not None else [each.path / LORA_FILE for each in checkpoints[-1:]]
    form, obstacle = other_form(files[0]) if files else ("", "")
    sheet = Sheet.read(folder / FOLDERS["sweep"], run.name, run.metrics)
    return run_part(
        "results", run, sheet=sheet, swept=grid_of(run, sheet.records, FOLDERS["sweep"]),
        sampled=grid_of(run, samples_in(folder / FOLDERS["sample"]), FOLDERS["sample"]),
        name=file_name(run), step=step, size=(folder / LORA_FILE).stat().st_size / 1e6 if step is not None else 0,
        form=form, obstacle=obstacle, other_name=file_name(run, form=form),
        pipeline=folder / PIPELINE_FOLDER if (folder / PIPELINE_FOLDER).is_dir() else None,
        checkpoints=[each.step for each in checkpoints],
        program=html.program_in(folder / REPORT_FILE),
    )  # fmt: skip


def file_name(run: Run, step: str = "", form: str = "") -> str:
    """What a browser calls the LoRA that it downloads: in a folder with many, `pytorch_lora_weights` says nothing."""
    name = "-".join(filter(None, (re.sub(r"[^\w.-]+", "-", run.name), step and f"step{step}", form)))
    return f"{name}.safetensors"


def send_lora(request: Request) -> Response:
    """The LoRA of a run, or of a checkpoint, in its own form or another: `?step=100&form=comfyui`."""
    run, step, form = chosen(request), *(request.query_params.get(key, "") for key in ("step", "form"))
    found = [each.path for each in find_checkpoints(run.folder)[0] if str(each.step) == step] if step else [run.folder]
    if not found or not (path := found[-1] / LORA_FILE).is_file():
        raise Refusal(404, f"{run.name} has no LoRA{f' of step {step}' if step else ''}.")
    whole = FileResponse(path, filename=file_name(run, step, form), media_type=AS_IT_IS)
    if not form:
        return whole
    other, obstacle = other_form(path)
    if form != other or obstacle:
        raise Refusal(404, obstacle or f"form: {form!r} is not {other}, the form that the file is not in.")
    file = path.open("rb")
    head = join_header(lora_keys.rename(read_head(file)[1], other), b"")
    length = len(head) + os.fstat(file.fileno()).st_size - file.tell()
    headers = {**whole.headers, "accept-ranges": "none", "content-length": str(length)}
    return StreamingResponse(_in_parts(head, file), headers=headers)


def _in_parts(head: bytes, rest: BinaryIO) -> Iterator[bytes]:
    with rest:
        yield head
        while part := rest.read(PART):
            yield part


def other_form(path: Path) -> tuple[LoraForm, str]:
    """The form that a LoRA of this program is not in, and why it cannot be had in it; empty if it can."""
    names, spec = read_header(path).keys(), FAMILIES.get(lora_keys.family_in_header(path))
    form: LoraForm = "diffusers" if any(name.startswith(PREFIXES["comfyui"]) for name in names) else "comfyui"
    if form == "comfyui" and (spec is None or not spec.in_comfyui):
        return form, f"ComfyUI cannot load it: it has no built-in {spec.title if spec else 'model of this family'}."
    if any(name.endswith((lora_keys.MAGNITUDE, lora_keys.COMFYUI_MAGNITUDE)) for name in names):
        why = "The magnitudes of a DoRA differ between diffusers and ComfyUI, by norms of the model's weights."
        return form, f"{why} For the other file, train with lora_format: {form}."
    return form, ""


PARTS = {"curves": show_curves, "previews": show_previews, "pair": show_pair, "results": show_results}
