"""The file of the weights that a user chooses on the page: how to get and use it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse

from simpletuner.annexes.adapters.choice import PROGRAMS, Choice, command_for, find_choice
from simpletuner.annexes.adapters.convert import (
    MAGNITUDES_STAY,
    PLACES,
    rewritten,
    why_not,
    why_not_one_file,
)
from simpletuner.annexes.adapters.forms import holds_magnitudes
from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.project import Refusal
from simpletuner.annexes.page.runs.live import chosen
from simpletuner.annexes.report import html
from simpletuner.annexes.runs.run import Run
from simpletuner.config.types import parse_number
from simpletuner.errors import UserError
from simpletuner.planning.checkpoint_folder import FOLDER_NAME, find_checkpoints, result_step
from simpletuner.reporting.metrics import REPORT_FILE
from simpletuner.reporting.wording import size_text
from simpletuner.weights.files import WeightsError, weights_header
from simpletuner.weights.lora_names import LORA_FILE, PREFIXES, LoraForm

# Not compressed by the server: that would be slow, and hide the size from the browser.
BINARY = "application/octet-stream"
LOADED = re.compile(r"pipe\.load_lora_weights\(.*\)")  # in the program of a report


@dataclass(frozen=True)
class SavedWeights:
    """The weights that an output folder holds.

    Attributes:
        checkpoints: steps with a checkpoint.
        result: step of the result; None without one.
        is_full: a full fine-tune, not a LoRA.
        can_compare: whether checkpoints can be rendered: of a LoKr, LoHa or LyCORIS, only the
            result is also a plain LoRA.
    """

    checkpoints: tuple[int, ...]
    result: int | None
    is_full: bool
    can_compare: bool

    @classmethod
    def of(cls, folder: Path) -> SavedWeights:
        """Look into an output folder."""
        saves, _ = find_checkpoints(folder)
        steps = tuple(sorted({save.step for save in saves}))
        is_full = any(save.manifest.identity.model_type == "full" for save in saves)
        result = result_step(folder, "full" if is_full else "lora")
        if result is None and not is_full:
            result = result_step(folder, "full")
            is_full = result is not None
        has_loras = all((save.path / LORA_FILE).is_file() for save in saves)
        return cls(steps, result, is_full, can_compare=bool(saves) and (is_full or has_loras))

    @property
    def steps(self) -> list[int]:
        """All steps whose weights can be used, in order."""
        results = [] if self.result is None else [self.result]
        return sorted({*self.checkpoints, *results})


def choice_of(run: Run, step: str, *, ema: bool) -> Choice:
    """The weights of a step; without a step, the result.

    Raises:
        Refusal: 404 if there are none.
    """
    saved = SavedWeights.of(run.folder)
    try:
        if not step or step == str(saved.result):
            return find_choice(run.folder, ema=ema)
        if step.isdecimal() and int(step) in saved.checkpoints:
            return find_choice(run.folder, step, ema=ema)
    except UserError as error:
        raise Refusal(404, str(error)) from None
    raise Refusal(404, f"{run.name} has no weights of step {step}.")


def strength_in(request: Request) -> float:
    """The strength that a request names, 1 by default.

    Raises:
        Refusal: 400 if it is not a number, or 0.
    """
    text = request.query_params.get("strength", "1")
    try:
        strength = parse_number(text)
    except ValueError as error:
        raise Refusal(400, f"The strength {text[:40]!r} {error} such as 0.75.") from None
    if strength == 0:
        raise Refusal(400, "Strength 0 is the untrained model: there is no file for it.")
    return strength


def show_use(request: Request) -> Response:
    """How to get the file of weights: `?step=600&strength=0.75`; `&built_in=0` leaves it out."""
    run = chosen(request)
    step = request.query_params.get("step", "")
    ema = request.query_params.get("ema") == "1"
    strength = strength_in(request)
    built_in = request.query_params.get("built_in", "1") != "0"

    def draw() -> str:
        values = use(run, step, strength, ema=ema, built_in=built_in)
        return html.render("page/runs/table.html.jinja", part="use", run=run, **values)

    return HTMLResponse(draw_part("Use this", draw))


def use(run: Run, step: str, strength: float, *, ema: bool, built_in: bool) -> dict[str, Any]:
    """Template values for the panel of some weights.

    Args:
        built_in: whether the strength is multiplied into the file.
    """
    choice = choice_of(run, step, ema=ema)
    is_dora = not choice.is_full and _is_dora(choice.path)
    folded = strength if built_in and not is_dora else 1.0
    checkpoint = None if step in ("", str(SavedWeights.of(run.folder).result)) else choice.step
    given: dict[str, Any] = {"checkpoint": checkpoint, "ema": ema}
    files = [] if choice.is_full else [_file(run, step, choice, form, folded) for form in PROGRAMS]
    command = command_for(str(run.folder), "comfyui", strength=folded, **given)
    if not choice.is_full and files[0]["obstacle"]:
        command = command_for(str(run.folder), "diffusers", strength=folded, **given)
    return {
        "choice": choice,
        "step": step,
        "strength": strength,
        "left": strength / folded,
        "built_in": folded == strength,
        "why_apart": MAGNITUDES_STAY if is_dora else "",
        "files": files,
        "place": PLACES["transformer" if choice.is_full else "adapter"],
        "command": command,
        "obstacle": why_not_one_file(choice.path) if choice.is_full else "",
        "program": program_for(run, choice, strength),
    }


def _file(run: Run, step: str, choice: Choice, form: LoraForm, strength: float) -> dict[str, Any]:
    """A download for a program, or why there is none."""
    obstacle = why_not(choice.path, form, strength)
    query: dict[str, str] = {"form": form}
    if step:
        query["step"] = step
    if strength != 1.0:
        query["strength"] = f"{strength:g}"
    if choice.ema:
        query["ema"] = "1"
    size = "" if obstacle else size_text(rewritten(choice.path, form, strength).size)
    return {
        "program": PROGRAMS[form],
        "address": f"/download/{run.id}?{urlencode(query)}",
        "name": choice.file_name(form, strength),
        "size": size,
        "obstacle": obstacle,
    }


def _is_dora(path: Path) -> bool:
    try:
        return holds_magnitudes(weights_header(path))
    except WeightsError:
        return False


def program_for(run: Run, choice: Choice, strength: float) -> str:
    """The Python program of the run's report, for these weights; empty without one."""
    program = html.program_in(run.folder / REPORT_FILE)
    if choice.is_full or not LOADED.search(program):
        is_checkpoint = any(FOLDER_NAME.fullmatch(folder.name) for folder in choice.path.parents)
        return "" if is_checkpoint or strength != 1.0 else program
    file = f'"{choice.path.parent.as_posix()}", weight_name="{choice.path.name}"'
    lines = f'pipe.load_lora_weights({file}, adapter_name="chosen")'
    if strength != 1.0:
        lines += f'\npipe.set_adapters("chosen", {strength:g})'
    return LOADED.sub(lambda _: lines, program, count=1)


