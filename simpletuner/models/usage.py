"""Generates Python code that reproduces a preview from a result with diffusers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.config.schema import FamilyOptions
from simpletuner.config.types import Size
from simpletuner.models.spec import OriginalWeights, Task


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
        alone: for readers of a model card, who have diffusers but not this program.
        original: the transformer, if it is not in the pipeline's repository.
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
    alone: bool = False
    original: OriginalWeights | None = None

    @property
    def packages(self) -> list[str]:
        """What to install for a program that runs without this one."""
        packages = ["torch", "diffusers", "transformers", "accelerate"]
        if self.lora is not None:
            packages.append("peft")
        if self.task in ("t2v", "i2v"):
            packages += ["imageio", "imageio-ffmpeg"]
        return packages


EULER = "FlowMatchEulerDiscreteScheduler"
# diffusers schedulers by value of `validation_noise_scheduler`.
SOLVERS = {
    "euler": EULER,
    "unipc": "UniPCMultistepScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
}
# Arguments of the last two for flow models; Euler is made for these.
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}


def solver_code(name: str, shift: str) -> str:
    """An expression that creates a scheduler; `shift` is an expression too."""
    if name == "euler":
        return f"{EULER}(shift={shift})"
    arguments = []
    for key, value in FLOW.items():
        literal = text(value) if isinstance(value, str) else value
        arguments.append(f"{key}={literal}")
    return f"{SOLVERS[name]}({', '.join(arguments)}, flow_shift={shift})"


def text(value: str) -> str:
    """A string literal in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def snippet(
    usage: Usage,
    pipeline: str,
    load: list[str],
    *,
    imports: Sequence[str] = (),
    scheduler: str | None = None,
    more: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> str:
    """Python code that samples with a pipeline and saves the output.

    Args:
        load: lines that create `pipe`.
        imports: import lines besides the common ones.
        scheduler: an expression, starting with the class, for a scheduler that replaces the
            checkpoint's.
        more: family-specific arguments of the pipeline's call.
        packages: what to install besides `Usage.packages`.
    """
    classes = {pipeline}
    if scheduler is not None:
        classes.update(re.findall(r"^\w+", scheduler))
    code = _template().render(
        usage=usage,
        is_clip=usage.task in ("t2v", "i2v"),
        takes_picture=usage.task in ("i2i", "i2v"),
        classes=sorted(classes),
        load=load,
        imports=imports,
        scheduler=scheduler,
        more=more,
        packages=[*usage.packages, *packages],
        text=text,
    )
    return code.rstrip()


@functools.cache
def _template() -> Any:
    """The jinja template of all snippets, compiled once."""
    # Imported here because only pages about a result need it.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False
    )
    file = Path(__file__).with_name("usage.py.jinja")
    return environment.from_string(file.read_text(encoding="utf-8"))
