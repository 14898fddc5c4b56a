"""Whole runs with token routes: pictures and clips, stop and go, and previews that know nothing of
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.tools.runs import CLIPS, make_clip_workspace
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow(4)

ROUTES: dict[str, Any] = {
    "routes": [{"selection_ratio": 0.5, "start_layer_idx": 0, "end_layer_idx": -1}]
}
RESULT = "output/pytorch_lora_weights.safetensors"


def weights(workspace: Workspace) -> dict[str, Any]:
    return load_file(workspace.path(RESULT))


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all((one[name] == other[name]).all() for name in one)


def test_an_interrupted_run_with_token_routes_continues_bit_exactly(
    tmp_path: Path, filled: Workspace
) -> None:
    straight, plain = (
        filled.copy(tmp_path / name, tread_config=routes, gradient_accumulation_steps=2)
        for name, routes in (("straight", ROUTES), ("plain", None))
    )
    for run in (straight, plain):
        assert run.train() == 0
    runs = [straight, straight.stopped(tmp_path / "broken", 2), plain]
    assert runs[1].train() == 0
    assert runs[0].metrics() == runs[1].metrics()
    assert equal(weights(runs[0]), weights(runs[1]))
    assert not equal(weights(runs[0]), weights(runs[2])), "the route did nothing"
    runs[0].write_config(tread_config=None)
    assert runs[0].train("max_train_steps=6") == 0, "the last steps without routes"


def test_previews_do_not_use_token_routes(tmp_path: Path, t2i_checkpoint: Path) -> None:
    """At a learning rate of almost nothing, both runs end with the same weights."""
    pictures = []
    for name, routes in (("with", ROUTES), ("without", None)):
        run = Workspace.create(
            tmp_path / name,
            t2i_checkpoint,
            tread_config=routes,
            max_train_steps=1,
            learning_rate=1e-30,
            validation_disable=False,
            num_eval_images=1,
        )
        assert run.train() == 0
        files = sorted(run.path("output/validation_images").glob("step_1_*"))
        assert files
        pictures.append([np.array(Image.open(file)) for file in files])
    assert all(np.array_equal(one, other) for one, other in zip(*pictures, strict=True))


def test_token_routes_work_with_block_sparse_attention(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "nabla", "i2v", nabla=True)
    runs = [
        make_clip_workspace(tmp_path / name, checkpoint, "i2v-pro-sft-5s")
        for name in ("with", "without")
    ]
    runs[0].write_config(tread_config=ROUTES)
    for run in runs:
        crops = {
            "resolution": 256,
            "crop": True,
            "crop_style": "center",
            "cache_dir_vae": str(tmp_path / "vae"),
        }
        run.write_datasets(
            [{**CLIPS, **crops}, {**DATASETS[1], "cache_dir": str(tmp_path / "text")}]
        )
        assert run.train("max_train_steps=1") == 0
    assert runs[0].metrics()[0]["train_loss"] > 0
    assert not equal(*(weights(run) for run in runs))
