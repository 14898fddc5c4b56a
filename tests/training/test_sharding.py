"""Processes that share the weights train, save and continue what one process does."""

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
SIZES = [2, 1, 4, 1]  # of the legs of the relay
CASES_OF = [list(CASES), [], ["full"], []]  # that the same processes train
SAME = 1e-6  # relative, of losses


@dataclass
class Together:
    """What runs with one, two and four processes left."""

    folder: Path
    one: dict[str, Any]
    several: dict[int, dict[str, Any]]
    relayed: dict[str, list[float]]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> Together:
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
    return Together(folder, one, several, relayed)


@pytest.mark.parametrize(
    ("size", "name"), [(2, name) for name in CASES] + [(4, name) for name in CASES_OF[2]]
)
def test_sharded_losses_and_predictions_equal_those_of_one_process(
    together: Together, size: int, name: str
) -> None:
    one = together.one[name]
    several = together.several[size][name]
    rounded = "bf16" in name
    assert several["losses"] == pytest.approx(one["losses"], rel=1e-2 if rounded else SAME)
    # Adam divides a wrong scale out of its first steps.
    assert several["norms"] == pytest.approx(one["norms"], rel=5e-2 if rounded else 1e-5)
    actual, expected = (dict(zip("tax", run["predictions"], strict=True)) for run in (several, one))
    assert distance(actual, expected) < (2**-7 if rounded else ROTATION)
    trained, average, again = several["predictions"]
    assert torch.equal(trained, again)
    assert not torch.equal(trained, average)


def test_every_process_holds_only_its_shards(together: Together) -> None:
    assert together.several[2]["full"]["held"] < 1.1 * together.one["full"]["held"] / 2


@pytest.mark.parametrize("name", CASES)
def test_a_machine_holds_blocks_once_until_they_are_sharded(together: Together, name: str) -> None:
    (place,) = together.several[2][name]["places"]
    assert "memfd:simpletuner-offload" in place


@pytest.mark.parametrize("name", RELAYED)
def test_a_run_continues_with_another_number_of_processes(
    together: Together, name: str, t2i_checkpoint: Path
) -> None:
    alone = Run(t2i_checkpoint, CASES[name], World(), together.folder)
    alone.train(LEG * len(SIZES))
    assert together.relayed[name] == pytest.approx(alone.losses, rel=SAME)


def test_a_run_continues_bit_for_bit_with_the_same_number(together: Together) -> None:
    assert together.several[2][EXACT]["exact"]


@pytest.mark.parametrize("name", SAVED)
def test_sharded_runs_save_the_files_of_one_process(together: Together, name: str) -> None:
    """Before the first step every weight is the same."""
    one, several = (together.folder / f"{name}-start-{size}" / "checkpoint-0" for size in (1, 2))
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
