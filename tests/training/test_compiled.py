"""Several processes compile as many graphs as one, and their gradients stay equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.assembly import make_batch
from tests.tools.processes import run_together
from tests.tools.sharded_run import BATCH_FILE
from tests.training.compiled_run import CASES, main

pytestmark = [pytest.mark.slow(15), pytest.mark.costly_setup]

PIECES = 3  # of Kandinsky's blocks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compiled")
    torch.save(make_batch(t2i_checkpoint, ["a star", "two blue circles"]), folder / BATCH_FILE)
    run_together(2, main, t2i_checkpoint, folder)
    results: dict[str, Any] = torch.load(folder / "results-0.pt", weights_only=True)
    return results


@pytest.mark.parametrize("name", CASES)
def test_compiled_and_uncompiled_runs_have_equal_gradients(
    results: dict[str, Any], name: str
) -> None:
    plain, compiled = results[name]

    assert plain["graphs"] == [0, 0, 0]
    assert compiled["graphs"] == [PIECES] * 3, "DDP splits no graph, and no step compiles anew"
    assert (len(compiled["buckets"].split(",")) > 1) == (name == "ddp")
    for plain_gradients, compiled_gradients in zip(
        plain["gradients"], compiled["gradients"], strict=True
    ):
        assert len(plain_gradients) > 20
        for gradient, expected in zip(plain_gradients, compiled_gradients, strict=True):
            assert (gradient - expected).norm() <= 1e-5 * expected.norm()
