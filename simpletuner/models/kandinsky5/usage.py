"""Python code that uses a Kandinsky 5 result."""

from __future__ import annotations

from simpletuner.models import usage as parts
from simpletuner.models.kandinsky5.options import KandinskyOptions
from simpletuner.models.kandinsky5.spec import IMAGE_SIZES, TEMPLATES
from simpletuner.models.usage import Usage

PIPELINES = {
    "t2i": "Kandinsky5T2IPipeline",
    "i2i": "Kandinsky5I2IPipeline",
    "t2v": "Kandinsky5T2VPipeline",
    "i2v": "Kandinsky5I2VPipeline",
}


def usage_snippet(usage: Usage) -> str:
    """Python code that reproduces the preview of the same prompt and seed."""
    pipeline, is_clip = PIPELINES[usage.task], usage.task in ("t2v", "i2v")
    imports = ["from simpletuner.models.kandinsky5.loading import load_processor"]
    is_official = usage.options.of(KandinskyOptions).text_template == "official"
    if is_official:
        imports.append("from simpletuner.models.kandinsky5.templates import OFFICIAL")
    scheduler = f"{parts.EULER}.from_config(pipe.scheduler.config, shift={usage.shift:g})" if usage.shift else None
    if usage.solver not in (None, "euler"):
        scheduler = parts.solver_code(
            usage.solver, f"{usage.shift:g}" if usage.shift else "pipe.scheduler.config.shift"
        )
    classes = [pipeline, parts.SOLVERS[usage.solver or "euler"]] if scheduler else [pipeline]
    lines = [
        *parts.imports(usage, *imports, classes=classes),
        f"model = {parts.text(usage.model)}",
        f"pipe = {pipeline}.from_pretrained(model, tokenizer=load_processor(model), dtype=torch.{usage.dtype})",
        *(_template(usage) if is_official else []),
        *_exact_size(usage, is_clip),
        *parts.preparation(usage, scheduler),
        *parts.picture(usage),
    ]
    if is_clip:
        call = ["frames = pipe(", *parts.arguments(usage, f"num_frames={usage.frames}"), ").frames[0]"]
        return "\n".join([*lines, *_pil(call), parts.save_clip(usage)])
    call = ["picture = pipe(", *parts.arguments(usage), ").image[0]", 'picture.save("picture.png")']
    return "\n".join([*lines, *call])


def _template(usage: Usage) -> list[str]:
    """Lines that set the prompt template of training."""
    name = TEMPLATES[usage.task]
    return [
        f'pipe.prompt_template = OFFICIAL["{name}"].text',
        f'pipe.prompt_template_encode_start_idx = OFFICIAL["{name}"].crop',
    ]


def _exact_size(usage: Usage, is_clip: bool) -> list[str]:
    """A line that sets the size: pipelines of pictures round it to a list of seven otherwise."""
    if is_clip or usage.size in IMAGE_SIZES:
        return []
    return [f"pipe.resolutions = [{usage.size}]  # sample exactly this size"]


def _pil(call: list[str]) -> list[str]:
    return [*call[:-1], '    output_type="pil",', call[-1]]
