"""Python code that uses a Sana Video result."""

from __future__ import annotations

from simpletuner.models import usage as parts
from simpletuner.models.sanavideo.previews import I2V_SHIFT
from simpletuner.models.usage import Usage


def usage_snippet(usage: Usage) -> str:
    """Python code that reproduces the preview of the same prompt and seed."""
    pipeline = "SanaImageToVideoPipeline" if usage.task == "i2v" else "SanaVideoPipeline"
    exact = ("use_resolution_binning=False", 'output_type="pil"')
    solver = usage.solver or ("euler" if usage.task == "i2v" else None)
    shift = f"{I2V_SHIFT:g}" if usage.task == "i2v" else "pipe.scheduler.config.flow_shift"
    scheduler = parts.solver_code(solver, shift) if solver else None
    classes = [pipeline, parts.SOLVERS[solver]] if solver else [pipeline]
    lines = [
        *parts.imports(usage, classes=classes),
        f"pipe = {pipeline}.from_pretrained({parts.text(usage.model)}, dtype=torch.{usage.dtype})",
        *parts.preparation(usage, scheduler),
        *parts.picture(usage),
        "frames = pipe(",
        *parts.arguments(usage, f"frames={usage.frames}", *exact),
        ").frames[0]",
        parts.save_clip(usage),
    ]
    return "\n".join(lines)
