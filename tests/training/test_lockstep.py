"""Every technique trains in two processes like in one, and both run the same collectives."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.distributed.world import World
from tests.tools.assembly import make_batch
from tests.tools.processes import run_together
from tests.tools.tolerances import ROTATION
from tests.training.lockstep import STEPS, TOGETHER, main, train

pytestmark = [pytest.mark.slow(3), pytest.mark.costly_setup]

CAPTIONS = ["a star", "two blue circles", "a green square on black", "x"]
KINDS: dict[str, dict[str, Any]] = {"ddp": {"fsdp_enable": False}, "fsdp2": {"fsdp_enable": True}}
CASES = {
    f"{name}, {kind}": case | settings
    for name, case in TOGETHER.items()
    for kind, settings in KINDS.items()
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> list[dict[str, Any]]:
    """The results of one process, and of each of two."""
    folder = tmp_path_factory.mktemp("lockstep")
    batch = make_batch(t2i_checkpoint, CAPTIONS, side=8)
    white = torch.tensor([2, 4, 4, 6])  # columns; TREAD keeps all tokens that show them
    mask = (torch.arange(8) < white[:, None]).float().view(4, 1, 1, 1, 8).expand(-1, -1, -1, 8, -1)
    batch = replace(batch, other_embeds=batch.embeds[::-1], loss_mask=mask)
    torch.save(batch, folder / "batch.pt")
    run_together(2, main, t2i_checkpoint, folder, CASES)
    alone = {"fsdp_enable": False}
    one = {
        name: train(t2i_checkpoint, batch, World(), folder, **case | alone)
        for name, case in TOGETHER.items()
    }
    return [one, *(torch.load(folder / f"results-{rank}.pt", weights_only=True) for rank in (0, 1))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TOGETHER)
def test_two_processes_train_like_one(results: list[dict[str, Any]], name: str, kind: str) -> None:
    one, *two = (
        result[key] for result, key in zip(results, [name, *[f"{name}, {kind}"] * 2], strict=True)
    )

    assert two[0]["metrics"] == two[1]["metrics"]
    assert two[0]["exchanges"] == two[1]["exchanges"]
    assert ("c10d::_allgather_base_" in two[0]["exchanges"]) == (kind == "fsdp2"), "of weights"

    if kind == "fsdp2":
        assert two[0]["passes"] == two[1]["passes"] == one["passes"] > STEPS
    for step, expected in zip(two[0]["metrics"], one["metrics"], strict=True):
        # Before the first update the preservation loss is rounding alone.
        assert step == pytest.approx(expected, rel=ROTATION, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TOGETHER)
def test_a_non_finite_loss_of_one_process_updates_no_weight_of_any_process(
    results: list[dict[str, Any]], name: str, kind: str
) -> None:
    alone, *two = (
        result[key] for result, key in zip(results, [name, *[f"{name}, {kind}"] * 2], strict=True)
    )

    assert "The weights were not updated" in alone["refused"]
    assert two[0]["refused"] == two[1]["refused"]
    assert re.match(
        r"The loss is \S+, \S+, nan, nan. The weights were not updated.", two[0]["refused"]
    )
