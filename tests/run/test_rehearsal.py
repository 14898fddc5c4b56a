"""The rehearsal tries the largest step and preview first, and a run is the same without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from simpletuner.config.types import Size
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.reporting.events import Event, EventStream, Notice
from simpletuner.run import rehearsal
from simpletuner.run.session import Session
from simpletuner.run.train import run_plan
from simpletuner.techniques.base import Technique
from simpletuner.training import step as steps
from tests.tools.assembly import make_assembly
from tests.tools.runs import LORA
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow


def train(workspace: Workspace, *, rehearsed: bool | None) -> list[str]:
    """Train; returns the texts of all notices.

    Args:
        rehearsed: None leaves the choice to the run, which has nothing to try on a CPU.
    """
    notices: list[str] = []

    def keep(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)

    events = EventStream(keep)
    with workspace.inside():
        budget = plan_that_fits(parse_arguments([]))
        companions = open_companions(budget.plan, None, events, World())
        run_plan(budget, events, companions, rehearsed=rehearsed)
    return notices


def rehearsed_parts(notices: list[str]) -> list[str]:
    return [text.partition(":")[0] for text in notices if text.startswith("Rehearsed")]


def read_previews(workspace: Workspace) -> list[bytes]:
    return [path.read_bytes() for path in sorted(workspace.path("output").rglob("*.png"))]


@pytest.fixture
def varied(filled: Workspace) -> Workspace:
    """Regularisation brings in a technique, dropout random numbers, validation a pipeline."""
    filled.write_config(
        lora_dropout=0.2,
        validation_disable=False,
        use_ema=True,
        input_perturbation=0.1,
        max_train_steps=3,
    )
    regularisation = {**DATASETS[0], "id": "regularisation", "is_regularisation_data": True}
    filled.write_datasets([DATASETS[0], regularisation, DATASETS[1]])
    return filled


def test_a_rehearsal_does_not_change_the_run(
    tmp_path: Path, varied: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_rehearsal = varied.copy(tmp_path / "with")
    without = varied.copy(tmp_path / "without")

    def rehearse_and_check(session: Session, *arguments: Any) -> Iterator[Any]:
        random_state = torch.get_rng_state()
        yield from rehearsal.rehearse(session, *arguments)
        assert torch.equal(torch.get_rng_state(), random_state)
        assert all(parameter.grad is None for parameter in session.assembly.parameters.values())

    monkeypatch.setattr("simpletuner.run.train.rehearse", rehearse_and_check)

    notices = train(with_rehearsal, rehearsed=True)
    notices_without = train(without, rehearsed=None)

    assert rehearsed_parts(notices) == [
        "Rehearsed the largest micro-step (2 x 64x64)",
        "Rehearsed a preview",
    ]
    assert rehearsed_parts(notices_without) == []
    assert with_rehearsal.metrics() == without.metrics()
    assert with_rehearsal.path(LORA).read_bytes() == without.path(LORA).read_bytes()
    assert read_previews(with_rehearsal) == read_previews(without)


class Counting(Technique):
    """A technique with a state."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


def test_techniques_restore_their_state_after_a_rehearsal(t2i_checkpoint: Path) -> None:
    technique = Counting(TechniqueSpec())
    assembly = make_assembly(t2i_checkpoint, technique)

    with rehearsal.unchanged(assembly.optimizer, assembly.techniques):
        technique.count = 1

    assert technique.count == 0


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
    def fail(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(steps, "micro_loss", fail)

    message = r"the largest micro-step .* does not fit CPU; the plan expected .* of"
    with pytest.raises(UserError, match=message):
        train(workspace, rehearsed=True)

    assert not workspace.path(LORA).exists()


@pytest.fixture
def two_processes() -> Iterator[None]:
    """The first of two processes, whose exchanges do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("two_processes")
def test_a_rehearsal_allocates_optimizer_state_for_the_local_shard() -> None:
    """A parameter of 4 x 6 has 2 x 6 = 12 values in each process, with 8 bytes of state each."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)], src_data_rank=None)
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(sharded)])
    budget: Any = SimpleNamespace(
        model=SimpleNamespace(state_bytes=lambda dtype: 8.0),
        config=SimpleNamespace(offload=OffloadConfig()),
    )

    assert rehearsal.coming_state(optimizer, budget) == 8 * 12


