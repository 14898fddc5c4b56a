"""A run is compared with its estimate."""

from __future__ import annotations

import json
import re

import pytest

from tests.workspace import Workspace


def test_a_run_is_compared_with_its_estimate(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("max_train_steps=10", "validation_disable=false", "validation_num_inference_steps=1")
    assert workspace.run("plan", "--json", *settings) == 0
    expected = json.loads(capsys.readouterr().out)["seconds"]
    assert workspace.train(*settings) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Estimate and run: ")]
    assert "; round of previews " in line
    assert "; peak " in line
    assert float(re.findall(r"predicted ([\d.]+) s", line)[0]) == pytest.approx(expected["step"], rel=0.01)


def test_a_few_steps_say_nothing_about_speed(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert workspace.train("max_train_steps=2", "validation_disable=true") == 0
    assert "Estimate and run" not in capsys.readouterr().out
