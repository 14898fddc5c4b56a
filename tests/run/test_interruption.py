"""A run that is stopped, killed or left alone: when it stops, and what it keeps.

Signals come at exact moments, since a subscriber to the events of a run can send one.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.display.log import DebugFile, setup_logging
from simpletuner.annexes.fitting.ready import plan_that_fits
from simpletuner.cli.app import run as run_command
from simpletuner.cli.execute import open_companions
from simpletuner.config.sources import parse_arguments
from simpletuner.distributed.requests import make_request
from simpletuner.distributed.world import World
from simpletuner.errors import Interrupted
from simpletuner.reporting.events import (
    CACHING,
    EVALUATION,
    PREVIEWS,
    CheckpointSaved,
    Event,
    EventStream,
    MediaRendered,
    Notice,
    PhaseAdvanced,
    StateChanged,
    StepReport,
)
from simpletuner.run.train import run_plan
from tests.tools.cases import first_of
from tests.tools.processes import finish, wait_for_step
from tests.tools.runs import (
    PREVIEWED,
    SANA_RUN,
    STATEFUL_RUN,
    assert_same_run,
    make_clip_workspace,
    train_with_subscribers,
)
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, EVAL, Workspace

pytestmark = pytest.mark.slow(3)

Capture = pytest.CaptureFixture[str]
Condition = Callable[[Event], bool]
MEDIA = "output/validation_media.jsonl"
RANDOM_CROPS: dict[str, Any] = {
    **DATASETS[0],
    "crop": True,
    "crop_style": "random",
    "vae_cache_clear_each_epoch": True,
}


class Trigger:
    """Acts at the first event that meets a condition, and keeps all states and events."""

    def __init__(self, condition: Condition, action: Callable[[], object]) -> None:
        self._condition = condition
        self._action = action
        self._is_done = False
        self.states: list[str] = []
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, StateChanged):
            self.states.append(event.state)
        if not self._is_done and self._condition(event):
            self._is_done = True
            self._action()


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def keep_events() -> Trigger:
    """A subscriber that only keeps what it gets."""
    return Trigger(lambda event: False, interrupt)


def at_step(step: int) -> Condition:
    return lambda event: isinstance(event, StepReport) and event.step == step


def at_checkpoint(step: int) -> Condition:
    return lambda event: isinstance(event, CheckpointSaved) and event.step == step


def in_phase(kind: str) -> Condition:
    return lambda event: isinstance(event, PhaseAdvanced) and event.phase.kind == kind


def preview_steps(trigger: Trigger) -> int:
    """How many sampling steps of previews were done."""
    return sum(map(in_phase(PREVIEWS), trigger.events))


def read_media(workspace: Workspace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in workspace.path(MEDIA).read_text().splitlines()]


def recorded_steps(workspace: Workspace) -> list[int]:
    return [row["step"] for row in workspace.metrics()]


@pytest.mark.parametrize("number", first_of([signal.SIGTERM, signal.SIGINT]))
def test_a_signal_stops_a_run_after_its_step_and_it_continues_bit_exactly(
    tmp_path: Path, filled: Workspace, straight: Workspace, number: signal.Signals
) -> None:
    run = filled.copy(tmp_path / "stopped", **STATEFUL_RUN)
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    trigger = Trigger(at_step(4), lambda: signal.raise_signal(number))

    with pytest.raises(Interrupted, match="Stopped at step 4; start again to continue from there"):
        train_with_subscribers(run, trigger)

    assert trigger.states == ["running", "stopping", "interrupted"]
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers
    assert run.train() == 0
    assert_same_run(straight, run)


def test_the_checkpoint_of_an_interruption_does_not_displace_a_regular_one(
    workspace: Workspace,
) -> None:
    workspace.write_config(max_train_steps=5, checkpoint_step_interval=2, checkpoints_total_limit=1)

    with pytest.raises(Interrupted):
        train_with_subscribers(workspace, Trigger(at_step(3), interrupt))

    names = {path.name for path in workspace.path("output").glob("checkpoint-*")}
    assert names == {"checkpoint-2", "checkpoint-3-rolling"}
    assert workspace.train() == 0
    assert recorded_steps(workspace) == [1, 2, 3, 4, 5]


def test_ctrl_c_stops_previews_between_sampling_steps_and_they_are_rendered_later(
    workspace: Workspace,
) -> None:
    workspace.write_config(**PREVIEWED, validation_num_inference_steps=500)
    trigger = Trigger(in_phase(PREVIEWS), interrupt)

    with pytest.raises(Interrupted, match="Stopped at step 2"):
        train_with_subscribers(workspace, trigger)

    assert preview_steps(trigger) == 1, "of 500"
    assert read_media(workspace) == []
    workspace.write_config(validation_num_inference_steps=2)
    assert workspace.train() == 0
    assert [(row["step"], row["short_name"]) for row in read_media(workspace)] == [
        (2, "unconditional"),
        (2, "validation"),
        (4, "unconditional"),
        (4, "validation"),
    ]


def test_a_stop_file_stops_previews_between_sampling_steps(workspace: Workspace) -> None:
    workspace.write_config(**PREVIEWED, validation_num_inference_steps=500)
    output = workspace.path("output")
    trigger = Trigger(in_phase(PREVIEWS), lambda: make_request(output, "stop"))

    with pytest.raises(Interrupted, match="Stopped at step 2"):
        train_with_subscribers(workspace, trigger)

    assert trigger.states == ["running", "stopping", "interrupted"]
    assert preview_steps(trigger) == 1, "of 500"


@pytest.mark.parametrize("is_stopped", [False, True], ids=["finished", "stopped"])
def test_requests_after_the_last_step_are_removed_and_reported(
    workspace: Workspace, is_stopped: bool
) -> None:
    workspace.write_config(max_train_steps=2)
    output = workspace.path("output")

    def make_requests() -> None:
        make_request(output, "save")
        make_request(output, "preview")
        if is_stopped:
            interrupt()

    # The last checkpoint is saved after the requests of its step were handled.
    trigger = Trigger(at_checkpoint(2), make_requests)
    with pytest.raises(Interrupted) if is_stopped else nullcontext():
        train_with_subscribers(workspace, trigger)

    assert list((output / "requests").iterdir()) == []
    notices = [event.text for event in trigger.events if isinstance(event, Notice)]
    assert "Requested after the last step, so not done: save, preview." in notices


def test_damaged_lines_of_a_record_are_reported_when_a_run_continues(workspace: Workspace) -> None:
    workspace.write_config(max_train_steps=1)
    train_with_subscribers(workspace)
    record = workspace.path("output/training_metrics.jsonl")
    record.write_bytes(b"noise\n" + record.read_bytes())
    workspace.write_config(max_train_steps=2)
    listener = keep_events()

    train_with_subscribers(workspace, listener)

    notices = [event for event in listener.events if isinstance(event, Notice)]
    warnings = [notice.text for notice in notices if notice.warning]
    expected = "training_metrics.jsonl: line 1 is damaged and skipped; the other lines are used."
    assert expected in warnings


def make_video_workspace(folder: Path, family: str, sana_checkpoint: Path) -> Workspace:
    if family == "sanavideo":
        settings = {**SANA_RUN, "validation_num_video_frames": 5}
        return Workspace.create(folder / "run", sana_checkpoint, pictures=4, **settings)
    checkpoint = make_checkpoint(folder / "t2v", "t2v")
    return make_clip_workspace(folder / "run", checkpoint, "t2v-lite-sft-5s")


@pytest.mark.parametrize("family", ["kandinsky5-video", "sanavideo"])
def test_ctrl_c_stops_clip_previews_between_sampling_steps(
    tmp_path: Path, sana_checkpoint: Path, family: str
) -> None:
    """The first previews are those of the base model, before step 1."""
    workspace = make_video_workspace(tmp_path, family, sana_checkpoint)
    settings = {**PREVIEWED, "validation_num_inference_steps": 60, "disable_benchmark": False}
    workspace.write_config(**settings)
    trigger = Trigger(in_phase(PREVIEWS), interrupt)

    with pytest.raises(Interrupted, match="Stopped at step 0"):
        train_with_subscribers(workspace, trigger)

    assert preview_steps(trigger) == 1, "of 60"


def test_an_interrupted_evaluation_is_repeated_when_the_run_continues(
    tmp_path: Path, filled: Workspace
) -> None:
    straight = filled.copy(tmp_path / "straight", eval_steps_interval=2, eval_timesteps=2)
    straight.add_pictures("datasets/held out", 2, seed=9)
    straight.write_datasets([*DATASETS, EVAL])
    stopped = straight.copy(tmp_path / "stopped")
    train_with_subscribers(straight)

    with pytest.raises(Interrupted, match="Stopped at step 2"):
        train_with_subscribers(stopped, Trigger(in_phase(EVALUATION), interrupt))
    train_with_subscribers(stopped)

    expected = straight.metrics()
    rows = stopped.metrics()
    # The loss of step 2 has a row of its own: the row of the step had been written by then.
    repeated = rows.pop(2)
    assert repeated.keys() == {"step", "loss/val/held-out"}
    assert {**rows[1], **repeated} == expected[1]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_ctrl_c_while_caching_stops_at_once_and_keeps_finished_entries(
    workspace: Workspace,
) -> None:
    def is_third_picture(event: Event) -> bool:
        if not isinstance(event, PhaseAdvanced):
            return False
        return event.phase.unit == "pictures" and event.done == 3

    shutil.rmtree(workspace.path("output/cache"))
    workspace.write_config(vae_batch_size=1)
    trigger = Trigger(is_third_picture, interrupt)

    with pytest.raises(KeyboardInterrupt):
        train_with_subscribers(workspace, trigger)

    assert is_third_picture(trigger.events[-3]), "before the ends of the phase and of the run"
    entries = workspace.path("output/cache/vae").rglob("*.zst")
    written = {path: path.stat().st_mtime_ns for path in entries}
    assert 3 <= len(written) < 8, "of the eight pictures"
    assert workspace.train() == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_ctrl_c_while_new_crops_are_encoded_keeps_the_last_step(
    tmp_path: Path, workspace: Workspace, t2i_checkpoint: Path
) -> None:
    """The second epoch begins inside step 3, which is interrupted and so trained again."""
    settings = {"max_train_steps": 5, "gradient_accumulation_steps": 3}
    datasets = [RANDOM_CROPS, DATASETS[1]]
    straight = Workspace.create(tmp_path / "straight", t2i_checkpoint, **settings)
    straight.write_datasets(datasets)
    train_with_subscribers(straight)
    workspace.write_config(**settings)
    workspace.write_datasets(datasets)

    def is_second_epoch(event: Event) -> bool:
        has_trained = any(isinstance(past, StepReport) for past in trigger.events)
        return has_trained and in_phase(CACHING)(event)

    trigger = Trigger(is_second_epoch, interrupt)
    with pytest.raises(Interrupted, match="Stopped at step 2"):
        train_with_subscribers(workspace, trigger)
    assert workspace.train() == 0

    assert recorded_steps(workspace) == [1, 2, 3, 4, 5]
    assert workspace.metrics() == straight.metrics()


def test_request_files_save_preview_and_stop(workspace: Workspace) -> None:
    workspace.write_config(**PREVIEWED, max_train_steps=50)
    workspace.write_config(validation_step_interval=100)
    requests = workspace.path("output/requests")
    requests.mkdir(parents=True)
    # A request of an earlier session must not stop this one.
    (requests / "stop").touch()
    wanted = {3: ["save", "preview"], 4: ["save", "preview"], 5: ["stop"]}

    def make_requests(event: Event) -> None:
        names: list[str] = []
        if isinstance(event, StateChanged) and event.state == "running":
            names = ["save"]
        if isinstance(event, StepReport):
            names = wanted.get(event.step, [])
        for name in names:
            (requests / name).touch()

    listener = keep_events()
    with pytest.raises(Interrupted, match="Stopped at step 5"):
        train_with_subscribers(workspace, listener, make_requests)

    saved = [event.path.name for event in listener.events if isinstance(event, CheckpointSaved)]
    assert saved == [
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-5-rolling",
    ]
    # Two prompts at each of two requests.
    assert [row["step"] for row in read_media(workspace)] == [3, 3, 4, 4]
    assert not list(requests.iterdir())


def test_a_nearly_full_disk_stops_the_run_at_a_checkpoint(workspace: Workspace) -> None:
    workspace.write_config(disk_low_threshold="1000T")
    listener = keep_events()

    with pytest.raises(Interrupted, match="Stopped at step 1"):
        train_with_subscribers(workspace, listener)

    states = [event for event in listener.events if isinstance(event, StateChanged)]
    (stopping,) = [event for event in states if event.state == "stopping"]
    assert "disk_low_threshold is 1e+06 GB" in stopping.message
    assert workspace.path("output/checkpoint-1-rolling").is_dir()


MOMENTS: dict[str, Condition] = {
    "step": at_step(2),
    "checkpoint": at_checkpoint(2),
    "last preview": lambda event: isinstance(event, MediaRendered) and event.media.step == 4,
}


def test_a_killed_run_loses_and_repeats_no_record_or_preview(
    tmp_path: Path, filled: Workspace
) -> None:
    settings = {
        **PREVIEWED,
        "disable_benchmark": False,
        "eval_steps_interval": 2,
        "eval_timesteps": 1,
    }
    straight = filled.copy(tmp_path / "straight", **settings)
    straight.add_pictures("datasets/held out", 1, seed=9)
    straight.write_datasets([*DATASETS, EVAL])
    killed = straight.copy(tmp_path / "killed")
    train_with_subscribers(straight)

    for moment in MOMENTS:
        process = killed.fork(die_at, moment)
        process.join()
        assert process.exitcode == 9, moment
    leftover = killed.path("output/.training_report.html.0123456789ab.tmp")
    leftover.touch()
    foreign_file = killed.path("output/.notes.tmp")
    foreign_file.touch()
    killed.path("output/checkpoint-4-tmp").mkdir()
    train_with_subscribers(killed)

    assert killed.metrics() == straight.metrics()
    assert read_media(killed) == read_media(straight)
    assert not leftover.exists()
    assert not list(killed.path("output").glob("*-tmp"))
    assert foreign_file.exists(), "only temporary files of runs are removed"


def die_at(moment: str) -> None:
    """Train in this folder and end without any cleanup at a moment."""
    trigger = Trigger(MOMENTS[moment], lambda: os._exit(9))
    events = EventStream()
    budget = plan_that_fits(parse_arguments([]))
    subscribe = events.subscribe

    def subscribe_before_trigger(
        name: str, subscriber: Callable[[Event], None], **errors: Any
    ) -> None:
        """The trigger stays last, so that the record has every event before the kill."""
        subscribe(name, subscriber, **errors)
        events._subscriptions.sort(key=lambda subscription: subscription.subscriber is trigger)

    events.subscribe = subscribe_before_trigger
    events.subscribe("The trigger", trigger)
    run_plan(budget, events, open_companions(budget.plan, None, events, World()))


def train_into(pipe: str, log: str) -> None:
    """`simpletuner train` as a shell starts it, with its output in a pipe and errors in a file."""
    os.dup2(os.open(pipe, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv[1:] = ["train"]
    run_command()


def test_a_run_survives_its_terminal_and_stops_on_sigterm(workspace: Workspace) -> None:
    """The reader of the pipe closes it, then the terminal hangs up, and training continues."""
    workspace.write_config(max_train_steps=100_000)
    pipe = workspace.path("pipe")
    log = workspace.path("log.txt")
    os.mkfifo(pipe)
    process = workspace.fork(train_into, pipe.name, log.name)
    with pipe.open() as reader:
        first_line = reader.readline()
        reader.readline()
    wait_for_step(workspace, 1, log, [process])

    os.kill(process.pid or 0, signal.SIGHUP)
    wait_for_step(workspace, len(workspace.metrics()) + 3, log, [process])
    os.kill(process.pid or 0, signal.SIGTERM)

    assert finish([process]) == [130]
    errors = log.read_text()
    last = len(workspace.metrics())
    assert errors.splitlines()[-1] == f"Stopped at step {last}; start again to continue from there."
    assert "Traceback" not in errors
    # Even steps have a regular checkpoint already.
    assert last % 2 == 0 or workspace.path(f"output/checkpoint-{last}-rolling").exists()
    assert first_line.startswith("LoRA on")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_path(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The report cannot be written either, which alone would not end the run."""
    replace = Path.replace

    def refuse(path: Path, target: Path) -> Path:
        if Path(target).name in ("training_report.html", "state.pt"):
            raise OSError(code, os.strerror(code), str(path), None, str(target))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)

    assert workspace.train() == 2

    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("The report cannot be written; the run continues without it.") == 1
    assert error.splitlines()[-1].startswith(
        "error: output/checkpoint-2-tmp/training_state/state.pt: "
    )
    # A checkpoint is written in the background, so there may be steps after it.
    assert recorded_steps(workspace)[:2] == [1, 2]


def test_a_full_disk_closes_the_debug_log_without_a_traceback(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    setup_logging(tmp_path / "debug.log")
    root = logging.getLogger()
    (debug_file,) = [handler for handler in root.handlers if isinstance(handler, DebugFile)]
    monkeypatch.setattr(debug_file.stream, "write", refuse)

    for _ in range(3):
        logging.getLogger("simpletuner.test").info("a line")

    assert capsys.readouterr().err.splitlines() == ["a line"] * 3
    assert debug_file not in root.handlers


def test_a_request_file_stops_at_the_end_of_the_epoch(workspace: Workspace) -> None:
    """Eight pictures, repeated once, in batches of two: an epoch has eight steps."""
    workspace.write_config(max_train_steps=50)
    output = workspace.path("output")
    trigger = Trigger(at_step(5), lambda: make_request(output, "stop_at_epoch_end"))

    with pytest.raises(Interrupted, match="Stopped at step 8"):
        train_with_subscribers(workspace, trigger)
