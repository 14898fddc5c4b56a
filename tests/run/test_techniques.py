"""A whole run with scheduled sampling, and a technique that chooses the noise of each latent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpletuner.planning.techniques import table
from tests.techniques.facing import Facing, FacingSpec
from tests.tools.runs import assert_same_run
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow(4)

SCHEDULED_SAMPLING: dict[str, Any] = {
    "max_train_steps": 6,
    "checkpoint_step_interval": 3,
    "lr_scheduler": "constant",
    "use_ema": True,
    "scheduled_sampling_max_step_offset": 2,
    "scheduled_sampling_probability": 0.5,
}


def test_scheduled_sampling_continues_bit_exactly(
    tmp_path: Path,
    t2i_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(table, "SPECS", (*table.SPECS, FacingSpec))
    straight = Workspace.create(
        tmp_path / "straight", t2i_checkpoint, pictures=4, **SCHEDULED_SAMPLING
    )
    assert straight.train() == 0
    stopped = straight.stopped(tmp_path / "stopped", 3)

    assert stopped.train() == 0

    assert_same_run(straight, stopped)
    # The steps of the straight run and the last three again.
    assert Facing.micro_batches >= 6 + 3
    assert "reflexflow_adr" in straight.metrics()[0]

    # Half of the inputs are rolled out by 0, 1 or 2 passes, and one more compares with the plain
    # input where there were any: (0 + 2 + 3) / 3 / 2 = 0.83.
    capsys.readouterr()
    assert straight.run("plan", "--verbose", "max_train_steps=9") == 0
    assert "techniques add 0.83 forward passes per micro-step" in capsys.readouterr().out
