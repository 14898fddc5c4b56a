"""Processes that shard the tokens of samples train like a single process."""

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
# By number of processes: cases, and how many processes shard the tokens of a sample.
SHARDED = {2: dict.fromkeys(CASES, 2), 4: {"nabla": 4, "uneven": 2}}
SIZES_AND_CASES = [(2, name) for name in SHARDED[2]] + [(4, name) for name in SHARDED[4]]
SAME = 1e-6  # relative, of losses


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path
) -> dict[int, dict[str, Any]]:
    """The results of all cases, by number of processes."""
    folder = tmp_path_factory.mktemp("sequence")
    clips = make_checkpoint(tmp_path_factory.mktemp("nabla"), "t2v", nabla=True, axes=(4, 2, 2))
    checkpoints = {"uneven": t2i_checkpoint, "nabla": clips}
    batch = make_batch(t2i_checkpoint, CAPTIONS, side=6)
    torch.save(batch, folder / BATCH_FILE)
    latents = torch.randn(4, 16, 3, 16, 32, generator=torch.Generator().manual_seed(0))
    torch.save(replace(batch, latents=latents), folder / "clips.pt")
    results = {1: {name: run_case(name, checkpoints, World(), folder, 1) for name in CASES}}
    for size, cases in SHARDED.items():
        run_together(size, main, checkpoints, folder, cases)
        last_process = folder / f"results-{size}-{size - 1}.pt"
        results[size] = torch.load(last_process, weights_only=True)
    return results


@pytest.mark.parametrize(("size", "name"), SIZES_AND_CASES)
def test_sequence_parallel_training_equals_one_process(
    results: dict[int, dict[str, Any]], size: int, name: str
) -> None:
    single = results[1][name]
    sharded = results[size][name]

    assert sharded["losses"] == pytest.approx(single["losses"], rel=SAME)
    assert sharded["norms"] == pytest.approx(single["norms"], rel=1e-5)
    assert distance(sharded["moved"], single["moved"]) < ROTATION
    predictions = dict(enumerate(sharded["predictions"]))
    expected = dict(enumerate(single["predictions"]))
    assert distance(predictions, expected) < SAME * 10, (
        "without gradients every process has all tokens"
    )


@pytest.mark.parametrize(("size", "name"), SIZES_AND_CASES)
def test_every_process_trains_on_its_shard_of_the_tokens(
    results: dict[int, dict[str, Any]], size: int, name: str
) -> None:
    tokens = 3 * 8 * 16 if name == "nabla" else 9

    assert results[1][name]["token_counts"] == [tokens]
    # The last process has the smallest shard.
    assert results[size][name]["token_counts"] == [tokens // SHARDED[size][name]]