def send_file(request: Request) -> Response:
    """A file of weights: `?step=600&strength=0.75&form=comfyui`; as it is without a form."""
    run = chosen(request)
    form = request.query_params.get("form", "")
    choice = choice_of(
        run, request.query_params.get("step", ""), ema=request.query_params.get("ema") == "1"
    )
    if choice.is_full:
        raise Refusal(404, f"{run.name} is a full fine-tune, in {choice.path}.")
    strength = strength_in(request)
    if not form and strength == 1.0:
        return FileResponse(choice.path, filename=choice.file_name(""), media_type=BINARY)
    for known in PREFIXES:
        if form == known:
            return _send(choice, known, strength)
    raise Refusal(404, f"form: {form[:40]!r} is neither comfyui nor diffusers.")


def as_attachment(name: str) -> str:
    """The header that saves an answer under a name; a header itself holds only ASCII letters."""
    if name.isascii():
        return f'attachment; filename="{name}"'
    return f"attachment; filename*=utf-8''{quote(name)}"


def _send(choice: Choice, form: LoraForm, strength: float) -> Response:
    """A file in a form, with a strength in it, made while it is sent."""
    obstacle = why_not(choice.path, form, strength)
    if obstacle:
        raise Refusal(404, obstacle)
    file = rewritten(choice.path, form, strength)
    headers = {
        "content-disposition": as_attachment(choice.file_name(form, strength)),
        "content-length": str(file.size),
        "accept-ranges": "none",
    }
    return StreamingResponse(file.parts(), headers=headers, media_type=BINARY)
