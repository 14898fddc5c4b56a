"""Python code that reproduces a preview with a result: its inputs, and the lines that all families share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from simpletuner.config.schema import FamilyOptions
from simpletuner.config.values import Size
from simpletuner.models.spec import Task


@dataclass(frozen=True)
class Usage:
    """A result, and the settings of the preview to reproduce.

    Attributes:
        model: hub id or folder of the pipeline; for a full fine-tune the exported folder.
        lora: folder or file for `load_lora_weights`; None for a full fine-tune.
        dtype: name of a torch dtype.
        options: the families' options.
        shift: shift of the scheduler; None keeps the checkpoint's.
        solver: value of `validation_noise_scheduler`.
    """

    model: str
    lora: str | None
    task: Task
    dtype: str
    prompt: str
    negative_prompt: str
    size: Size
    frames: int
    frame_rate: float
    steps: int
    guidance: float
    seed: int
    options: FamilyOptions
    shift: float | None = None
    solver: str | None = None

    @property
    def needs_picture(self) -> bool:
        return self.task in ("i2i", "i2v")


EULER = "FlowMatchEulerDiscreteScheduler"
# diffusers' schedulers by value of `validation_noise_scheduler`; the last two need arguments to sample flow models.
SOLVERS = {"euler": EULER, "unipc": "UniPCMultistepScheduler", "dpm++": "DPMSolverMultistepScheduler"}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


def solver_code(name: str, shift: str) -> str:
    """An expression that creates a scheduler; `shift` is one, too."""
    if name == "euler":
        return f"{EULER}(shift={shift})"
    settings = ", ".join(f"{key}={text(value) if isinstance(value, str) else value}" for key, value in FLOW.items())
    return f"{SOLVERS[name]}({settings}, flow_shift={shift})"


def text(value: str) -> str:
    """A string literal in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def snippet(
    usage: Usage, pipeline: str, load: list[str], *, imports: Sequence[str] = (), scheduler: str | None = None,
    more: Sequence[str] = (),
) -> str:  # fmt: skip
    """Python code that samples with a pipeline and saves what it returns.

    Args:
        load: lines that create `pipe`.
        imports: lines besides those that every snippet has.
        scheduler: an expression, which begins with the class, to replace the checkpoint's.
        more: arguments of the pipeline's call that other families lack.
    """
    is_clip, (width, height) = usage.task in ("t2v", "i2v"), usage.size
    classes = sorted({pipeline, scheduler.partition("(")[0].partition(".")[0]} if scheduler else {pipeline})
    lines = ["from pathlib import Path", ""] if is_clip else []
    lines += ["import torch", f"from diffusers import {', '.join(classes)}"]
    lines += ["from PIL import Image, ImageOps"] if usage.needs_picture else []
    lines += imports
    # Not diffusers' `export_to_video`, which stretches frames to sides that are multiples of 16.
    lines += ["from simpletuner.validation.clip_writer import write_mp4"] if is_clip else []
    lines += ["", *load]
    lines += [] if usage.lora is None else [f"pipe.load_lora_weights({text(usage.lora)})"]
    lines += [f"pipe.scheduler = {scheduler}"] if scheduler else []
    lines += ['pipe.to("cuda" if torch.cuda.is_available() else "cpu")', ""]
    if usage.needs_picture:
        lines += [f'source = ImageOps.fit(Image.open("source.png").convert("RGB"), {usage.size})  # your picture', ""]
    arguments = [
        f"prompt={text(usage.prompt)}",
        f"negative_prompt={text(usage.negative_prompt)}",
        *(["image=source"] if usage.needs_picture else []),
        f"height={height}",
        f"width={width}",
        *more,
        f"num_inference_steps={usage.steps}",
        f"guidance_scale={usage.guidance:g}",
        f"generator=torch.Generator().manual_seed({usage.seed})",
        *(['output_type="pil"'] if is_clip else []),
    ]
    lines += [f"{'frames' if is_clip else 'picture'} = pipe(", *(f"    {argument}," for argument in arguments)]
    if is_clip:
        return "\n".join([*lines, ").frames[0]", f'write_mp4(Path("clip.mp4"), frames, rate={usage.frame_rate:g})'])
    return "\n".join([*lines, ").image[0]", 'picture.save("picture.png")'])
