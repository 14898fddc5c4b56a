"""Whole runs of each kind of adapter: stopped and resumed, published, and shown in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5T2IPipeline
from safetensors.torch import load_file

from simpletuner.models.kandinsky5.loading import load_processor
from tests.tools.cases import first_of
from tests.tools.refusals import complaint
from tests.tools.runs import assert_same_run
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
RUN: dict[str, Any] = {
    "max_train_steps": 6,
    "checkpoint_step_interval": 3,
    "use_ema": True,
    "caption_dropout_probability": 0.3,
}
KINDS: dict[str, dict[str, Any]] = {
    "lokr": {"lora_type": "lokr", "lora_rank": 2, "optimizer": "optimi-adamw"},
    "lycoris": {"lora_type": "lycoris", "lycoris_config": "../lycoris.json"},
    "lora+": {"lora_plus_ratio": 16, "optimizer": "optimi-adamw"},
}
LYCORIS_CONFIG = {
    "algo": "lokr",
    "multiplier": 1.0,
    "full_matrix": True,
    "factor": 4,
    "apply_preset": {"target_module": ["Attention"]},
}


def assert_loads_with_its_average(run: Workspace, checkpoint: Path) -> None:
    """The stock pipeline loads both results, and the average is not the result."""
    pipeline = Kandinsky5T2IPipeline.from_pretrained(
        checkpoint, tokenizer=load_processor(checkpoint)
    )
    pipeline.load_lora_weights(run.path("output"))
    pipeline.load_lora_weights(run.path("output/ema"), adapter_name="average")
    for path in run.path("output/ema").glob("*.safetensors"):
        average = load_file(path)
        result = load_file(run.path("output") / path.name)
        differs = [name for name in result if not torch.equal(average[name], result[name])]
        assert differs, path.name


def assert_conversion_is_shown(run: Workspace, kind: str, output: str) -> None:
    """A kind that was converted to a LoRA names its share of a prediction and its own file."""
    assert "of a prediction" in output
    assert f"{kind}_weights.safetensors" in output
    assert run.path(f"output/checkpoint-3/ema/{kind}_weights.safetensors").is_file()
    report = run.path("output/training_report.html").read_text(encoding="utf-8")
    assert "Converted from another kind" in report


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_every_kind_of_adapter_continues_bit_exactly_and_loads_in_the_stock_pipeline(
    tmp_path: Path, filled: Workspace, t2i_checkpoint: Path, kind: str, capsys: Capture
) -> None:
    (tmp_path / "lycoris.json").write_text(json.dumps(LYCORIS_CONFIG))
    straight = filled.copy(tmp_path / "straight", **RUN, **KINDS[kind])
    assert straight.train() == 0
    output = capsys.readouterr().out
    stopped = straight.stopped(tmp_path / "stopped", 3)

    assert stopped.train("resume_from_checkpoint=latest") == 0

    assert_same_run(straight, stopped)
    assert_loads_with_its_average(straight, t2i_checkpoint)
    if kind != "lora+":
        assert_conversion_is_shown(straight, kind, output)
        as_lora = ("max_train_steps=9", "lora_type=standard", "lora_rank=4")
        assert stopped.train(*as_lora) == 2, "a run cannot change its kind"


def test_init_lora_refuses_a_lokr_file(workspace: Workspace, capsys: Capture) -> None:
    assert workspace.train("lora_type=lokr", "lora_rank=2", "max_train_steps=1") == 0
    settings = ("init_lora=output/lokr_weights.safetensors", "output_dir=other")

    message = complaint(workspace, capsys, "plan", *settings)

    assert "take the LoRA beside it" in message


def test_lycoris_requires_its_config_file(workspace: Workspace, capsys: Capture) -> None:
    unset = complaint(workspace, capsys, "plan", "lora_type=lycoris")
    missing = complaint(
        workspace, capsys, "plan", "lora_type=lycoris", "lycoris_config=nowhere.json"
    )

    assert "is required" in unset
    assert "nowhere.json" in missing
