"""Whole runs of each kind of adapter: stopped and resumed, published, and told in the report."""

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

SETTINGS = {
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
FILE = {
    "algo": "lokr",
    "multiplier": 1.0,
    "full_matrix": True,
    "factor": 4,
    "apply_preset": {"target_module": ["Attention"]},
}


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_every_kind_of_adapter_continues_bit_exactly_and_loads_in_the_stock_pipeline(
    tmp_path: Path,
    filled: Workspace,
    t2i_checkpoint: Path,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "lycoris.json").write_text(json.dumps(FILE))
    straight = filled.copy(tmp_path / "straight", **SETTINGS, **KINDS[kind])
    assert straight.train() == 0
    told = capsys.readouterr().out
    broken = straight.stopped(tmp_path / "broken", 3)
    assert broken.train("resume_from_checkpoint=latest") == 0
    assert_same_run(straight, broken)
    pipeline = Kandinsky5T2IPipeline.from_pretrained(
        t2i_checkpoint, tokenizer=load_processor(t2i_checkpoint)
    )
    pipeline.load_lora_weights(straight.path("output"))
    pipeline.load_lora_weights(straight.path("output/ema"), adapter_name="average")
    for path in straight.path("output/ema").glob("*.safetensors"):
        average = load_file(path)
        trained = load_file(straight.path("output") / path.name)
        assert any(not torch.equal(average[name], each) for name, each in trained.items()), (
            path.name
        )
    if kind != "lora+":
        assert "of a prediction" in told
        assert f"{kind}_weights.safetensors" in told
        assert straight.path(f"output/checkpoint-3/ema/{kind}_weights.safetensors").is_file()
        assert "Converted from another kind" in straight.path(
            "output/training_report.html"
        ).read_text(encoding="utf-8")
        assert broken.train("max_train_steps=9", "lora_type=standard", "lora_rank=4") == 2, (
            "another kind"
        )


def test_init_lora_refuses_a_lokr_file(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workspace.train("--lora_type=lokr", "--lora_rank=2", "--max_train_steps=1") == 0
    told = complaint(
        workspace,
        capsys,
        "plan",
        "--init_lora=output/lokr_weights.safetensors",
        "--output_dir=other",
    )
    assert "take the LoRA beside it" in told


def test_lycoris_requires_its_config_file(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is required" in complaint(workspace, capsys, "plan", "--lora_type=lycoris")
    assert "nowhere.json" in complaint(
        workspace, capsys, "plan", "--lora_type=lycoris", "--lycoris_config=nowhere.json"
    )
