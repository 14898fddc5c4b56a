"""An error in training loses no complete step: a checkpoint is saved before the run ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.training import step
from simpletuner.training.ema import Ema
from simpletuner.training.recorder import EmaUpdater, RequestHandler
from simpletuner.validation.runner import ValidationRunner
from tests.tools.runs import STATEFUL_RUN, assert_same_run
from tests.tools.workspace import Workspace

THOROUGH = pytest.mark.thorough
# The step that fails, of the six of a run. No regular checkpoint precedes it.
FAILING = 5
Condition = Callable[..., bool]


@dataclass(frozen=True)
class Failure:
    """A function that raises an error after its work when a condition on its arguments holds."""

    owner: object
    function: str
    is_due: Condition


def at_micro_step(number: int) -> Condition:
    def is_due(assembly: Any, batch: Any, global_step: int, micro_step: int, losses: Any) -> bool:
        return global_step + 1 == FAILING and micro_step == number

    return is_due


def at_step_end(callback: Any, assembly: Any, state: Any, report: Any) -> bool:
    return bool(state.global_step == FAILING)


def at_average(ema: Ema, global_step: int) -> bool:
    return global_step == FAILING


def at_call(number: int) -> Condition:
    calls = iter(range(1, 100))
    return lambda *arguments: next(calls) == number


def train_with_failure(run: Workspace, failure: Failure) -> None:
    original = getattr(failure.owner, failure.function)

    def work_and_fail(*arguments: Any) -> Any:
        result = original(*arguments)
        if failure.is_due(*arguments):
            raise RuntimeError("the disk of the pictures is gone")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure.owner, failure.function, work_and_fail)
        assert run.train() == 1


IN_FIRST_HALF = Failure(step, "run_micro_step", at_micro_step(0))
IN_SECOND_HALF = Failure(step, "run_micro_step", at_micro_step(1))
IN_AVERAGE_CALLBACK = Failure(EmaUpdater, "on_step_end", at_step_end)
IN_REQUESTS = Failure(RequestHandler, "on_step_end", at_step_end)
IN_VALIDATION = Failure(ValidationRunner, "on_step_end", at_step_end)


def checkpoint_steps(run: Workspace) -> list[int]:
    names = [path.name for path in run.path("output").glob("checkpoint-*")]
    return sorted(int(re.findall(r"\d+", name)[0]) for name in names)


@pytest.mark.slow(1)
@pytest.mark.parametrize(
    ("failure", "saved"),
    [
        (IN_FIRST_HALF, FAILING - 1),
        pytest.param(IN_SECOND_HALF, FAILING - 1, marks=THOROUGH),
        # Callbacks before the record, before the checkpoints, and after them.
        pytest.param(IN_AVERAGE_CALLBACK, FAILING, marks=THOROUGH),
        pytest.param(IN_REQUESTS, FAILING, marks=THOROUGH),
        pytest.param(IN_VALIDATION, FAILING, marks=THOROUGH),
    ],
)
def test_an_error_saves_the_last_complete_step(
    tmp_path: Path,
    filled: Workspace,
    straight: Workspace,
    capsys: pytest.CaptureFixture[str],
    failure: Failure,
    saved: int,
) -> None:
    run = filled.copy(tmp_path / "failing", **STATEFUL_RUN)

    train_with_failure(run, failure)

    assert checkpoint_steps(run) == [3, saved]
    assert f"Saved checkpoint-{saved}-rolling" in capsys.readouterr().out
    assert [row["step"] for row in run.metrics()] == [*range(1, saved + 1)]
    assert run.train() == 0
    assert f"Continuing from checkpoint-{saved}-rolling" in capsys.readouterr().out
    assert_same_run(straight, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(Failure(torch.amp.GradScaler, "step", at_call(FAILING)), id="update"),
        pytest.param(Failure(Ema, "update", at_average), id="average"),
    ],
)
def test_a_half_updated_model_is_not_saved(
    tmp_path: Path, filled: Workspace, straight: Workspace, failure: Failure
) -> None:
    run = filled.copy(tmp_path / "failing", **STATEFUL_RUN)

    train_with_failure(run, failure)

    assert checkpoint_steps(run) == [3]
    assert run.train() == 0
    assert_same_run(straight, run)
