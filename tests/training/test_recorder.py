"""The record and the display get the times of a step, and results do not depend on them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner.distributed.requests import Request, expect_requests, make_request
from simpletuner.distributed.world import World
from simpletuner.models.cost import Work
from simpletuner.reporting.events import Event, EventStream, Notice, StateChanged, StepReport
from simpletuner.reporting.pace import ENOUGH, RECENT, SlowSteps
from simpletuner.reporting.record import RunRecord
from simpletuner.reporting.step_figures import row_of
from simpletuner.training.recorder import Recorder, RequestHandler, utilisation
from simpletuner.training.state import Assembly, TrainState
from simpletuner.training.step import optimizer_step
from tests.tools.assembly import make_assembly, make_batch
from tests.training.test_step import CAPTIONS, Batches


class Listener:
    """A subscriber that stores its events."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[StepReport] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.said.append(event.text)
        if isinstance(event, StepReport):
            self.steps.append(event)


class Streamer:
    """A streamer that waited nine seconds in previews before the step, and a quarter in it."""

    def __init__(self) -> None:
        self.readings = iter([9.0, 0.25])

    def waited(self) -> float:
        return next(self.readings)


def report(step: int, seconds: float = 1.0, **changes: object) -> StepReport:
    metrics = {"train_loss": 0.5, "learning_rate": 1e-4}
    return StepReport(step, 1, metrics, seconds, 0.01, shapes=((1, 16, 1, 4, 4),), **changes)


@pytest.fixture
def assembly(t2i_checkpoint: Path) -> Assembly:
    return make_assembly(t2i_checkpoint, gradient_accumulation_steps=2)


def test_a_step_reports_its_waits_and_its_flops(assembly: Assembly, t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, CAPTIONS)
    assembly.sample_flops = None
    plain = optimizer_step(assembly, Batches(batch, batch), 0)

    assert (plain.weights_seconds, plain.flops) == (None, None)
    assert (plain.shapes, plain.passes) == (((4, 16, 1, 4, 4),) * 2, 2)

    asked = []

    def cost(tokens: int, text_tokens: int) -> Work:
        asked.append((tokens, text_tokens))
        return Work(1000.0 * tokens, text_tokens)

    streamer: Any = Streamer()
    assembly.streamer = streamer
    assembly.sample_flops = cost
    message = optimizer_step(assembly, Batches(batch, batch), 1)

    assert message.weights_seconds == 0.25

    lengths = [len(embeds["prompt_embeds"]) for embeds in batch.embeds]
    assert asked == [(4, length) for length in lengths] * 2
    assert message.flops == 2 * (4 * 4000 + sum(lengths))


def test_the_record_has_utilisation_and_share_of_waits(tmp_path: Path, assembly: Assembly) -> None:
    listener = Listener()
    events = EventStream(RunRecord(tmp_path, 0), listener)
    recorder = Recorder(events, 1, matmul_flops=1e12)
    recorder.on_step_end(assembly, TrainState(), report(1))
    recorder.on_step_end(assembly, TrainState(), report(2, 2.0, weights_seconds=0.5, flops=8e11))
    events.publish(StateChanged("finished", 2, 2))
    lines = (tmp_path / "training_metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)

    assert (first["compute_share"], first["data_share"]) == (0.99, 0.01)
    assert not {"weights_share", "weights_seconds", "mfu"} & first.keys()
    assert (second["compute_share"], second["weights_share"], second["data_share"]) == (
        0.745,
        0.25,
        0.005,
    )
    assert (second["seconds"], second["weights_seconds"], second["mfu"]) == (2.0, 0.5, 0.4)
    assert (listener.steps[1].weights_seconds, listener.steps[1].mfu) == (0.5, 0.4)


def test_utilisation_needs_flops_and_the_rate_of_the_device() -> None:
    assert utilisation(report(1), 1e12) is None
    assert utilisation(report(1, flops=1e11), None) is None
    assert utilisation(report(1, flops=1e11), 1e12) == pytest.approx(0.1)
    assert "mfu" not in row_of(StepReport(1, 1, {}, 1.0))


def test_slow_steps_are_reported_to_the_user(assembly: Assembly) -> None:
    listener = Listener()
    clock = [0.0]
    watcher = SlowSteps(lambda: clock[0])
    recorder = Recorder(EventStream(listener), 1, slow_steps=watcher)
    for step in range(1, 2 * ENOUGH + RECENT + 1):
        seconds = 1.0 if step <= 2 * ENOUGH else 2.0
        clock[0] += seconds
        recorder.on_step_end(assembly, TrainState(), report(step, seconds))
    recorder.on_train_end(assembly, TrainState())

    assert len(listener.said) == 1
    assert "2.0 times the usual" in listener.said[0]


def test_steps_with_extra_passes_are_not_reported_as_slow(assembly: Assembly) -> None:
    listener = Listener()
    clock = [0.0]
    recorder = Recorder(EventStream(listener), 1, slow_steps=SlowSteps(lambda: clock[0]))
    for step in range(1, 4 * ENOUGH):
        passes = 3 if step % 20 > 14 else 1  # also several times in a row, by chance
        clock[0] += passes
        recorder.on_step_end(assembly, TrainState(), report(step, float(passes), passes=passes))

    assert listener.said == []


@dataclass(frozen=True)
class Second(World):
    """Process 1 of two, the first of which has got a request."""

    asked: tuple[Request, ...] = ()

    def gather(self, value: Any) -> list[Any]:
        assert value is None, "only the first process looks at the files"
        return [list(self.asked), value]


def test_requests_to_the_main_process_are_handled_by_all_processes(
    tmp_path: Path, assembly: Assembly
) -> None:
    expect_requests(tmp_path)
    make_request(tmp_path, "save")
    saved: list[int] = []
    for world in (World(), Second(1, 2, asked=("save",))):
        handler = RequestHandler(
            tmp_path, EventStream(), {"save": lambda one, state: saved.append(one.world.rank)}
        )
        handler.on_train_start(replace(assembly, world=world), TrainState())
        handler.on_step_end(replace(assembly, world=world), TrainState(), report(1))

    assert saved == [0, 1]
    assert not list((tmp_path / "requests").iterdir())
