"""The stream of events suffices for whoever wants to show a run: a page, a webhook, a person."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
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
    StateChanged,
    StepReport,
)
from tests.tools.runs import train_with_subscribers
from tests.tools.workspace import DATASETS, EVAL, Workspace


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
                self.status = event.state
                self.current = event.step
                self.total = event.total_steps
                self.lines += event.message.splitlines()
            case PhaseStarted():
                self.stages[event.title] = ("running", 0, event.total)
            case PhaseAdvanced():
                self.stages[event.phase.title] = ("running", event.done, event.phase.total)
            case PhaseEnded():
                how = "completed" if event.complete else "failed"
                self.stages[event.phase.title] = (how, event.done, event.phase.total)
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


def test_events_alone_show_the_progress_of_a_run(workspace: Workspace) -> None:
    workspace.add_pictures("datasets/held out", 2, seed=9)
    workspace.write_datasets([*DATASETS, EVAL])
    workspace.write_config(eval_steps_interval=2, eval_timesteps=2, validation_disable=False)
    status = Status()
    train_with_subscribers(workspace, status)
    assert (status.status, status.current, status.total) == ("finished", 4, 4)
    record = workspace.metrics()
    assert status.metrics.items() <= record[-1].items()
    assert status.losses == {
        row["step"]: {name: value for name, value in row.items() if name.startswith("loss/val/")}
        for row in record
        if row["step"] % 2 == 0
    }
    assert status.checkpoints == ["checkpoint-2", "checkpoint-4"]
    rows = [
        json.loads(line)
        for line in workspace.path("output/validation_media.jsonl").read_text().splitlines()
    ]
    assert status.media == [row["path"] for row in rows]
    assert all(workspace.path("output").joinpath(path).is_file() for path in status.media)
    assert {
        "Encoding pictures",
        "Loading the transformer",
        "Evaluating at step 2",
        "Rendering previews at step 4",
    } <= {*status.stages}
    assert {how for how, _, _ in status.stages.values()} == {"completed"}
    assert all(done == total for _, done, total in status.stages.values() if total is not None)
    assert any(
        line.startswith("Saved output/pytorch_lora_weights.safetensors") for line in status.lines
    )


# Every subscriber of a run with all that can subscribe, and whether the run goes on without it.
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
GUARDED = [name for name, is_guarded in SUBSCRIBERS.items() if is_guarded]
WITH_ALL = (
    "report_to=tensorboard",
    'webhook_config={"webhook_type": "raw", "webhook_url": "http://127.0.0.1:9"}',
)


class Watched:
    """Counts the events of every subscriber; some raise an error at their first one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: Collection[str]) -> None:
        self.counts: Counter[str] = Counter()
        subscribe = EventStream.subscribe

        def wrapped(
            stream: EventStream, name: str, subscriber: Callable[[Event], None], **errors: Any
        ) -> None:
            self.counts[name] = 0

            def counted(event: Event) -> None:
                self.counts[name] += 1
                if name in failing:
                    raise RuntimeError("a bug")
                subscriber(event)

            subscribe(stream, name, counted, **errors)

        monkeypatch.setattr(EventStream, "subscribe", wrapped)


@pytest.mark.slow(4)
def test_a_run_survives_the_failure_of_every_optional_subscriber(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    watched = Watched(monkeypatch, GUARDED)

    assert workspace.train(*WITH_ALL) == 0

    assert watched.counts.keys() == SUBSCRIBERS.keys(), "a new subscriber has a row here"
    assert {name: watched.counts[name] for name in GUARDED} == dict.fromkeys(GUARDED, 1)
    assert len(workspace.metrics()) == 4, "the record has every step"
    logged = capsys.readouterr().err
    for name in GUARDED:
        assert (
            logged.count(
                f"{name} stopped working; training continues without it. (RuntimeError: a bug)"
            )
            == 1
        )


@pytest.mark.thorough
@pytest.mark.parametrize("failing", GUARDED)
def test_a_failed_subscriber_does_not_stop_events_of_the_rest(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    pytest.importorskip("tensorboard")
    with monkeypatch.context() as uninterrupted:
        whole = Watched(uninterrupted, ())
        assert workspace.train(*WITH_ALL) == 0

    watched = Watched(monkeypatch, [failing])
    assert workspace.train(*WITH_ALL, "output_dir=other", "cache_dir=output/cache") == 0

    assert watched.counts == {**whole.counts, failing: 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, is_guarded in SUBSCRIBERS.items() if not is_guarded]
)
def test_a_failure_of_an_essential_subscriber_ends_the_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    Watched(monkeypatch, [name])

    assert workspace.train() == 1

    assert not workspace.path("output/pytorch_lora_weights.safetensors").exists()


def test_a_failure_is_the_last_state(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("the transformer broke")

    monkeypatch.setattr("simpletuner.training.loop.optimizer_step", broken)
    status = Status()
    with pytest.raises(RuntimeError):
        train_with_subscribers(workspace, status)
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


def test_a_request_is_taken_once_and_unknown_files_stay(tmp_path: Path) -> None:
    from simpletuner.distributed.requests import make_request, take_requests

    assert take_requests(tmp_path) == []
    make_request(tmp_path, "save")
    make_request(tmp_path, "save")
    for name in ("stop", "holiday"):
        (tmp_path / "requests" / name).touch()
    assert take_requests(tmp_path) == ["stop", "save"]
    assert take_requests(tmp_path) == []
    assert [path.name for path in (tmp_path / "requests").iterdir()] == ["holiday"]
