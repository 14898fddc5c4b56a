"""A run that is stopped, killed or left alone: what is answered, what is kept, and what the record
says.

Signals come at exact moments: whoever subscribes to the events of a run can send one.
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
from tests.run.test_kandinsky5_video import make_workspace
from tests.run.test_processes import wait_for_step
from tests.run.test_resume import SETTINGS, assert_same_run
from tests.tools.cases import first_of
from tests.tools.processes import finish
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, EVAL, Workspace

pytestmark = pytest.mark.slow(3)

MEDIA = "output/validation_media.jsonl"
PREVIEWED: dict[str, Any] = {
    "validation_disable": False,
    "validation_step_interval": 2,
    "disable_benchmark": True,
    "validation_disable_unconditional": False,
}


class Trigger:
    """Acts at the first event that is waited for, and keeps the states and the events."""

    def __init__(self, wanted: Callable[[Event], bool], act: Callable[[], object]) -> None:
        self._wanted = wanted
        self._act = act
        self._acted = False
        self.states: list[str] = []
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, StateChanged):
            self.states.append(event.state)
        if not self._acted and self._wanted(event):
            self._acted = True
            self._act()


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def in_phase(kind: str, done: int = 0) -> Callable[[Event], bool]:
    return lambda event: (
        isinstance(event, PhaseAdvanced) and event.phase.kind == kind and event.done >= done
    )


def train(workspace: Workspace, *subscribers: Callable[[Event], None]) -> None:
    events = EventStream(*subscribers)
    with workspace.inside():
        budget = plan_that_fits(parse_arguments([]))
        run_plan(budget, events, open_companions(budget.plan, None, events, World()))


def media(workspace: Workspace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in workspace.path(MEDIA).read_text().splitlines()]


@pytest.mark.parametrize("number", first_of([signal.SIGTERM, signal.SIGINT]))
def test_a_signal_stops_a_run_after_its_step_and_it_continues_bit_exactly(
    tmp_path: Path, filled: Workspace, straight: Workspace, number: signal.Signals
) -> None:
    stopped = filled.copy(tmp_path / "stopped", **SETTINGS)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    trigger = Trigger(
        lambda event: isinstance(event, StepReport) and event.step == 4,
        lambda: signal.raise_signal(number),
    )
    with pytest.raises(Interrupted, match="Stopped at step 4; start again to continue from there"):
        train(stopped, trigger)
    assert trigger.states == ["running", "stopping", "interrupted"]
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    assert stopped.train() == 0
    assert_same_run(straight, stopped)


def test_the_checkpoint_of_an_interruption_does_not_displace_a_regular_one(
    workspace: Workspace,
) -> None:
    workspace.write_config(max_train_steps=5, checkpoint_step_interval=2, checkpoints_total_limit=1)
    with pytest.raises(Interrupted):
        train(
            workspace,
            Trigger(lambda event: isinstance(event, StepReport) and event.step == 3, interrupt),
        )
    names = {path.name for path in workspace.path("output").glob("checkpoint-*")}
    assert names == {"checkpoint-2", "checkpoint-3-rolling"}
    assert workspace.train() == 0
    assert [row["step"] for row in workspace.metrics()] == [1, 2, 3, 4, 5]


def test_ctrl_c_stops_previews_between_sampling_steps_and_they_are_rendered_later(
    workspace: Workspace,
) -> None:
    workspace.write_config(**PREVIEWED, validation_num_inference_steps=500)
    trigger = Trigger(in_phase(PREVIEWS), interrupt)
    with pytest.raises(Interrupted, match="Stopped at step 2"):
        train(workspace, trigger)
    sampled = sum(
        isinstance(event, PhaseAdvanced) for event in trigger.events if in_phase(PREVIEWS)(event)
    )
    assert sampled == 1, "of 500 sampling steps"
    assert not workspace.path(MEDIA).read_text()
    workspace.write_config(validation_num_inference_steps=2)
    assert workspace.train() == 0
    assert [(row["step"], row["short_name"]) for row in media(workspace)] == [
        (step, name) for step in (2, 4) for name in ("unconditional", "validation")
    ]


def test_a_stop_file_stops_previews_between_sampling_steps(workspace: Workspace) -> None:
    workspace.write_config(**PREVIEWED, validation_num_inference_steps=500)
    trigger = Trigger(in_phase(PREVIEWS), lambda: make_request(workspace.path("output"), "stop"))
    with pytest.raises(Interrupted, match="Stopped at step 2"):
        train(workspace, trigger)
    assert trigger.states == ["running", "stopping", "interrupted"]
    assert sum(map(in_phase(PREVIEWS), trigger.events)) == 1, "of 500 sampling steps"


@pytest.mark.parametrize("ends_early", [False, True], ids=["finished", "stopped"])
def test_requests_after_the_last_step_are_removed_and_reported(
    workspace: Workspace, ends_early: bool
) -> None:
    workspace.write_config(max_train_steps=2)
    output = workspace.path("output")

    def ask() -> None:
        make_request(output, "save")
        make_request(output, "preview")
        if ends_early:
            interrupt()

    def is_last_checkpoint(
        event: Event,
    ) -> bool:  # it is saved after the step's requests are handled
        return isinstance(event, CheckpointSaved) and event.step == 2

    trigger = Trigger(is_last_checkpoint, ask)
    with pytest.raises(Interrupted) if ends_early else nullcontext():
        train(workspace, trigger)

    assert list((output / "requests").iterdir()) == []
    notices = [event.text for event in trigger.events if isinstance(event, Notice)]
    assert "Requested after the last step, so not done: save, preview." in notices


def test_damaged_lines_of_a_record_are_reported_when_a_run_continues(workspace: Workspace) -> None:
    workspace.write_config(max_train_steps=1)
    train(workspace)
    record = workspace.path("output/training_metrics.jsonl")
    record.write_bytes(b"noise\n" + record.read_bytes())
    workspace.write_config(max_train_steps=2)
    listener = Trigger(lambda event: False, interrupt)

    train(workspace, listener)

    warnings = [
        event.text for event in listener.events if isinstance(event, Notice) and event.warning
    ]
    assert (
        "training_metrics.jsonl: line 1 is damaged and skipped; the other lines are used."
        in warnings
    )


@pytest.mark.parametrize("family", ["kandinsky5-video", "sanavideo"])
def test_ctrl_c_stops_clip_previews_between_sampling_steps(
    tmp_path: Path, sana_checkpoint: Path, family: str
) -> None:
    settings = {**PREVIEWED, "validation_num_inference_steps": 60, "disable_benchmark": False}
    if family == "sanavideo":
        sana = {
            "model_family": family,
            "model_flavour": "2b-480p",
            "validation_num_video_frames": 5,
        }
        workspace = Workspace.create(tmp_path / "run", sana_checkpoint, pictures=4, **sana)
    else:
        workspace = make_workspace(
            tmp_path / "run", make_checkpoint(tmp_path / "t2v", "t2v"), "t2v-lite-sft-5s"
        )
    workspace.write_config(**settings)
    trigger = Trigger(in_phase(PREVIEWS), interrupt)
    with pytest.raises(Interrupted, match="Stopped at step 0"):
        train(workspace, trigger)
    assert sum(map(in_phase(PREVIEWS), trigger.events)) == 1


def test_an_interrupted_evaluation_is_repeated_when_the_run_continues(
    tmp_path: Path, filled: Workspace
) -> None:
    runs = [filled.copy(tmp_path / name) for name in ("straight", "broken")]
    for run in runs:
        run.add_pictures("datasets/held out", 2, seed=9)
        run.write_datasets([*DATASETS, EVAL])
        run.write_config(eval_steps_interval=2, eval_timesteps=2)
    train(runs[0])
    with pytest.raises(Interrupted, match="Stopped at step 2"):
        train(runs[1], Trigger(in_phase(EVALUATION), interrupt))
    train(runs[1])
    straight = runs[0].metrics()
    broken = runs[1].metrics()
    made_up = broken.pop(2)
    assert made_up.keys() == {"step", "loss/val/held-out"}
    assert {**broken[1], **made_up} == straight[1]
    assert [row["step"] for row in broken] == [1, 2, 3, 4]


def test_ctrl_c_while_caching_stops_at_once_and_keeps_finished_entries(
    workspace: Workspace,
) -> None:
    def third_picture(event: Event) -> bool:
        return (
            isinstance(event, PhaseAdvanced) and event.phase.unit == "pictures" and event.done == 3
        )

    shutil.rmtree(workspace.path("output/cache"))
    workspace.write_config(vae_batch_size=1)
    trigger = Trigger(third_picture, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(workspace, trigger)
    assert third_picture(trigger.events[-3]), "the ends of the phase and of the run follow"
    kept = {
        path: path.stat().st_mtime_ns for path in workspace.path("output/cache/vae").rglob("*.zst")
    }
    assert 3 <= len(kept) < 8
    assert workspace.train() == 0
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())


def test_ctrl_c_while_new_crops_are_encoded_keeps_the_last_step(workspace: Workspace) -> None:
    """The stop comes inside a step, which has then not happened."""
    random_crops = {
        **DATASETS[0],
        "crop": True,
        "crop_style": "random",
        "vae_cache_clear_each_epoch": True,
    }
    workspace.write_datasets([random_crops, DATASETS[1]])
    workspace.write_config(max_train_steps=5, gradient_accumulation_steps=3)

    def second_epoch(event: Event) -> bool:
        return in_phase(CACHING)(event) and any(
            isinstance(event, StepReport) for event in trigger.events
        )

    trigger = Trigger(second_epoch, interrupt)
    with pytest.raises(Interrupted, match="Stopped at step 2"):
        train(workspace, trigger)
    assert workspace.train() == 0
    rows = workspace.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    straight = Workspace.create(
        workspace.folder.parent / "straight",
        Path(
            json.loads(workspace.path("config/config.json").read_text())[
                "pretrained_model_name_or_path"
            ]
        ),
        max_train_steps=5,
        gradient_accumulation_steps=3,
    )
    straight.write_datasets([random_crops, DATASETS[1]])
    train(straight)
    assert straight.metrics() == rows


def test_request_files_save_preview_and_stop(workspace: Workspace) -> None:
    workspace.write_config(**{**PREVIEWED, "validation_step_interval": 100}, max_train_steps=50)
    requests = workspace.path("output/requests")
    requests.mkdir(parents=True)
    (requests / "stop").touch()  # of an earlier session

    def ask(event: Event) -> None:
        if isinstance(event, StateChanged) and event.state == "running":
            (requests / "save").touch()
        if isinstance(event, StepReport) and event.step in (3, 4, 5):
            for name in ("save", "preview") if event.step < 5 else ("stop",):
                (requests / name).touch()

    trigger = Trigger(lambda event: False, interrupt)
    with pytest.raises(Interrupted, match="Stopped at step 5"):
        train(workspace, trigger, ask)
    saved = [event.path.name for event in trigger.events if isinstance(event, CheckpointSaved)]
    assert saved == [
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-5-rolling",
    ]
    assert [row["step"] for row in media(workspace)] == [3, 3, 4, 4]
    assert not list(requests.iterdir())


def test_a_nearly_full_disk_stops_the_run_at_a_checkpoint(workspace: Workspace) -> None:
    workspace.write_config(disk_low_threshold="1000T")
    trigger = Trigger(lambda event: False, interrupt)
    with pytest.raises(Interrupted, match="Stopped at step 1"):
        train(workspace, trigger)
    (stopping,) = (
        event
        for event in trigger.events
        if isinstance(event, StateChanged) and event.state == "stopping"
    )
    assert "disk_low_threshold is 1e+06 GB" in stopping.message
    assert workspace.path("output/checkpoint-1-rolling").is_dir()


MOMENTS: dict[str, Callable[[Event], bool]] = {
    "step": lambda event: isinstance(event, StepReport) and event.step == 2,
    "checkpoint": lambda event: isinstance(event, CheckpointSaved) and event.step == 2,
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
    straight, killed = (filled.copy(tmp_path / name, **settings) for name in ("one", "two"))
    for run in (straight, killed):
        run.add_pictures("datasets/held out", 1, seed=9)
        run.write_datasets([*DATASETS, EVAL])
    train(straight)
    for moment in MOMENTS:
        process = killed.fork(die_at, moment)
        process.join()
        assert process.exitcode == 9, moment
    stray = killed.path("output/.training_report.html.0123456789ab.tmp")
    mine = killed.path("output/.notes.tmp")
    stray.touch()
    mine.touch()
    killed.path("output/checkpoint-4-tmp").mkdir()
    train(killed)
    assert killed.metrics() == straight.metrics()
    assert media(killed) == media(straight)
    assert not stray.exists()
    assert mine.exists(), "it is not ours"
    assert not list(killed.path("output").glob("*-tmp"))


def die_at(moment: str) -> None:
    """Train in this folder and end without any farewell at a moment."""
    trigger = Trigger(MOMENTS[moment], lambda: os._exit(9))
    # After the record: what was published before the kill is what the record has.
    events = EventStream()
    budget = plan_that_fits(parse_arguments([]))
    subscribe = events.subscribe

    def last(name: str, subscriber: Callable[[Event], None], **errors: Any) -> None:
        subscribe(name, subscriber, **errors)
        events._subscriptions.sort(key=lambda subscription: subscription.subscriber is trigger)

    events.subscribe = last
    events.subscribe("The trigger", trigger)
    run_plan(budget, events, open_companions(budget.plan, None, events, World()))


def train_into(pipe: str, log: str) -> None:
    """`simpletuner train` as it is started from a shell, with its output in a pipe and its errors
    in a file.
    """
    for number, path in enumerate((pipe, log), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv[1:] = ["train"]
    run_command()


def test_a_run_survives_its_terminal_and_stops_on_sigterm(
    workspace: Workspace,
) -> None:
    """The reader of the pipe goes, the terminal hangs up, and the run still ends as it is asked
    to.
    """
    workspace.write_config(max_train_steps=100_000)
    pipe = workspace.path("pipe")
    log = workspace.path("log.txt")
    os.mkfifo(pipe)
    process = workspace.fork(train_into, pipe.name, log.name)
    with pipe.open() as reader:
        lines = [reader.readline() for _ in range(2)]
    wait_for_step(workspace, 1, log, [process])
    os.kill(process.pid or 0, signal.SIGHUP)
    wait_for_step(workspace, len(workspace.metrics()) + 3, log, [process])
    os.kill(process.pid or 0, signal.SIGTERM)
    assert finish([process]) == [130]
    told = log.read_text()
    last = len(workspace.metrics())
    assert told.splitlines()[-1] == f"Stopped at step {last}; start again to continue from there."
    assert "Traceback" not in told
    assert workspace.path(f"output/checkpoint-{last}-rolling").exists() or last % 2 == 0
    assert lines[0].startswith("LoRA on")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_path(
    workspace: Workspace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    replace = Path.replace

    def refuse(path: Path, target: Path) -> Path:
        if Path(target).name in ("training_report.html", "state.pt"):
            raise OSError(code, os.strerror(code), str(path), None, str(target))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refuse)
    assert workspace.train() == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert told.count("The report cannot be written; the run continues without it.") == 1
    assert told.splitlines()[-1].startswith(
        "error: output/checkpoint-2-tmp/training_state/state.pt: "
    )
    assert [row["step"] for row in workspace.metrics()][:2] == [1, 2], (
        "training goes on while a checkpoint is written"
    )


def test_a_full_disk_closes_the_debug_log_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup_logging(tmp_path / "debug.log")
    root = logging.getLogger()
    (file,) = (handler for handler in root.handlers if isinstance(handler, DebugFile))

    def full(text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file.stream, "write", full)
    for _ in range(3):
        logging.getLogger("simpletuner.test").info("a line")
    told = capsys.readouterr().err
    assert told.splitlines() == ["a line"] * 3
    assert file not in root.handlers


def test_a_request_file_stops_at_the_end_of_the_epoch(workspace: Workspace) -> None:
    workspace.write_config(max_train_steps=50)

    def fifth(event: Event) -> bool:
        return isinstance(event, StepReport) and event.step == 5

    trigger = Trigger(fifth, lambda: make_request(workspace.path("output"), "stop_at_epoch_end"))
    with pytest.raises(Interrupted, match="Stopped at step 8"):  # the epoch is eight steps long
        train(workspace, trigger)
