"""Python code that reproduces a preview with a result: its inputs, and the lines that all families share."""

from __future__ import annotations

import json
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


def imports(usage: Usage, *more: str, classes: list[str]) -> list[str]:
    """Import lines; `classes` are imported from diffusers."""
    lines = ["import torch", f"from diffusers import {', '.join(sorted(classes))}"]
    if usage.needs_picture:
        lines.append("from PIL import Image, ImageOps")
    if usage.task in ("t2v", "i2v"):
        return [
            "from pathlib import Path",
            "",
            *lines,
            *more,
            "from simpletuner.validation.clip_writer import write_mp4",
            "",
        ]
    return [*lines, *more, ""]


def preparation(usage: Usage, scheduler: str | None = None) -> list[str]:
    """Lines that load the LoRA, replace the scheduler and choose the device."""
    lines = [] if usage.lora is None else [f"pipe.load_lora_weights({text(usage.lora)})"]
    if scheduler is not None:
        lines.append(f"pipe.scheduler = {scheduler}")
    return [*lines, 'pipe.to("cuda" if torch.cuda.is_available() else "cpu")', ""]


def picture(usage: Usage) -> list[str]:
    """Lines that load the source picture at the sampled size."""
    if not usage.needs_picture:
        return []
    return [f'source = ImageOps.fit(Image.open("source.png").convert("RGB"), {usage.size})  # your picture', ""]


def arguments(usage: Usage, *more: str) -> list[str]:
    """Arguments of the pipeline's call, one per line."""
    width, height = usage.size
    lines = [
        f"prompt={text(usage.prompt)}",
        f"negative_prompt={text(usage.negative_prompt)}",
        *(["image=source"] if usage.needs_picture else []),
        f"height={height}",
        f"width={width}",
        *more,
        f"num_inference_steps={usage.steps}",
        f"guidance_scale={usage.guidance:g}",
        f"generator=torch.Generator().manual_seed({usage.seed})",
    ]
    return [f"    {line}," for line in lines]


def save_clip(usage: Usage) -> str:
    """The line that saves a clip."""
    return f'write_mp4(Path("clip.mp4"), frames, rate={usage.frame_rate:g})'
