"""An error inside training loses no complete step: a checkpoint is saved before the error ends the
run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.training import step
from simpletuner.training.ema import Ema
from simpletuner.training.recorder import EmaUpdater, RequestHandler
from simpletuner.validation.runner import ValidationRunner
from tests.tools.cases import first_of
from tests.tools.runs import STATEFUL_RUN, assert_same_run
from tests.tools.workspace import Workspace

FAILING = 5  # the step that fails, which no regular checkpoint precedes
Place = tuple[object, str, Callable[..., bool]]


def is_micro_step(number: int) -> Callable[..., bool]:
    def is_due(assembly: Any, batch: Any, global_step: int, micro_step: int, losses: Any) -> bool:
        return (global_step + 1, micro_step) == (FAILING, number)

    return is_due


def is_step(callback: Any, assembly: Any, state: Any, report: Any) -> bool:
    return bool(state.global_step == FAILING)


def is_average(ema: Ema, global_step: int) -> bool:
    return global_step == FAILING


def updates(count: int) -> Callable[..., bool]:
    calls = iter(range(1, 100))
    return lambda scaler, optimizer: next(calls) == count


def fail(patch: pytest.MonkeyPatch, place: Place) -> None:
    """Let a function fail after its work when it is due."""
    owner, name, is_due = place
    original = getattr(owner, name)

    def failing(*arguments: Any) -> Any:
        result = original(*arguments)
        if is_due(*arguments):
            raise RuntimeError("the disk of the pictures is gone")
        return result

    patch.setattr(owner, name, failing)


# The place of the error, and the step that is saved.
PLACES: dict[str, tuple[Place, int]] = {
    "the first half of a step": ((step, "run_micro_step", is_micro_step(0)), FAILING - 1),
    "the second half of a step": ((step, "run_micro_step", is_micro_step(1)), FAILING - 1),
    "a callback before the record": ((EmaUpdater, "on_step_end", is_step), FAILING),
    "a callback before the checkpoints": ((RequestHandler, "on_step_end", is_step), FAILING),
    "a callback after the checkpoints": ((ValidationRunner, "on_step_end", is_step), FAILING),
}
HALFWAY: dict[str, Place] = {
    "the update": (torch.amp.GradScaler, "step", updates(FAILING)),
    "the average": (Ema, "update", is_average),
}


def fails(run: Workspace, place: Place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, place)
        assert run.train() == 1


def checkpoints(run: Workspace) -> list[int]:
    folders = run.path("output").glob("checkpoint-*")
    return sorted(int(re.findall(r"\d+", folder.name)[0]) for folder in folders)


@pytest.mark.slow(1)
@pytest.mark.parametrize("place", first_of(PLACES))
def test_an_error_saves_the_last_complete_step(
    tmp_path: Path,
    filled: Workspace,
    straight: Workspace,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    run = filled.copy(tmp_path / "failing", **STATEFUL_RUN)
    where, saved = PLACES[place]
    fails(run, where)
    assert checkpoints(run) == [3, saved]
    assert f"Saved checkpoint-{saved}-rolling" in capsys.readouterr().out
    assert [line["step"] for line in run.metrics()] == [*range(1, saved + 1)]
    assert run.train() == 0
    assert f"Continuing from checkpoint-{saved}-rolling" in capsys.readouterr().out
    assert_same_run(straight, run)


@pytest.mark.slow
@pytest.mark.parametrize("place", HALFWAY)
def test_a_half_updated_model_is_not_saved(
    tmp_path: Path, filled: Workspace, straight: Workspace, place: str
) -> None:
    run = filled.copy(tmp_path / "failing", **STATEFUL_RUN)
    fails(run, HALFWAY[place])
    assert checkpoints(run) == [3]
    assert run.train() == 0
    assert_same_run(straight, run)
