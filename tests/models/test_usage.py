"""The program that a report shows for a result runs unchanged, for every family and task."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from simpletuner.config.schema import FamilyOptions, family_groups
from simpletuner.models.adapter import load_adapter
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import OriginalWeights, Task
from simpletuner.models.usage import Usage
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import Workspace

CASES: list[tuple[str, Task]] = [
    ("kandinsky5-image", "t2i"),
    ("kandinsky5-image", "i2i"),
    ("kandinsky5-video", "t2v"),
    ("kandinsky5-video", "i2v"),
    ("sanavideo", "t2v"),
    ("sanavideo", "i2v"),
]


def usage_of(checkpoint: Path, task: Task, **changes: Any) -> Usage:
    usage = Usage(
        model=str(checkpoint),
        lora=None,
        task=task,
        dtype="float32",
        prompt='a "star"',
        negative_prompt="",
        size=(64, 64),
        frames=5,
        frame_rate=8.0,
        steps=2,
        guidance=2.0,
        seed=7,
        options=FamilyOptions({group: group() for group in family_groups()}),
    )
    return replace(usage, **changes)


def checkpoint_of(family: str, task: Task, folder: Path, sana_checkpoint: Path) -> Path:
    return sana_checkpoint if family == "sanavideo" else make_checkpoint(folder / "model", task)


@pytest.mark.parametrize(
    ("family", "task", "solver"),
    [*((*case, None) for case in CASES), (*CASES[2], "unipc"), (*CASES[4], "dpm++")],
)
def test_the_snippet_runs_for_every_family_task_and_solver(
    family: str,
    task: Task,
    solver: str | None,
    tmp_path: Path,
    sana_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = usage_of(checkpoint_of(family, task, tmp_path, sana_checkpoint), task, solver=solver)
    Image.new("RGB", (100, 60), "red").save(tmp_path / "source.png")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with contextlib.chdir(tmp_path):
        exec(load_adapter(FAMILIES[family]).usage_snippet(usage), {})

    assert (tmp_path / ("picture.png" if task in ("t2i", "i2i") else "clip.mp4")).stat().st_size > 0


def test_the_snippet_loads_a_transformer_from_its_original_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "t2v")
    (weights,) = (checkpoint / "transformer").glob("*.safetensors")
    file = weights.rename(tmp_path / "original.safetensors")
    original = OriginalWeights(
        "someone/original", "model/original.safetensors", "", {"attention_P": 0.7}
    )
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repository, path: str(file))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    written = load_adapter(FAMILIES["kandinsky5-video"]).usage_snippet(
        usage_of(checkpoint, "t2v", original=original)
    )
    assert 'hf_hub_download("someone/original", "model/original.safetensors")' in written

    values: dict[str, Any] = {}
    with contextlib.chdir(tmp_path):
        exec(written, values)

    assert values["pipe"].transformer.config.attention_P == 0.7
    assert (tmp_path / "clip.mp4").stat().st_size > 0


@pytest.mark.parametrize(("family", "task"), CASES)
def test_the_snippet_of_a_model_card_needs_only_diffusers(
    family: str, task: Task, tmp_path: Path, sana_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = usage_of(checkpoint_of(family, task, tmp_path, sana_checkpoint), task)
    write = load_adapter(FAMILIES[family]).usage_snippet
    programs = {alone: write(replace(usage, alone=alone)) for alone in (False, True)}
    Image.new("RGB", (100, 60), "red").save(tmp_path / "source.png")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # Packages that this environment does not have: torchvision's processor, and the encoder of
    # clips.
    load = diffusers.DiffusionPipeline.from_pretrained.__func__

    def from_pretrained(pipeline: Any, model: str, **settings: Any) -> Any:
        if family != "sanavideo":
            settings.setdefault("tokenizer", load_processor(model))
        return load(pipeline, model, **settings)

    monkeypatch.setattr(
        diffusers.DiffusionPipeline, "from_pretrained", classmethod(from_pretrained)
    )
    monkeypatch.setattr(diffusers.utils, "export_to_video", lambda frames, path, fps, quality: None)

    drawn = {}
    for alone, program in programs.items():
        values: dict[str, Any] = {}
        with contextlib.chdir(tmp_path):
            exec(program, values)
        frames = [values["picture"]] if "picture" in values else values["frames"]
        drawn[alone] = np.stack(frames)

    assert "simpletuner" not in programs[True]
    assert programs[True].startswith("# pip install torch diffusers transformers accelerate")
    assert np.array_equal(drawn[False], drawn[True])


def test_the_snippet_of_a_run_reproduces_its_last_preview(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To one of 255 levels, with a shift that is not the checkpoint's own.

    Rounding differs, since the run encodes the template once for all captions (`prompt_start`), and
    the pipeline with every caption.
    """
    settings = [
        "validation_disable=false",
        "flow_schedule_shift=2",
        "max_train_steps=1",
        "validation_seed=3",
        "validation_noise_scheduler=unipc",
    ]
    assert workspace.train(*settings) == 0
    report = workspace.path("output/training_report.html").read_text()
    snippet = unescape(report.partition("<pre>")[2].partition("</pre>")[0])
    assert 'pipe.load_lora_weights("output")' in snippet
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with workspace.inside():
        exec(snippet, {})
    file = workspace.path("output/validation_images/step_1_validation_0_128x128.png")
    preview = np.asarray(Image.open(file)).astype(int)
    drawn = np.asarray(Image.open(workspace.path("picture.png"))).astype(int)
    assert np.abs(drawn - preview).max() <= 1


@pytest.mark.parametrize(
    ("task", "lora", "more"),
    [
        ("t2i", None, []),
        ("i2i", "lora.safetensors", ["peft"]),
        ("t2v", None, ["imageio", "imageio-ffmpeg"]),
        ("i2v", "lora.safetensors", ["peft", "imageio", "imageio-ffmpeg"]),
    ],
)
def test_the_packages_of_a_result_are_those_that_its_code_needs(
    task: Task, lora: str | None, more: list[str], tmp_path: Path
) -> None:
    usage = usage_of(tmp_path, task, lora=lora)

    assert usage.packages == ["torch", "diffusers", "transformers", "accelerate", *more]
