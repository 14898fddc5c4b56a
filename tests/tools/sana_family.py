"""Adapters of tiny Sana checkpoints, and what stock pipelines pass to their transformer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaImageToVideoPipeline, SanaVideoPipeline
from PIL.Image import Image

from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import RunConfig
from simpletuner.errors import Problems
from simpletuner.models.sanavideo.spec import LTX2, SANA_VIDEO
from simpletuner.models.sanavideo.video import SanaVideoAdapter
from simpletuner.models.source import ModelSource
from tests.tools.families import adapter_settings, picture

SIZE = (96, 64)  # width, height
FRAMES = 9
LATENT_FRAMES = 3  # (9 - 1) / 4 + 1
PROMPT = "A RED ball rolls down the hill, seen from far away "
SEED = 5


def flavour_of(checkpoint: Path) -> str:
    """The flavour of a tiny checkpoint, by its VAE."""
    vae = json.loads((checkpoint / "vae" / "config.json").read_text())
    return "2b-720p" if vae["_class_name"] == LTX2 else "2b-480p"


def make_sana_config(checkpoint: Path, **settings: Any) -> RunConfig:
    """The config of a run on a tiny checkpoint."""
    values = {
        "model_type": "lora",
        "model_family": "sanavideo",
        "pretrained_model_name_or_path": str(checkpoint),
        "model_flavour": flavour_of(checkpoint),
        **settings,
    }
    problems = Problems()
    layers = [Layer("test", list(values.items()))]
    config = resolve(layers, problems, SANA_VIDEO.defaults, SANA_VIDEO.fixed)
    assert not [problem for problem in problems if problem.fatal], problems
    return config


def make_sana_adapter(checkpoint: Path, **settings: Any) -> SanaVideoAdapter:
    """The adapter of a tiny checkpoint."""
    config = make_sana_config(checkpoint, **settings)
    flavour = SANA_VIDEO.flavour(flavour_of(checkpoint))
    source = ModelSource.from_settings(SANA_VIDEO, flavour, config.flat)
    return SanaVideoAdapter(adapter_settings(config), flavour, source)


def stock_pipeline(checkpoint: Path, task: str) -> Any:
    """The stock pipeline of a task with the scheduler that its users give it."""
    pipeline_class = SanaImageToVideoPipeline if task == "i2v" else SanaVideoPipeline
    pipeline: Any = pipeline_class.from_pretrained(checkpoint)
    if task == "i2v":
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=8.0)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class SanaRecorder:
    """Replaces a Sana transformer's forward: records the inputs of every call.

    It returns `answer`, or zeros without one.
    """

    def __init__(
        self, transformer: Any, answer: Callable[[dict[str, Any]], torch.Tensor] | None = None
    ) -> None:
        self.calls: list[dict[str, Any]] = []
        self.answer = answer
        transformer.forward = self

    def __call__(self, hidden_states: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor]:
        call = {"hidden_states": hidden_states, **inputs}
        self.calls.append(call)
        if self.answer is None:
            return (torch.zeros_like(hidden_states),)
        return (self.answer(call),)


def record_pipeline(
    pipeline: Any, *, steps: int = 2, guidance: float = 1.0, **settings: Any
) -> list[dict[str, Any]]:
    """Everything that a stock pipeline passes to its transformer.

    The i2v pipeline starts from `first_frame()`.
    """
    recorder = SanaRecorder(pipeline.transformer)
    if isinstance(pipeline, SanaImageToVideoPipeline):
        settings["image"] = first_frame()
    pipeline(
        **{"prompt": PROMPT, **settings},
        width=SIZE[0],
        height=SIZE[1],
        frames=FRAMES,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(SEED),
        use_resolution_binning=False,
        output_type="latent",
    )
    return recorder.calls


def first_frame() -> Image:
    """The picture that i2v starts from."""
    return picture(*SIZE)


def clip() -> torch.Tensor:
    """Noise as a clip that begins with `first_frame()`; `1 3 F H W` in [-1, 1]."""
    frames = np.stack([np.array(picture(*SIZE, seed)) for seed in range(FRAMES)])
    pixels = torch.from_numpy(frames).float() / 255  # F H W 3
    return 2 * pixels.permute(3, 0, 1, 2)[None] - 1
