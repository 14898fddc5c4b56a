"""The program that the report shows for a result: it runs as it stands, for every family and task."""

from __future__ import annotations

import contextlib
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from simpletuner.config.schema import FamilyOptions, family_groups
from simpletuner.models.registry import FAMILIES, load_adapter
from simpletuner.models.spec import Task
from simpletuner.models.usage import Usage
from tests.tiny import make_checkpoint
from tests.workspace import Workspace

CASES: list[tuple[str, Task]] = [
    ("kandinsky5-image", "t2i"),
    ("kandinsky5-image", "i2i"),
    ("kandinsky5-video", "t2v"),
    ("kandinsky5-video", "i2v"),
    ("sanavideo", "t2v"),
    ("sanavideo", "i2v"),
]


@pytest.mark.parametrize(
    ("family", "task", "solver"), [*((*case, None) for case in CASES), (*CASES[2], "unipc"), (*CASES[4], "dpm++")]
)
def test_the_snippet_runs(
    family: str, task: Task, solver: str | None, tmp_path: Path, sana_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = sana_checkpoint if family == "sanavideo" else make_checkpoint(tmp_path / "model", task)
    options = FamilyOptions({group: group() for group in family_groups()})
    usage = Usage(
        str(checkpoint), None, task, "float32", 'a "star"', "", (64, 64), 5, 8.0, 2, 2.0, 7, options, solver=solver
    )
    Image.new("RGB", (100, 60), "red").save(tmp_path / "source.png")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with contextlib.chdir(tmp_path):
        exec(load_adapter(FAMILIES[family]).usage_snippet(usage), {})
    assert (tmp_path / ("picture.png" if task in ("t2i", "i2i") else "clip.mp4")).stat().st_size > 0


def test_the_snippet_of_a_run_draws_its_last_preview(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """To one of 255 levels, with a shift that is not the checkpoint's own.

    The run encodes the template once for all captions (`prompt_start`), the pipeline with each: rounding differs.
    """
    settings = ["validation_disable=false", "flow_schedule_shift=2", "max_train_steps=1", "validation_seed=3"]
    settings.append("validation_noise_scheduler=unipc")
    assert workspace.train(*settings) == 0
    report = workspace.path("output/training_report.html").read_text()
    snippet = unescape(report.partition("<pre>")[2].partition("</pre>")[0])
    assert 'pipe.load_lora_weights("output")' in snippet
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with workspace.inside():
        exec(snippet, {})
    preview = workspace.path("output/validation_images/step_1_validation_0_128x128.png")
    drawn, seen = (np.asarray(Image.open(path)) for path in (workspace.path("picture.png"), preview))
    assert np.abs(drawn.astype(int) - seen.astype(int)).max() <= 1
