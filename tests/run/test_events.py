"""The stream of events is enough to show a run, and a failed subscriber does not end it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from simpletuner.distributed.requests import make_request, take_requests
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
    StateChanged,
    StepReport,
)
from tests.tools.runs import LORA, train_with_subscribers
from tests.tools.workspace import DATASETS, EVAL, Workspace


class Status:
    """What the page shows of a run (`GET /api/training/status`), from events alone."""

    def __init__(self) -> None:
        self.status = "idle"
        self.current = 0
        self.total = 0
        self.metrics: dict[str, float] = {}
        self.losses: dict[int, dict[str, float]] = {}
        self.stages: dict[str, tuple[str, int, int | None]] = {}
        self.names: list[str] = []
        self.checkpoints: list[str] = []
        self.media: list[str] = []
        self.lines: list[str] = []

    def __call__(self, event: Event) -> None:
        match event:
            case StateChanged():
                self.status = event.state
                self.current = event.step
                self.total = event.total_steps
                self.lines += event.message.splitlines()
            case PhaseStarted():
                self.stages[event.title] = ("running", 0, event.total)
                self.names.append(event.stage or event.kind)
            case PhaseAdvanced():
                self.stages[event.phase.title] = ("running", event.done, event.phase.total)
            case PhaseEnded():
                state = "completed" if event.complete else "failed"
                self.stages[event.phase.title] = (state, event.done, event.phase.total)
            case StepReport():
                self.current = event.step
                self.metrics = dict(event.metrics)
            case Evaluated():
                self.losses[event.step] = dict(event.losses)
            case MediaRendered():
                self.media.append(event.media.path)
            case CheckpointSaved():
                self.checkpoints.append(event.path.name)
            case Notice():
                self.lines.append(event.text)


def evaluation_losses(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("loss/val/")}


def test_events_alone_show_the_progress_of_a_run(workspace: Workspace) -> None:
    workspace.add_pictures("datasets/held out", 2, seed=9)
    workspace.write_datasets([*DATASETS, EVAL])
    workspace.write_config(
        eval_steps_interval=2,
        eval_timesteps=2,
        validation_disable=False,
        validation_step_interval=2,
        validation_num_inference_steps=1,
    )
    status = Status()

    train_with_subscribers(workspace, status)

    assert status.status == "finished"
    assert status.current == 4
    assert status.total == 4
    rows = workspace.metrics()
    assert status.metrics.items() <= rows[-1].items()
    assert status.losses == {2: evaluation_losses(rows[1]), 4: evaluation_losses(rows[3])}
    assert status.checkpoints == ["checkpoint-2", "checkpoint-4"]
    media = workspace.path("output/validation_media.jsonl").read_text().splitlines()
    assert status.media == [json.loads(line)["path"] for line in media]
    assert all(workspace.path(f"output/{path}").is_file() for path in status.media)
    assert f"Saved {LORA}" in "\n".join(status.lines)
    assert "Encoding pictures" in status.stages
    assert "Loading the transformer" in status.stages
    assert "Evaluating at step 2" in status.stages
    assert "Rendering previews at step 4" in status.stages
    assert status.names == [
        "init_vae_cache",
        "init_load_base_model",
        "benchmark_base_model",
        "evaluation",
        "validation",
        "evaluation",
        "final_validation",
        "save_result",
    ]
    for title, (state, done, total) in status.stages.items():
        assert state == "completed", title
        assert total is None or done == total, title


# Every subscriber of a run with all that can subscribe, and whether the run continues without it.
SUBSCRIBERS = {
    "The display": True,
    "events.jsonl": True,
    "The webhook at 127.0.0.1": True,
    "The watch": False,
    "The report of failures": True,
    "The record": False,
    "tensorboard": True,
    "The comparison with the estimate": True,
    "The report": True,
    "The upload of checkpoints": True,
}
OPTIONAL = [name for name, is_optional in SUBSCRIBERS.items() if is_optional]
ESSENTIAL = [name for name, is_optional in SUBSCRIBERS.items() if not is_optional]
WITH_ALL_SUBSCRIBERS = (
    "report_to=tensorboard",
    'webhook_config={"webhook_type": "raw", "webhook_url": "http://127.0.0.1:9"}',
)


class EventCounter:
    """Counts the events of every subscriber, some of which raise an error at their first event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: Collection[str]) -> None:
        self.counts: Counter[str] = Counter()
        subscribe = EventStream.subscribe

        def subscribe_counted(
            stream: EventStream, name: str, subscriber: Callable[[Event], None], **errors: Any
        ) -> None:
            self.counts[name] = 0

            def count(event: Event) -> None:
                self.counts[name] += 1
                if name in failing:
                    raise RuntimeError("a bug")
                subscriber(event)

            subscribe(stream, name, count, **errors)

        monkeypatch.setattr(EventStream, "subscribe", subscribe_counted)


