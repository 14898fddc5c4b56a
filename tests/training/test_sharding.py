"""Processes that shard the weights train, save and continue like one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.distributed.world import World
from tests.tools.assembly import make_batch
from tests.tools.processes import run_together
from tests.tools.sharded_run import (
    BATCH_FILE,
    CASES,
    EXACT,
    LEG,
    RELAYED,
    SAVED,
    Run,
    main,
    relay,
    run_case,
)
from tests.tools.tolerances import ROTATION, distance

pytestmark = [pytest.mark.slow(3), pytest.mark.costly_setup]

CAPTIONS = ["a star", "two blue circles", "a green square on black", "x"]
# A relay: every leg continues the run with another number of processes, which train these cases
# before it.
SIZES = [2, 1, 4, 1]
CASES_OF = [list(CASES), [], ["full"], []]
SAME = 1e-6  # relative difference of losses


@dataclass
class Results:
    """The results of runs with one, two and four processes."""

    folder: Path
    one: dict[str, Any]
    several: dict[int, dict[str, Any]]
    relayed: dict[str, list[float]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> Results:
    folder = tmp_path_factory.mktemp("sharded")
    torch.save(make_batch(t2i_checkpoint, CAPTIONS), folder / BATCH_FILE)
    one = {name: run_case(name, t2i_checkpoint, World(), folder) for name in CASES}
    several: dict[int, dict[str, Any]] = {}
    relayed = {name: list[float]() for name in RELAYED}
    for leg, size in enumerate(SIZES):
        if size == 1:
            result = {
                f"{name}-relay": relay(name, t2i_checkpoint, World(), folder, leg)
                for name in RELAYED
            }
        else:
            run_together(size, main, t2i_checkpoint, folder, leg, CASES_OF[leg])
            result = torch.load(folder / f"results-{leg}-0.pt", weights_only=True)
            several.setdefault(size, result)
        for name in RELAYED:
            relayed[name] += result[f"{name}-relay"]
    return Results(folder, one, several, relayed)


@pytest.mark.parametrize(
    ("size", "name"), [(2, name) for name in CASES] + [(4, name) for name in CASES_OF[2]]
)
def test_sharded_losses_and_predictions_equal_those_of_one_process(
    results: Results, size: int, name: str
) -> None:
    one = results.one[name]
    several = results.several[size][name]
    is_rounded = "bf16" in name

    assert several["losses"] == pytest.approx(one["losses"], rel=1e-2 if is_rounded else SAME)
    # Adam divides a wrong scale out of its first steps.
    assert several["norms"] == pytest.approx(one["norms"], rel=5e-2 if is_rounded else 1e-5)

    weights, average, weights_again = several["predictions"]
    actual = {"weights": weights, "average": average}
    expected = dict(zip(actual, one["predictions"], strict=False))
    assert distance(actual, expected) < (2**-7 if is_rounded else ROTATION)
    assert torch.equal(weights_again, weights)
    assert not torch.equal(weights, average)


def test_every_process_holds_only_its_shards(results: Results) -> None:
    assert results.several[2]["full"]["held"] < 1.1 * results.one["full"]["held"] / 2


@pytest.mark.parametrize("name", CASES)
def test_a_machine_holds_blocks_once_until_they_are_sharded(results: Results, name: str) -> None:
    (place,) = results.several[2][name]["places"]
    assert "memfd:simpletuner-offload" in place


@pytest.mark.parametrize("name", RELAYED)
def test_a_run_continues_with_another_number_of_processes(
    results: Results, name: str, t2i_checkpoint: Path
) -> None:
    alone = Run(t2i_checkpoint, CASES[name], World(), results.folder)
    alone.train(LEG * len(SIZES))
    assert results.relayed[name] == pytest.approx(alone.losses, rel=SAME)


def test_a_run_continues_bit_for_bit_with_the_same_number(results: Results) -> None:
    assert results.several[2][EXACT]["exact"]


@pytest.mark.parametrize("name", SAVED)
def test_sharded_runs_save_the_files_of_one_process(results: Results, name: str) -> None:
    """Compared before the first step, when weights are equal bit for bit."""
    one, several = (results.folder / f"{name}-start-{size}" / "checkpoint-0" for size in (1, 2))
    files = [
        path.relative_to(one)
        for path in sorted(one.rglob("*"))
        if path.suffix in (".safetensors", ".json")
    ]

    assert len(files) >= 5

    for file in files:
        if file.name != "manifest.json":  # it lists the files of the state, too
            assert (several / file).read_bytes() == (one / file).read_bytes(), file
    assert (several / "training_state" / "shards").is_dir() == name.startswith("full")
