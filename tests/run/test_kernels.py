"""A run's kernels are those of its previews, of a resumed session and of `simpletuner sample`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from simpletuner.models import blocks
from simpletuner.speed import attention
from simpletuner.speed.attention import MeasuredChoice
from simpletuner.training import assemble
from tests.workspace import Workspace

pytestmark = pytest.mark.slow


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether calls that were timed had gradients; the faster kernel is another each time."""
    found: list[bool] = []

    def measure(backend: SDPBackend, *inputs: torch.Tensor) -> float:
        found.append(torch.is_grad_enabled())
        return float((backend == SDPBackend.CUDNN_ATTENTION) is not (len(found) % 4 in (1, 2)))

    monkeypatch.setattr(attention, "measure", measure)
    monkeypatch.setattr(assemble, "kernel_chooser", lambda *given: MeasuredChoice())
    return found


def test_nothing_is_timed_twice(
    tmp_path: Path, t2i_checkpoint: Path, timed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace.create(
        tmp_path / "run", t2i_checkpoint, pictures=4, validation_disable=False, max_train_steps=2
    )
    assert workspace.train() == 0
    assert set(timed) == {True, False}, "steps and previews"
    (known,) = json.loads(workspace.path(f"output/{blocks.CHOICES_FILE}").read_text()).values()
    assert set(known.values()) == {"flash", "cuDNN"}
    timed.clear()
    assert workspace.train("max_train_steps=3") == 0
    assert workspace.run("sample", "output", "--prompt", "a red square", "--output", "samples") == 0
    assert not timed

    monkeypatch.setattr(blocks, "describe_platform", lambda device: "another device")
    assert workspace.train("max_train_steps=4") == 0
    assert set(timed) == {True, False}
