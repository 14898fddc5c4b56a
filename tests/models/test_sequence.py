"""Processes that share the tokens of samples train what one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.distributed.world import World
from tests.models.sequence_run import CASES, main, run_case
from tests.tools.assembly import make_batch
from tests.tools.processes import run_together
from tests.tools.sharded_run import BATCH_FILE
from tests.tools.tiny import make_checkpoint
from tests.tools.tolerances import ROTATION, distance

pytestmark = [pytest.mark.slow(3), pytest.mark.costly_setup]

CAPTIONS = ["a star", "two blue circles", "a green square on black", "x"]
# By number of processes: cases, and how many processes share the tokens of a sample.
SHARED = {2: dict.fromkeys(CASES, 2), 4: {"nabla": 4, "uneven": 2}}
SAME = 1e-6  # relative, of losses


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path
) -> dict[int, dict[str, Any]]:
    """What a case did, by number of processes."""
    folder = tmp_path_factory.mktemp("sequence")
    clips = make_checkpoint(tmp_path_factory.mktemp("nabla"), "t2v", nabla=True, axes=(4, 2, 2))
    checkpoints = {"uneven": t2i_checkpoint, "nabla": clips}
    batch = make_batch(t2i_checkpoint, CAPTIONS, side=6)
    torch.save(batch, folder / BATCH_FILE)
    latents = torch.randn(4, 16, 3, 16, 32, generator=torch.Generator().manual_seed(0))
    torch.save(replace(batch, latents=latents), folder / "clips.pt")
    found = {1: {name: run_case(name, checkpoints, World(), folder, 1) for name in CASES}}
    for size, cases in SHARED.items():
        run_together(size, main, checkpoints, folder, cases)
        found[size] = torch.load(folder / f"results-{size}-{size - 1}.pt", weights_only=True)
    return found


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, cases in SHARED.items() for name in cases]
)
def test_sequence_parallel_training_equals_one_process(
    results: dict[int, dict[str, Any]], size: int, name: str
) -> None:
    one = results[1][name]
    several = results[size][name]
    assert several["losses"] == pytest.approx(one["losses"], rel=SAME)
    assert several["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert distance(several["moved"], one["moved"]) < ROTATION
    predictions = [dict(enumerate(each["predictions"])) for each in (several, one)]
    assert distance(*predictions) < SAME * 10, "without gradients every process has all tokens"


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, cases in SHARED.items() for name in cases]
)
def test_every_process_trains_on_its_shard_of_the_tokens(
    results: dict[int, dict[str, Any]], size: int, name: str
) -> None:
    tokens = 3 * 8 * 16 if name == "nabla" else 9
    assert results[1][name]["seen"] == [tokens]
    assert results[size][name]["seen"] == [tokens // SHARED[size][name]], (
        "the last process has the smallest share"
    )
