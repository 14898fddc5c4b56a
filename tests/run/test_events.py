"""The stream of events suffices for whoever wants to show a run: a page, a webhook, a person."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpletuner.errors import Interrupted
from simpletuner.reporting.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    EventStream,
    MediaRendered,
    Notice,
    PhaseAdvanced,
    PhaseEnded,
    PhaseStarted,
    Rounds,
    StateChanged,
    StepReport,
)
from tests.run.test_interruption import train
from tests.validation.test_eval_loss import EVAL
from tests.workspace import DATASETS, Workspace


class Status:
    """What `GET /api/training/status` will answer, from events alone."""

    def __init__(self) -> None:
        self.status = "idle"
        self.current = self.total = 0
        self.metrics: dict[str, float] = {}
        self.losses: dict[int, dict[str, float]] = {}
        self.stages: dict[str, tuple[str, int, int | None]] = {}
        self.checkpoints: list[str] = []
        self.media: list[str] = []
        self.lines: list[str] = []

    def __call__(self, event: Event) -> None:
        match event:
            case StateChanged():
                self.status, self.current, self.total = event.state, event.step, event.total_steps
                self.lines += event.message.splitlines()
            case PhaseStarted():
                self.stages[event.title] = ("running", 0, event.total)
            case PhaseAdvanced():
                self.stages[event.phase.title] = ("running", event.done, event.phase.total)
            case PhaseEnded():
                how = "completed" if event.complete else "failed"
                self.stages[event.phase.title] = (how, event.done, event.phase.total)
            case StepReport():
                self.current, self.metrics = event.step, dict(event.metrics)
            case Evaluated():
                self.losses[event.step] = dict(event.losses)
            case MediaRendered():
                self.media.append(event.media.path)
            case CheckpointSaved():
                self.checkpoints.append(event.path.name)
            case Notice():
                self.lines.append(event.text)


def test_a_subscriber_knows_the_whole_run(workspace: Workspace) -> None:
    workspace.add_pictures("datasets/held out", 2, seed=9)
    workspace.write_datasets([*DATASETS, EVAL])
    workspace.write_config(eval_steps_interval=2, eval_timesteps=2, validation_disable=False)
    status = Status()
    train(workspace, status)
    assert (status.status, status.current, status.total) == ("finished", 4, 4)
    record = workspace.metrics()
    assert status.metrics.items() <= record[-1].items()
    assert status.losses == {
        row["step"]: {name: value for name, value in row.items() if name.startswith("loss/val/")}
        for row in record
        if row["step"] % 2 == 0
    }
    assert status.checkpoints == ["checkpoint-2", "checkpoint-4"]
    rows = [json.loads(line) for line in workspace.path("output/validation_media.jsonl").read_text().splitlines()]
    assert status.media == [row["path"] for row in rows]
    assert all(workspace.path("output").joinpath(path).is_file() for path in status.media)
    assert {"Encoding pictures", "Loading the transformer", "Evaluating at step 2", "Rendering previews at step 4"} <= {
        *status.stages
    }
    assert {how for how, _, _ in status.stages.values()} == {"completed"}
    assert all(done == total for _, done, total in status.stages.values() if total is not None)
    assert any(line.startswith("Saved output/pytorch_lora_weights.safetensors") for line in status.lines)


def test_a_failure_is_the_last_state(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("the transformer broke")

    monkeypatch.setattr("simpletuner.training.loop.optimizer_step", broken)
    status = Status()
    with pytest.raises(RuntimeError):
        train(workspace, status)
    assert status.status == "failed"
    assert status.lines[-1].startswith("the transformer broke. Start again")


def test_a_stop_request_ends_phases_and_starts_no_new_ones() -> None:
    status = Status()
    events = EventStream(status)

    def work() -> None:
        with events.phase("Encoding", 5) as phase:
            for index in range(5):
                if index == 2:
                    events.stop.request()
                phase.advance()

    with pytest.raises(Interrupted):
        work()
    assert status.stages == {"Encoding": ("failed", 3, 5)}
    with pytest.raises(Interrupted), events.phase("Rendering"):
        pytest.fail("a stop was requested")
    assert "Rendering" not in status.stages


def test_rounds_to_come() -> None:
    assert [Rounds(10).after(step, 35) for step in (0, 9, 10, 34, 35)] == [3, 3, 2, 0, 0]
    assert [Rounds(10, at_end=True).after(step, 35) for step in (0, 30, 34, 35)] == [4, 1, 1, 0]
    assert Rounds(10, at_end=True).after(0, 30) == 3, "the end of an interval is the end of the run"
    assert Rounds(2.5).after(4, 10) == 3


def test_a_request_is_taken_once_and_other_files_stay(tmp_path: Path) -> None:
    from simpletuner.distributed.requests import make_request, take_requests

    assert take_requests(tmp_path) == []
    make_request(tmp_path, "save")
    make_request(tmp_path, "save")
    for name in ("stop", "holiday"):
        (tmp_path / "requests" / name).touch()
    assert take_requests(tmp_path) == ["stop", "save"]
    assert take_requests(tmp_path) == []
    assert [path.name for path in (tmp_path / "requests").iterdir()] == ["holiday"]
