"""Adapters of tiny Kandinsky checkpoints, and what stock pipelines pass to their transformer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers import Kandinsky5I2IPipeline, Kandinsky5T2IPipeline
from PIL import Image

from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import RunConfig
from simpletuner.errors import Problems
from simpletuner.models.adapter import AdapterSettings
from simpletuner.models.kandinsky5.image import Kandinsky5ImageAdapter
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE, KANDINSKY5_VIDEO
from simpletuner.models.kandinsky5.video import Kandinsky5VideoAdapter
from simpletuner.models.source import ModelSource

CPU = torch.device("cpu")


def make_config(checkpoint: Path, task: str = "t2i", **settings: Any) -> RunConfig:
    """The config of a run on a tiny checkpoint."""
    values = {
        "model_type": "lora",
        "model_family": "kandinsky5-image",
        "model_flavour": f"{task}-lite-sft",
        "pretrained_model_name_or_path": str(checkpoint),
        **settings,
    }
    problems = Problems()
    config = resolve([Layer("test", list(values.items()))], problems)
    assert config is not None, problems
    return config


def make_adapter(checkpoint: Path, task: str = "t2i", **settings: Any) -> Kandinsky5ImageAdapter:
    """The adapter of a tiny checkpoint."""
    config = make_config(checkpoint, task, **settings)
    flavour = KANDINSKY5_IMAGE.flavour(f"{task}-lite-sft")
    source = ModelSource.from_settings(KANDINSKY5_IMAGE, flavour, config.flat)
    return Kandinsky5ImageAdapter(adapter_settings(config), flavour, source)


VIDEO_FLAVOURS = {"t2v": "t2v-lite-sft-5s", "i2v": "i2v-lite-5s"}


def make_video_adapter(
    checkpoint: Path, task: str, size: tuple[int, int] | None = (96, 64), **settings: Any
) -> Kandinsky5VideoAdapter:
    """The adapter of a tiny checkpoint of clips, whose result is sampled at `size`."""
    flavour = KANDINSKY5_VIDEO.flavour(VIDEO_FLAVOURS[task])
    values = {
        "model_type": "lora",
        "model_family": "kandinsky5-video",
        "model_flavour": flavour.name,
        "pretrained_model_name_or_path": str(checkpoint),
        **settings,
    }
    problems = Problems()
    config = resolve([Layer("test", list(values.items()))], problems)
    assert config is not None, problems
    source = ModelSource.from_settings(KANDINSKY5_VIDEO, flavour, config.flat)
    return Kandinsky5VideoAdapter(adapter_settings(config), flavour, source, size)


def adapter_settings(config: RunConfig) -> AdapterSettings:
    """The settings of an adapter, as a run selects them."""
    return AdapterSettings(
        config.text, config.caching, config.family, config.validation.validation_noise_scheduler
    )


def stock_pipeline(checkpoint: Path, task: str, size: tuple[int, int], template: Any) -> Any:
    """The stock pipeline of a checkpoint, at one size, with the template the trainer uses."""
    pipeline_class = Kandinsky5I2IPipeline if task == "i2i" else Kandinsky5T2IPipeline
    pipeline = pipeline_class.from_pretrained(checkpoint, tokenizer=load_processor(checkpoint))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.resolutions = [size]
    pipeline.prompt_template = template.text
    pipeline.prompt_template_encode_start_idx = template.crop
    return pipeline


class Recorder:
    """Replaces a transformer's forward: records the inputs of every call, and returns `answer`."""

    def __init__(self, transformer: Any, answer: Callable[[dict[str, Any]], torch.Tensor]) -> None:
        self.calls: list[dict[str, Any]] = []
        self.answer = answer
        transformer.forward = self

    def __call__(self, **inputs: Any) -> Any:
        self.calls.append(inputs)
        output = self.answer(inputs)
        return SimpleNamespace(sample=output) if inputs.get("return_dict", True) else output


def zeros(inputs: dict[str, Any]) -> torch.Tensor:
    """A velocity of zero: the latents stay what they are."""
    return torch.zeros_like(inputs["hidden_states"][..., :16])


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)
