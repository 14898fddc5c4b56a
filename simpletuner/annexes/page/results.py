"""What a run has made: curves, beside those of another; all previews; sweep, samples and files. Free of torch."""

from __future__ import annotations

import html as markup
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from simpletuner.annexes.page.jobs import FOLDERS
from simpletuner.annexes.page.live import address, chosen, drawing, runs_of
from simpletuner.annexes.page.project import Refusal
from simpletuner.annexes.page.runs import PART, Run
from simpletuner.annexes.report import html
from simpletuner.annexes.report.html import PreviewGrid, build_grid, pages_of, steps_of
from simpletuner.annexes.report.sheet import Sheet, cell
from simpletuner.config.values import read_json
from simpletuner.errors import UserError, result_of
from simpletuner.headers import read_header
from simpletuner.models.lora_keys import LORA_FILE
from simpletuner.reporting.metrics import MEDIA_FILE, MIME, REPORT_FILE, VIDEO_MIME, MediaRecord, read_media
from simpletuner.training.manifest import PIPELINE_FOLDER, find_checkpoints, result_step

# The program in the report, from the process that knew the plan; to make it again would take torch.
PROGRAM = re.compile(r'class="snippet">.*?<pre>(.*?)</pre>', re.DOTALL)
COMFYUI = "diffusion_model."
SAMPLES = 48  # that the page shows, the newest
SAME = ("prompt", "seed", "index", "width", "height")  # of samples in a row


def shown(part: str, run: Run, **values: Any) -> Response:
    """A part of a run's view, as HTML."""
    return HTMLResponse(html.render("page/results.html.jinja", part=part, run=run, **values))


def curves(request: Request) -> Response:
    """The curves of a run; those of another over them: `?beside=ID`."""
    run, other = chosen(request), request.query_params.get("beside")
    beside = {runs_of(request).find(other).name: runs_of(request).find(other).metrics} if other else None
    with drawing:
        return shown("curves", run, **html.curves(run.metrics, beside=beside))


def grid_of(run: Run, records: Sequence[MediaRecord], below: str = ".") -> PreviewGrid:
    """A grid of pictures that the page loads; their paths are relative to a folder of the run."""
    return build_grid(records, run.folder, lambda record: address(run, f"{below}/{record.path}".removeprefix("./")))


def previews(request: Request) -> Response:
    """Previews of a run, a selection or all of a page: `?page=3`; those being sampled come with their progress."""
    run, number = chosen(request), request.query_params.get("page", "")
    state, _, story = run.judge()
    records = read_media(run.folder / MEDIA_FILE)
    pages = pages_of(records)
    chosen_page = int(number[:6]) if number.isdecimal() and int(number[:6]) < len(pages) else None
    grid = grid_of(run, records if chosen_page is None else pages[chosen_page][1])
    growing = [{**each, "source": address(run, each["path"])} for each in story.growing.values()]
    return shown(
        "previews", run, grid=grid, growing=growing if state == "running" else [],
        pages=[name for name, _ in pages], page=chosen_page, steps=steps_of([records]),
    )  # fmt: skip


def pair(request: Request) -> Response:
    """The previews of two steps: `?before=0&after=300`."""
    run, asked = chosen(request), {request.query_params.get(key, "") for key in ("before", "after")}
    records = [each for each in read_media(run.folder / MEDIA_FILE) if str(each.step) in asked]
    return shown("pair", run, grid=grid_of(run, records))


def results(request: Request) -> Response:
    """What a run has left: its files and how to use them, its sweep and its samples."""
    run, lora, step = chosen(request), chosen(request).folder / LORA_FILE, None
    with suppress(UserError):  # a damaged file is no result
        step = result_step(run.folder, "lora") if lora.is_file() else None
    sheet = Sheet.read(run.folder / FOLDERS["sweep"], run.name, run.metrics)
    return shown(
        "results", run, sheet=sheet, swept=grid_of(run, sheet.records, FOLDERS["sweep"]),
        sampled=grid_of(run, samples(run.folder / FOLDERS["sample"]), FOLDERS["sample"]),
        lora=lora if step is not None else None, step=step, size=f"{lora.stat().st_size / 1e6:,.1f} MB" if step else "",
        pipeline=run.folder / PIPELINE_FOLDER if (run.folder / PIPELINE_FOLDER).is_dir() else None,
        checkpoints=[each.step for each in find_checkpoints(run.folder)[0] if (each.path / LORA_FILE).is_file()],
        name=file_name(run), program=program(run), for_comfyui=step is not None and is_for_comfyui(lora),
    )  # fmt: skip


def samples(folder: Path) -> list[MediaRecord]:
    """The newest samples in a folder: a row per prompt, seed and strength, with the untrained model as step 0."""
    files = [each for each in folder.glob("*") if each.suffix in {*MIME, *VIDEO_MIME}]
    newest = sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)[:SAMPLES]
    made = {file.name: result_of(read_json(file.with_suffix(".json"), dict)) or {} for file in newest}
    made = {name: recipe for name, recipe in made.items() if recipe.keys() >= {*SAME, "step", "strength"}}
    strengths: dict[tuple[Any, ...], set[float]] = defaultdict(set)
    for recipe in made.values():
        strengths[itemgetter(*SAME)(recipe)] |= {recipe["strength"]} - {0}
    records: dict[tuple[Any, ...], MediaRecord] = {}
    for name, recipe in made.items():
        # Without its LoRA, a run's model belongs to the rows of all strengths.
        for strength in (
            [recipe["strength"]] if recipe["strength"] else sorted(strengths[itemgetter(*SAME)(recipe)]) or [1]
        ):
            title = f"{recipe['prompt']:.50}, seed {recipe['seed']}" + (f", at {strength:g}" if strength != 1 else "")
            record = cell(recipe if recipe["strength"] else {**recipe, "step": 0}, title, name)
            records.setdefault((*record.row, record.step), record)
    return [*records.values()]


def program(run: Run) -> str:
    """Python that samples with the result; empty if the report has none."""
    report = run.folder / REPORT_FILE
    if not report.is_file():
        return ""
    with report.open("rb") as file:
        found = PROGRAM.search(file.read(PART).decode(errors="replace"))
    return markup.unescape(found[1]) if found else ""


def is_for_comfyui(lora: Path) -> bool:
    """Whether a LoRA has the names that ComfyUI looks for."""
    return any(name.startswith(COMFYUI) for name in read_header(lora))


def file_name(run: Run, step: str = "") -> str:
    """What a browser calls the LoRA that it downloads: in a folder with many, `pytorch_lora_weights` says nothing."""
    name = re.sub(r"[^\w.-]+", "-", run.name)
    return f"{name}-step{step}.safetensors" if step else f"{name}.safetensors"


def download(request: Request) -> Response:
    """The LoRA of a run, or of a checkpoint: `?step=100`."""
    run, step = chosen(request), request.query_params.get("step", "")
    found = [each.path for each in find_checkpoints(run.folder)[0] if str(each.step) == step] if step else [run.folder]
    if not found or not (file := found[-1] / LORA_FILE).is_file():
        raise Refusal(404, f"{run.name} has no LoRA{f' of step {step}' if step else ''}.")
    return FileResponse(file, filename=file_name(run, step), media_type="application/octet-stream")


PARTS = (curves, previews, pair, results)
