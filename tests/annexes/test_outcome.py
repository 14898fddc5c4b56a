"""A run is compared with its estimate, and corrects the next one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from simpletuner.annexes import outcome
from simpletuner.annexes.outcome import FEWEST, Comparison
from simpletuner.budget import outcomes
from simpletuner.budget.outcomes import LATEST, Outcome, find_outcome, remember
from simpletuner.reporting.events import EventStream, StepReport
from tests.annexes.test_fit import CLIP, PRO, budget, gpu
from tests.processes import PATIENCE
from tests.workspace import Workspace

KEPT = "cache/outcomes.json"
WITHOUT_CORE = outcome._seconds_without_core


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs on the machine that runs the tests change nothing."""
    monkeypatch.setattr(outcome, "_seconds_without_core", lambda: 0.0)


def kept(workspace: Workspace) -> dict[str, Any]:
    """What is stored after runs of one kind."""
    ((found,),) = (runs.values() for runs in json.loads(workspace.path(KEPT).read_text()).values())
    return cast(dict[str, Any], found)


def planned(workspace: Workspace, capsys: pytest.CaptureFixture[str], *settings: str) -> dict[str, float]:
    capsys.readouterr()
    assert workspace.run("plan", "--json", "max_train_steps=10", "validation_disable=false", *settings) == 0
    seconds: dict[str, float] = json.loads(capsys.readouterr().out)["seconds"]
    return seconds


@pytest.mark.slow(3)
def test_a_run_corrects_the_next_estimate(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    previews = ("validation_disable=false", "validation_num_inference_steps=1")
    before, other = planned(workspace, capsys, *previews), planned(workspace, capsys, "train_batch_size=4")
    assert workspace.train("max_train_steps=10", *previews) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Estimate and run: ")]
    assert "; round of previews " in line
    assert "; peak " in line
    outcome = kept(workspace)
    # The rates that the run measured are in its output folder; another one has the same estimate as before.
    after = planned(workspace, capsys, *previews, "output_dir=elsewhere")
    assert after["step"] == pytest.approx(before["step"] * outcome["step"])
    assert after["previews"] == pytest.approx(before["previews"] * outcome["previews"])
    assert planned(workspace, capsys, "train_batch_size=4", "output_dir=elsewhere") == other, "another shape"
    assert workspace.run("plan", "max_train_steps=10", "output_dir=elsewhere") == 0
    line = f"  corrected by earlier runs, the last on {outcome['day']}: x{outcome['step']:.2f}"
    assert line in capsys.readouterr().out.splitlines()
    # A corrected estimate is compared as well: the next outcome is relative to the uncorrected one.
    assert workspace.train("max_train_steps=10", "validation_disable=true", "output_dir=elsewhere") == 0
    again = kept(workspace)
    assert again["previews"] == outcome["previews"], "there were none"
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Estimate and run: "))
    taken, predicted = map(float, re.findall(r"([\d.]+) s", line))
    assert predicted == pytest.approx(after["step"], rel=0.01)
    assert again["latest"][-1][0] == pytest.approx(outcome["step"] * taken / predicted, rel=0.02)
    workspace.path(KEPT).write_text("{")
    assert planned(workspace, capsys, *previews, "output_dir=another") == before


def test_a_few_steps_say_nothing_about_speed(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    assert workspace.train("max_train_steps=2", "validation_disable=true") == 0
    assert "Estimate and run" not in capsys.readouterr().out
    assert not workspace.path(KEPT).exists()


def test_the_usual_one_of_the_latest_runs_corrects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that shared its GPU with another program says nothing about the next, nor do those of long ago."""
    estimate, plan = budget(gpu(80), CLIP, PRO), cast(Any, None)
    monkeypatch.setattr(outcomes, "machine_folder", lambda plan: tmp_path)
    monkeypatch.setattr(outcomes, "kind_of_run", lambda *given: "pro")
    found = []
    for step in (1.2, 4.6, 1.3, 4.7, 1.1, 0.5, 0.6, 0.4):
        remember(plan, estimate.workload, estimate.device, Outcome("today", step, 2 * step))
        found.append(find_outcome(plan, estimate.workload, estimate.device))
    assert [each.step for each in found] == [1.2, 1.2, 1.3, 1.3, 1.3, 1.3, 1.1, 0.6]
    assert [each.previews for each in found] == [2 * each.step for each in found]
    assert max(len(each.latest) for each in found) == LATEST
    measured = replace(estimate.device, note="matmul measured")
    assert find_outcome(plan, estimate.workload, measured) == outcomes.UNCORRECTED, "an estimate with other rates"
    remember(plan, estimate.workload, measured, Outcome("today", 3.0, 1.0))
    assert find_outcome(plan, estimate.workload, measured).step == 3


@pytest.mark.slow
@pytest.mark.parametrize(("share", "is_stored"), [(0.2, True), (0.4, False)])
def test_a_run_beside_other_programs_is_not_stored(
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    is_stored: bool,
) -> None:
    monkeypatch.setattr(outcome, "_seconds_without_core", lambda: share * time.perf_counter())
    assert workspace.train("max_train_steps=10", "validation_disable=true") == 0
    told = f"not stored for the next estimate: other programs used its CPU core for {share:.0%} of the time."
    assert (told not in capsys.readouterr().out, workspace.path(KEPT).exists()) == (is_stored, is_stored)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_time_without_a_core_is_counted() -> None:
    """A program that shares a core with another one has to wait for it."""
    cores, ends, before = os.sched_getaffinity(0), time.monotonic() + PATIENCE, WITHOUT_CORE()
    busy = "import time\nwhile time.process_time() < 10: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as other:
        try:
            for process in (0, other.pid):
                os.sched_setaffinity(process, {min(cores)})
            while WITHOUT_CORE() - before < 0.05 and time.monotonic() < ends:
                pass
        finally:
            other.kill()
            os.sched_setaffinity(0, cores)
    assert WITHOUT_CORE() - before >= 0.05


def test_a_file_that_cannot_be_written_ends_no_run(workspace: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    workspace.path(KEPT).mkdir(parents=True)
    assert workspace.train("max_train_steps=10", "validation_disable=true") == 0
    assert "not stored for the next estimate: " in capsys.readouterr().out


def test_the_next_estimate_knows_how_many_tiles_are_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they explain is not corrected a second time."""
    before, kept = budget(gpu(80), CLIP, PRO), list[Outcome]()
    tokens = before.steps[0].load.tokens
    informed = replace(before, parts=before.parts.with_densities({tokens: 0.5}))
    assert informed.step_seconds > 1.1 * before.step_seconds, "25 % were assumed"
    monkeypatch.setattr(outcome, "round_seconds", lambda *given: 0.0)
    monkeypatch.setattr(outcome, "remember", lambda *given: kept.append(given[-1]))
    comparison, unused = Comparison(EventStream()), cast(Any, None)
    comparison.planned = before
    for step, density in enumerate((0.4, 0.6) * FEWEST):
        comparison._note(StepReport(step, 1, {}, 2 * informed.step_seconds, densities={tokens: density}))
    comparison.finish(unused)
    assert kept[0].densities == {tokens: pytest.approx(0.5)}
    assert kept[0].step == pytest.approx(2)
