"""Whole runs with token routes, which previews do not use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tools.runs import CLIPS, LORA, assert_equal, make_clip_workspace
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow(4)

ROUTES: dict[str, Any] = {
    "routes": [{"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": -1}]
}


def read_lora(run: Workspace) -> dict[str, torch.Tensor]:
    return load_file(run.path(LORA))


def assert_not_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert any(not torch.equal(actual[name], expected[name]) for name in expected)


def read_previews(run: Workspace) -> dict[str, bytes]:
    paths = run.path("output/validation_images").glob("step_1_*")
    return {path.name: path.read_bytes() for path in paths}


def test_an_interrupted_run_with_token_routes_continues_bit_exactly(
    tmp_path: Path, filled: Workspace
) -> None:
    straight = filled.copy(
        tmp_path / "straight", tread_config=ROUTES, gradient_accumulation_steps=2
    )
    assert straight.train() == 0
    stopped = straight.stopped(tmp_path / "stopped", 2)

    assert stopped.train() == 0

    assert stopped.metrics() == straight.metrics()
    assert_equal(read_lora(stopped), read_lora(straight))


def test_token_routes_can_be_left_out_of_the_last_steps(tmp_path: Path, filled: Workspace) -> None:
    routed = filled.copy(tmp_path / "routed", tread_config=ROUTES)
    plain = filled.copy(tmp_path / "plain")
    assert routed.train() == 0
    assert plain.train() == 0
    assert_not_equal(read_lora(routed), read_lora(plain))
    routed.write_config(tread_config=None)

    assert routed.train("max_train_steps=6") == 0


def test_previews_do_not_use_token_routes(tmp_path: Path, t2i_checkpoint: Path) -> None:
    """At a learning rate of almost nothing, both runs end with the same weights."""
    settings: dict[str, Any] = {
        "max_train_steps": 1,
        "learning_rate": 1e-30,
        "validation_disable": False,
        "num_eval_images": 1,
    }
    routed = Workspace.create(tmp_path / "routed", t2i_checkpoint, tread_config=ROUTES, **settings)
    plain = Workspace.create(tmp_path / "plain", t2i_checkpoint, **settings)

    assert routed.train() == 0
    assert plain.train() == 0

    previews = read_previews(routed)
    assert previews
    assert previews == read_previews(plain)


def test_token_routes_work_with_block_sparse_attention(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "nabla", "i2v", nabla=True)
    # Both runs share their caches.
    clips = {
        **CLIPS,
        "resolution": 256,
        "crop": True,
        "crop_style": "center",
        "cache_dir_vae": str(tmp_path / "vae"),
    }
    texts = {**DATASETS[1], "cache_dir": str(tmp_path / "text")}
    routed = make_clip_workspace(tmp_path / "routed", checkpoint, "i2v-pro-sft-5s")
    routed.write_datasets([clips, texts])
    plain = routed.copy(tmp_path / "plain")
    routed.write_config(tread_config=ROUTES)

    assert routed.train("max_train_steps=1") == 0
    assert plain.train("max_train_steps=1") == 0

    assert routed.metrics()[0]["train_loss"] > 0
    assert_not_equal(read_lora(routed), read_lora(plain))
