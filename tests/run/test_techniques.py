"""A whole run with scheduled sampling and dealt noise: it continues bit for bit, and the plan
counts passes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpletuner.planning.techniques import table
from tests.techniques.facing import Facing, FacingSpec
from tests.tools.runs import assert_same_run
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow(4)

STEADY: dict[str, Any] = {
    "max_train_steps": 6,
    "checkpoint_step_interval": 3,
    "lr_scheduler": "constant",
}
SAMPLED = {"scheduled_sampling_max_step_offset": 2, "scheduled_sampling_probability": 0.5}


def test_scheduled_sampling_continues_bit_exactly(
    tmp_path: Path,
    t2i_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(table, "SPECS", (*table.SPECS, FacingSpec))
    straight = Workspace.create(
        tmp_path / "straight", t2i_checkpoint, pictures=4, use_ema=True, **STEADY, **SAMPLED
    )
    assert straight.train() == 0
    broken = straight.stopped(tmp_path / "broken", 3)

    assert broken.train() == 0

    assert_same_run(straight, broken)
    assert Facing.dealt >= 6 + 3
    assert "reflexflow_adr" in straight.metrics()[0]
    capsys.readouterr()
    assert straight.run("plan", "max_train_steps=9") == 0
    assert "with 0.83 extra forward passes a micro-step" in capsys.readouterr().out