def test_expected_optimizer_state_equals_what_is_allocated(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[float, float, float]] = []

    def measure(session: Session, validation: Any, budget: Any) -> Any:
        assembly = session.assembly
        expected = rehearsal.coming_state(assembly.optimizer, budget)
        for parameter in assembly.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        assembly.optimizer.step()
        allocated = 0.0
        for state in assembly.optimizer.state.values():
            # Step counts are scalars, and are not counted.
            allocated += sum(tensor.nbytes for tensor in state.values() if tensor.ndim > 0)
        remaining = rehearsal.coming_state(assembly.optimizer, budget)
        measured.append((expected, allocated, remaining))
        return iter(())

    monkeypatch.setattr("simpletuner.run.train.rehearse", measure)

    train(workspace, rehearsed=True)

    ((expected, allocated, remaining),) = measured
    assert expected > 0
    assert allocated == expected
    assert remaining == 0


class CountedMemory(rehearsal.DeviceMemory):
    """A GPU's memory, in which what runs says what it allocates."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_counted = True
        self.allocated = 1.0
        self.most = 0.0

    now = property(lambda memory: memory.allocated)
    peak = property(lambda memory: memory.most)

    def reset_peak(self) -> None:
        self.most = self.allocated

    @contextmanager
    def held(self, size: float) -> Iterator[None]:
        self.allocated += size
        self.most = max(self.most, self.allocated)
        yield
        self.allocated -= size


@pytest.mark.parametrize(
    ("in_background", "expected"),
    [
        (False, ["the largest micro-step (2 x 64x64): 6e9", "a preview: 4e9"]),
        (True, ["the largest micro-step (2 x 64x64) while a preview is decoded: 9e9"]),
    ],
)
def test_a_step_and_a_preview_that_meet_are_rehearsed_together(
    monkeypatch: pytest.MonkeyPatch, in_background: bool, expected: list[str]
) -> None:
    """Of a model of 1 GB, a step that takes 5 more, and a preview that takes 2, then 3 decoding."""
    events: list[str] = []
    memory = CountedMemory(torch.device("cpu"))

    @contextmanager
    def using(what: str, size: float) -> Iterator[None]:
        with memory.held(size * 1e9):
            events.append(f"{what} begins at {memory.now / 1e9:.0f}")
            yield
        events.append(f"{what} ends")

    def step(*arguments: Any) -> None:
        with using("step", 5):
            pass

    def preview(assembly: Any, beside: Any = nullcontext) -> None:
        with using("sampling", 2):
            pass
        with beside(), using("decoding", 3):
            pass

    memory.allocated = 1e9
    monkeypatch.setattr(rehearsal, "DeviceMemory", lambda device: memory)
    monkeypatch.setattr(rehearsal, "rehearse_micro_step", step)
    monkeypatch.setattr(rehearsal, "gigabytes", lambda size: f"{size / 1e9:.0f}e9")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    assembly = SimpleNamespace(optimizer=optimizer, accelerator=SimpleNamespace(device="cpu"))
    assembly.techniques = []
    batch = SimpleNamespace(samples=[SimpleNamespace(frames=1)] * 2, size=Size(64, 64))
    sampler = SimpleNamespace(batches=lambda epoch: [batch])
    session: Any = SimpleNamespace(
        assembly=assembly,
        loader=SimpleNamespace(sampler=sampler, epoch=1),
        reader=lambda batch: batch,
    )
    validation: Any = SimpleNamespace(
        prompts=["a star"], decodes_in_background=in_background, rehearse=preview
    )
    budget: Any = SimpleNamespace(
        phases=[],
        model=SimpleNamespace(state_bytes=lambda dtype: 0.0, update_tensors=0),
        config=SimpleNamespace(offload=OffloadConfig()),
    )

    lines = list(rehearsal.rehearse(session, validation, budget))

    assert [line.partition(",")[0].removeprefix("Rehearsed ") for line in lines] == expected
    decoding = "decoding begins at 9" if in_background else "decoding begins at 4"
    assert events == [
        "step begins at 6",
        "step ends",
        "sampling begins at 3",
        "sampling ends",
        decoding,
        "decoding ends",
    ]
