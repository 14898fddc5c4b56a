"""Whole runs with LayerSync, MixFlow and scheduled sampling: they continue bit for bit, and the plan counts passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_room
from tests.run.test_resume import assert_same_run
from tests.workspace import Workspace

pytestmark = pytest.mark.slow(4)

STEADY: dict[str, Any] = {"max_train_steps": 6, "checkpoint_step_interval": 3, "lr_scheduler": "constant"}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "mixflow": {"mixflow_enabled": True},
    "both": {
        "layersync_enabled": True, "layersync_student_block": 0, "layersync_teacher_block": 1,
        "scheduled_sampling_max_step_offset": 2, "scheduled_sampling_probability": 0.5,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> Workspace:
    """A run without techniques."""
    run = Workspace.create(tmp_path_factory.mktemp("plain") / "run", t2i_checkpoint, pictures=4, use_ema=True, **STEADY)
    with pytest.MonkeyPatch.context() as patch:
        make_room(patch)
        assert run.train() == 0
    return run


@pytest.mark.parametrize("name", TECHNIQUES)
def test_stop_and_go_equals_going_on(
    tmp_path: Path, plain: Workspace, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    straight = plain.stopped(tmp_path / "straight", 0)
    straight.write_config(**TECHNIQUES[name])
    assert straight.train() == 0
    broken = straight.stopped(tmp_path / "broken", 3)
    assert broken.train() == 0
    assert_same_run(straight, broken)
    assert straight.metrics() != plain.metrics()
    logged = {key for line in straight.metrics() for key in line}
    assert ({"layersync_loss", "reflexflow_adr"} <= logged) == (name == "both")
    capsys.readouterr()
    assert straight.run("plan", "max_train_steps=9") == 0
    assert ("with 0.83 extra forward passes a micro-step" in capsys.readouterr().out) == (name == "both")
