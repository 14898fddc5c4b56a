"""Whole runs: their repeated settings, what subscribes to their events, and when two are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from simpletuner.annexes.fitting.ready import plan_that_fits
from simpletuner.cli.execute import open_companions
from simpletuner.config.sources import parse_arguments
from simpletuner.distributed.world import World
from simpletuner.reporting.events import Event, EventStream
from simpletuner.run.train import run_plan
from tests.tools.clips import write_clip
from tests.tools.workspace import DATASETS, Workspace

LORA = "output/pytorch_lora_weights.safetensors"
STEPS = 6
# A run with all that a checkpoint has to restore: an average, random draws of the LoRA and of the
# captions, accumulated gradients and a schedule of the learning rate.
STATEFUL_RUN: dict[str, Any] = {
    "max_train_steps": STEPS,
    "checkpoint_step_interval": 3,
    "use_ema": True,
    "lora_dropout": 0.1,
    "caption_dropout_probability": 0.3,
    "gradient_accumulation_steps": 2,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 2,
}
PREVIEWED: dict[str, Any] = {
    "validation_disable": False,
    "validation_step_interval": 2,
    "disable_benchmark": True,
    "validation_disable_unconditional": False,
}
CLIPS: dict[str, Any] = {
    **DATASETS[0],
    "dataset_type": "video",
    "video": {"num_frames": 5, "min_frames": 5, "frame_rate": 12},
}
CLIP_RUN: dict[str, Any] = {
    "model_family": "kandinsky5-video",
    "train_batch_size": 1,
    "validation_num_video_frames": 17,
    "framerate": 12,
    "validation_resolution": "128x128",
    "max_train_steps": 3,
    "num_eval_images": 1,
}
SANA_RUN: dict[str, Any] = {"model_family": "sanavideo", "model_flavour": "2b-480p"}


def make_clip_workspace(folder: Path, checkpoint: Path, flavour: str) -> Workspace:
    """Three clips and a run of three steps."""
    workspace = Workspace.create(folder, checkpoint, pictures=0, model_flavour=flavour, **CLIP_RUN)
    for index in range(3):
        path = workspace.path(f"datasets/pictures/clip {index}.mp4")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_clip(path, seconds=1.0 + index / 4)
        path.with_suffix(".txt").write_text(f"clip number {index}\nदूसरा {index}")
    workspace.write_datasets([CLIPS, DATASETS[1]])
    return workspace


def train_with_subscribers(workspace: Workspace, *subscribers: Callable[[Event], None]) -> None:
    """Train in this process; subscribers get every event, and errors are raised."""
    events = EventStream(*subscribers)
    with workspace.inside():
        budget = plan_that_fits(parse_arguments([]))
        companions = open_companions(budget.plan, None, events, World())
        run_plan(budget, events, companions)


def training_state(run: Workspace, step: int) -> dict[str, Any]:
    """Everything in a checkpoint that training depends on.

    Python's own generator is left out: libraries may draw from it, and training does not use it.
    """
    checkpoint = run.path(f"output/checkpoint-{step}")
    state: dict[str, Any] = torch.load(
        checkpoint / "training_state" / "state.pt", weights_only=True
    )
    del state["random"]
    files = sorted(checkpoint.rglob("*.safetensors"))
    state["files"] = {str(path.relative_to(checkpoint)): load_file(path) for path in files}
    return state


def assert_equal(actual: Any, expected: Any, where: str = "state") -> None:
    """Two trees of dictionaries, lists, tensors and plain values are equal, bit for bit."""
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys(), where
        for key in actual:
            assert_equal(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(actual, list | tuple):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_equal(*pair, f"{where}[{index}]")
    elif isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected), where
    else:
        assert actual == expected, where


def assert_same_run(straight: Workspace, continued: Workspace) -> None:
    """Two runs of six steps have the same record, last checkpoint and result, bit for bit."""
    assert continued.metrics() == straight.metrics()
    assert_equal(training_state(continued, STEPS), training_state(straight, STEPS))
    if straight.path(LORA).exists():
        assert continued.path(LORA).read_bytes() == straight.path(LORA).read_bytes()