@pytest.mark.slow(4)
def test_a_run_survives_the_failure_of_every_optional_subscriber(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    counter = EventCounter(monkeypatch, OPTIONAL)

    assert workspace.train(*WITH_ALL_SUBSCRIBERS) == 0

    assert counter.counts.keys() == SUBSCRIBERS.keys(), "a new subscriber has a row here"
    assert len(workspace.metrics()) == 4, "the record has every step"
    log = capsys.readouterr().err
    for name in OPTIONAL:
        assert counter.counts[name] == 1, name
        report = f"{name} stopped working; training continues without it. (RuntimeError: a bug)"
        assert log.count(report) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("failing", OPTIONAL)
def test_a_failed_subscriber_does_not_stop_events_of_the_rest(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    pytest.importorskip("tensorboard")
    with monkeypatch.context() as patch:
        healthy = EventCounter(patch, ())
        assert workspace.train(*WITH_ALL_SUBSCRIBERS) == 0
    second_run = ("output_dir=second", "cache_dir=output/cache")

    counter = EventCounter(monkeypatch, [failing])
    assert workspace.train(*WITH_ALL_SUBSCRIBERS, *second_run) == 0

    assert counter.counts == {**healthy.counts, failing: 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ESSENTIAL)
def test_a_failure_of_an_essential_subscriber_ends_the_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    EventCounter(monkeypatch, [name])

    assert workspace.train() == 1

    assert not workspace.path(LORA).exists()


def test_a_failure_is_the_last_state(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("the transformer broke")

    monkeypatch.setattr("simpletuner.training.loop.optimizer_step", fail)
    status = Status()

    with pytest.raises(RuntimeError):
        train_with_subscribers(workspace, status)

    assert status.status == "failed"
    assert status.lines[-1].startswith("the transformer broke. Start again")


def test_a_stop_request_ends_phases_and_starts_no_new_ones() -> None:
    status = Status()
    events = EventStream(status)

    def encode_and_stop() -> None:
        with events.phase("Encoding", 5) as phase:
            phase.advance()
            phase.advance()
            events.stop.request()
            phase.advance()
            pytest.fail("the phase continued")

    with pytest.raises(Interrupted):
        encode_and_stop()

    assert status.stages == {"Encoding": ("failed", 3, 5)}
    with pytest.raises(Interrupted), events.phase("Rendering"):
        pytest.fail("a stop was requested")
    assert "Rendering" not in status.stages


def test_a_request_is_taken_once_and_unknown_files_stay(tmp_path: Path) -> None:
    requests = tmp_path / "requests"
    assert take_requests(tmp_path) == []
    make_request(tmp_path, "save")
    make_request(tmp_path, "save")
    (requests / "stop").touch()
    (requests / "holiday").touch()

    assert take_requests(tmp_path) == ["stop", "save"]

    assert take_requests(tmp_path) == []
    assert [path.name for path in requests.iterdir()] == ["holiday"]
