"""The rehearsal: it tries the largest moments, and a run is the same with it and without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from simpletuner.annexes.fitting.ready import plan_that_fits
from simpletuner.cli.execute import open_companions
from simpletuner.config.schema import OffloadConfig
from simpletuner.config.sources import parse_arguments
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.reporting.events import EventStream, Notice
from simpletuner.run import rehearsal
from simpletuner.run.session import Session
from simpletuner.run.train import run_plan
from simpletuner.techniques.base import Technique
from simpletuner.training import step as steps
from tests.tools.assembly import make_assembly
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

LORA = "output/pytorch_lora_weights.safetensors"


def run(workspace: Workspace, *, rehearsed: bool | None) -> list[str]:
    """Train; returns what is said."""
    lines: list[str] = []
    events = EventStream(
        lambda event: lines.append(event.text) if isinstance(event, Notice) else None
    )
    with workspace.inside():
        budget = plan_that_fits(parse_arguments([]))
        run_plan(
            budget, events, open_companions(budget.plan, None, events, World()), rehearsed=rehearsed
        )
    return lines


@pytest.fixture
def pair(tmp_path: Path, filled: Workspace) -> list[Workspace]:
    """Two equal workspaces; regularisation brings in a technique, dropout random numbers,
    validation a pipeline.
    """
    settings: dict[str, Any] = {
        "lora_dropout": 0.2,
        "validation_disable": False,
        "use_ema": True,
        "input_perturbation": 0.1,
        "max_train_steps": 3,
    }
    pair = [filled.copy(tmp_path / name, **settings) for name in ("with", "without")]
    for workspace in pair:
        regular = {**DATASETS[0], "id": "regular", "is_regularisation_data": True}
        workspace.write_datasets([DATASETS[0], regular, DATASETS[1]])
    return pair


def test_a_rehearsal_does_not_change_the_run(
    pair: list[Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(session: Session, *arguments: Any) -> Iterator[Any]:
        before = torch.get_rng_state()
        yield from rehearsal.rehearse(session, *arguments)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(parameter.grad is None for parameter in session.assembly.parameters.values())

    monkeypatch.setattr("simpletuner.run.train.rehearse", watched)
    told = run(pair[0], rehearsed=True)
    untold = run(pair[1], rehearsed=None)
    assert [line.partition(":")[0] for line in told if line.startswith("Rehearsed")] == [
        "Rehearsed the largest micro-step (2 x 64x64)",
        "Rehearsed a preview",
    ]
    assert not any(line.startswith("Rehearsed") for line in untold), (
        "on a CPU there is nothing to try"
    )
    assert pair[0].metrics() == pair[1].metrics()
    assert pair[0].path(LORA).read_bytes() == pair[1].path(LORA).read_bytes()
    previews = [sorted(each.path("output").rglob("*.png")) for each in pair]
    assert [path.read_bytes() for path in previews[0]] == [
        path.read_bytes() for path in previews[1]
    ]


class Counting(Technique):
    """Has something to remember."""

    seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def test_techniques_restore_their_state_after_a_rehearsal(t2i_checkpoint: Path) -> None:
    assembly = make_assembly(t2i_checkpoint, Counting(TechniqueSpec()))
    (technique,) = assembly.techniques
    with rehearsal.unchanged(assembly.optimizer, assembly.techniques):
        technique.seen = 1  # type: ignore[attr-defined]
    assert technique.state_dict() == {"seen": 0}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"),
    ],
)
def test_a_rehearsal_reports_a_device_that_is_too_small_before_step_1(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def full(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(steps, "micro_loss", full)
    with pytest.raises(
        UserError, match=r"the largest micro-step .* does not fit CPU; the plan expected .* of"
    ):
        run(workspace, rehearsed=True)
    assert not workspace.path(LORA).exists()


def test_a_rehearsal_allocates_optimizer_state_for_the_local_shard() -> None:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        part = distribute_tensor(
            torch.zeros(4, 6), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        assembly: Any = SimpleNamespace(optimizer=torch.optim.SGD([torch.nn.Parameter(part)]))
        config = SimpleNamespace(offload=OffloadConfig())
        budget: Any = SimpleNamespace(model=SimpleNamespace(state_bytes=8.0), config=config)
        assert rehearsal.coming_state(assembly.optimizer, budget) == 8 * 12
    finally:
        distributed.destroy_process_group()


def test_expected_optimizer_state_equals_what_is_allocated(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[float, float]] = []

    def look(session: Session, validation: Any, budget: Any) -> Any:
        assembly = session.assembly
        before = rehearsal.coming_state(assembly.optimizer, budget)
        for parameter in assembly.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        assembly.optimizer.step()
        state = [
            each
            for one in assembly.optimizer.state.values()
            for each in one.values()
            if each.ndim > 0
        ]
        seen.append((before, float(sum(each.nbytes for each in state))))
        assert rehearsal.coming_state(assembly.optimizer, budget) == 0
        return iter(())

    monkeypatch.setattr("simpletuner.run.train.rehearse", look)
    run(workspace, rehearsed=True)
    ((planned, real),) = seen
    assert planned == real > 0
