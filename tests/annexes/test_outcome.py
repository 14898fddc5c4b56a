"""A run is compared with its estimate, and stores its measured densities of attention."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from simpletuner.annexes import outcome
from simpletuner.annexes.outcome import FEWEST, Comparison
from simpletuner.budget import densities
from simpletuner.budget.budget import Budget
from simpletuner.budget.densities import OUTCOMES_FILE, find_densities, remember_densities
from simpletuner.reporting.events import EventStream, StepReport
from tests.annexes.test_fit import CLIP, LITE, PRO, budget, gpu
from tests.tools.workspace import Workspace

STORED = f"cache/{OUTCOMES_FILE}"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this machine's measurements."""
    monkeypatch.setattr(densities, "machine_folder", lambda plan: tmp_path)
    return tmp_path


def comparison_of(estimate: Budget, shares: Mapping[int, float]) -> Comparison:
    """A comparison after enough steps with these densities."""
    comparison = Comparison(EventStream())
    comparison.planned = estimate
    for step in range(FEWEST):
        comparison._note(StepReport(step, 1, {}, 1.0, densities=shares))
    return comparison


@pytest.mark.slow
def test_finished_run_is_compared_with_its_estimate(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    previews = ("validation_disable=false", "validation_num_inference_steps=1")

    assert workspace.train("max_train_steps=10", *previews) == 0

    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("Estimate and run: ")]
    assert "; round of previews " in line
    assert "; peak " in line
    assert not workspace.path(STORED).exists(), "dense attention has nothing to store"


def test_short_run_is_not_compared_with_its_estimate(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workspace.train("max_train_steps=2", "validation_disable=true") == 0

    assert "Estimate and run" not in capsys.readouterr().out


def test_measured_densities_are_stored_by_device_and_kind_of_run(machine: Path) -> None:
    plan = budget(gpu(80), CLIP, PRO).plan
    workload = budget(gpu(80), CLIP, PRO).workload
    device = gpu(80)

    remember_densities(plan, workload, device, {256: 0.4})
    remember_densities(plan, workload, device, {512: 0.2})

    assert find_densities(plan, workload, device) == {256: 0.4, 512: 0.2}
    assert find_densities(plan, workload, replace(device, name="another GPU")) == {}
    assert find_densities(plan, budget(device, LITE, PRO).workload, device) == {}


def test_outcomes_file_of_an_earlier_version_is_read(machine: Path) -> None:
    """It also held ratios of times."""
    estimate = budget(gpu(80), CLIP, PRO)
    kind = densities.kind_of_run(estimate.plan, estimate.workload)
    earlier = {"day": "2026-11-23", "step": 1.2, "latest": [[1.2, 1.0]], "densities": {"256": 0.4}}
    (machine / OUTCOMES_FILE).write_text(json.dumps({estimate.device.name: {kind: earlier}}))

    assert find_densities(estimate.plan, estimate.workload, estimate.device) == {256: 0.4}


def test_damaged_outcomes_file_is_replaced(machine: Path) -> None:
    estimate = budget(gpu(80), CLIP, PRO)
    (machine / OUTCOMES_FILE).write_text("{")

    comparison_of(estimate, {256: 0.4}).finish(cast(Any, None))

    assert find_densities(estimate.plan, estimate.workload, estimate.device) == {256: 0.4}


def test_unwritable_outcomes_file_does_not_stop_the_run(machine: Path) -> None:
    (machine / OUTCOMES_FILE).mkdir()

    line = comparison_of(budget(gpu(80), CLIP, PRO), {256: 0.4}).finish(cast(Any, None))

    assert "; not stored for the next estimate: " in line


def test_mean_density_of_a_run_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = []
    monkeypatch.setattr(
        outcome, "remember_densities", lambda *arguments: stored.append(arguments[-1])
    )
    comparison = comparison_of(budget(gpu(80), CLIP, PRO), {256: 0.4})
    for step in range(FEWEST):
        comparison._note(StepReport(step, 1, {}, 1.0, densities={256: 0.6}))

    comparison.finish(cast(Any, None))

    assert stored == [{256: pytest.approx(0.5)}]
