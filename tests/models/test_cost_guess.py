"""A family without a table of measured costs is planned by a guess, of which plans warn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import cost_of
from simpletuner.annexes.fitting.fit import check_fit, choose
from simpletuner.annexes.fitting.plan_text import budget_lines
from simpletuner.budget.budget import Budget
from simpletuner.models import cost, cost_guess
from simpletuner.models.cost import Adapters, BatchShape, TransformerCost
from simpletuner.models.cost_guess import block_lists, cost_table_of, guess_cost_table
from simpletuner.models.lora_layers import linear_modules, matching_modules
from simpletuner.models.registry import FAMILIES
from simpletuner.reporting.layout import Layout
from tests.annexes.test_fit import budget, gpu
from tests.models.contract import load_of, trial_of
from tests.models.fourth import FOURTH
from tests.models.test_families import fourth  # noqa: F401 - a fixture
from tests.tools.reports import found_by
from tests.tools.workspace import Workspace

FLAVOURS = [
    ("kandinsky5-image", "t2i-lite-sft"),
    ("kandinsky5-video", "t2v-lite-sft-5s"),
    ("sanavideo", "2b-480p"),
]


def guessed(measured: TransformerCost) -> TransformerCost:
    return replace(
        measured, table=guess_cost_table(measured.shapes), density=None, compiled_reads={}
    )


@pytest.mark.parametrize("size", [2, 4], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("family", "flavour"), FLAVOURS)
def test_a_guess_is_between_95_and_400_percent_of_the_measured_bytes(
    family: str, flavour: str, size: int
) -> None:
    measured = FAMILIES[family].cost.of_flavour(flavour)
    layers = matching_modules(linear_modules(measured.shapes), FAMILIES[family].lora_targets)
    batch = BatchShape(1, 8, 32, 48, 300)
    adapters = Adapters(16, frozenset(layers))

    guess = guessed(measured).activations(batch, size, adapters)

    exact = measured.activations(batch, size, adapters)
    for quantity in ("saved", "sampling"):
        ratio = getattr(guess, quantity) / getattr(exact, quantity)
        assert 0.95 <= ratio <= 4, quantity
    assert guess.held == exact.held
    assert guessed(measured).parameters == measured.parameters
    assert guessed(measured).blocks[-measured.large :] == measured.blocks[-measured.large :]
    assert guessed(measured).forward(batch).total >= 0.99 * measured.forward(batch).total


def test_block_lists_are_recognised_by_equal_shapes_of_their_members() -> None:
    shapes = {"time.0.weight": (8, 4), "time.2.weight": (8, 8)}
    shapes |= {f"text_blocks.{number}.weight": (8, 8) for number in range(2)}
    shapes |= {f"blocks.{number}.weight": (8, 8) for number in range(3)}

    assert block_lists(shapes) == ["text_blocks", "blocks"]


@pytest.mark.thorough
@pytest.mark.slow(8)
def test_a_family_without_a_table_gets_a_guess_with_its_own_blocks(fourth: Any) -> None:  # noqa: F811
    trial = trial_of(FOURTH)
    exact = cost_of(FOURTH.cost, trial.model)

    guess = replace(exact, table=cost_table_of("tests.models", exact.shapes))

    assert not guess.table.is_measured
    assert guess.blocks == exact.blocks
    assert guess.hidden == exact.hidden
    assert guess.forward(load_of(trial)).total >= exact.forward(load_of(trial)).total


@pytest.fixture
def unmeasured() -> Callable[[float], Budget]:
    """(gigabytes of a GPU) -> the budget of a run whose family is not measured."""

    def on(gigabytes: float) -> Budget:
        measured = budget(gpu(gigabytes, 64e9))
        transformer = guessed(measured.parts.transformer)
        return replace(measured, parts=replace(measured.parts, transformer=transformer))

    return on


def test_a_plan_warns_that_the_family_is_not_measured(
    unmeasured: Callable[[float], Budget],
) -> None:
    (line,) = [
        line
        for line in budget_lines(unmeasured(80), Layout(), verbose=False)
        if "not measured yet" in line
    ]

    assert line.startswith(
        "  Kandinsky 5 Video is not measured yet: FLOPs and activations are assumed from"
    )
    assert "`python -m benchmarks.cost_table --only kandinsky5-video` measures them" in line


def test_a_refusal_for_memory_warns_that_the_family_is_not_measured(
    unmeasured: Callable[[float], Budget],
) -> None:
    (problem,) = found_by(check_fit, unmeasured(6))

    assert "Kandinsky 5 Video is not measured yet" in problem.message
    assert problem.message.endswith("To run anyway, set i_know_what_i_am_doing.")


def test_offload_auto_works_for_a_family_that_is_not_measured(
    unmeasured: Callable[[float], Budget],
) -> None:
    before = unmeasured(12)

    chosen = choose(before)

    assert not before.fits
    assert chosen.fits


def no_table(package: str) -> None:
    return None


@pytest.fixture
def without_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_guess, "read_cost_table", no_table)
    monkeypatch.setattr(cost, "read_cost_table", no_table)


@pytest.mark.slow(5)
@pytest.mark.usefixtures("without_tables")
def test_a_family_without_a_table_is_planned_and_trained(
    t2i_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.create(
        tmp_path / "run", t2i_checkpoint, offload="auto", max_train_steps=2
    )

    planned = workspace.run("plan", "--json")
    output = capsys.readouterr()
    trained = workspace.train()

    assert (planned, trained) == (0, 0), output.err
    document = json.loads(output.out)
    (assumed,) = [line for line in document["assumed"] if "not measured yet" in line]
    assert "--only kandinsky5-image" in assumed
    assert len(workspace.metrics()) == 2


@pytest.mark.usefixtures("without_tables")
def test_an_unmeasured_family_cannot_be_planned_without_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.create(tmp_path / "run", Path("example/absent"))

    assert workspace.run("plan") == 2

    error = capsys.readouterr().err
    reason = "'example/absent' is not on this machine, and Kandinsky 5 Image is not measured yet"
    assert reason in error
    assert "--only kandinsky5-image" in error
    assert "Traceback" not in error
