"""Trackers for real where that needs no network, and training that goes on when they fail."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from PIL import Image

from simpletuner.annexes import trackers
from simpletuner.annexes.trackers import TrackedRun, Tracker, TrackerEvents, open_trackers
from simpletuner.config.load import build_group
from simpletuner.config.schema import TrackingConfig, all_options
from simpletuner.config.trackers import (
    PACKAGES,
    WANDB_REFUSED,
    check_trackers,
    has_wandb_login,
    why_missing,
)
from simpletuner.data.clip_writer import write_mp4
from simpletuner.errors import Problems
from simpletuner.reporting.events import (
    EventStream,
    MediaRendered,
    PhaseEnded,
    PhaseStarted,
    StateChanged,
    StepReport,
)
from simpletuner.reporting.metrics import MediaRecord
from simpletuner.reporting.step_figures import row_of
from tests.tools.reports import found_by

WANDB_VARIABLES = (
    "WANDB_API_KEY",
    "WANDB_MODE",
    "WANDB_DISABLED",
    "WANDB_BASE_URL",
    "WANDB_IDENTITY_TOKEN_FILE",
)


@pytest.fixture(autouse=True)
def clean_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WANDB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home" / "wandb"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))
    monkeypatch.chdir(tmp_path)


def preview(folder: Path, step: int) -> MediaRecord:
    path = f"validation_images/step_{step}_glimmer_0_32x32.png"
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 32), (120, 40, 160)).save(folder / path)
    return MediaRecord(step, "glimmer", "a purple star", path, 32, 32, 1)


def run_in(folder: Path, start: int = 0) -> TrackedRun:
    return TrackedRun("p", "r", {"learning_rate": 1e-4}, folder, folder / "logs", start)


def messages(report_to: str) -> list[str]:
    return [
        str(problem)
        for problem in found_by(check_trackers, TrackingConfig(report_to=report_to))
        if problem.fatal
    ]


@pytest.mark.parametrize("report_to", ["none", "", "simpletuner", "all", "wandb, TensorBoard"])
def test_report_to_accepts_known_trackers(report_to: str) -> None:
    assert messages(report_to) == []


def test_report_to_refuses_unknown_trackers() -> None:
    assert "not available yet" in messages("comet_ml")[0]
    assert "not available yet" in messages("wandb,swanlab")[0]
    assert "Did you mean 'wandb'?" in messages("wanbd")[0]
    assert "at once" in messages("none,wandb")[0]


def test_missing_wandb_login_is_a_warning_without_a_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problems = found_by(check_trackers, TrackingConfig(report_to="wandb"))
    assert [problem.fatal for problem in problems] == [False]
    assert "wandb login" in problems[0].message

    with caplog.at_level(logging.WARNING, logger="simpletuner"):
        assert list(open_trackers("wandb", run_in(tmp_path))) == []
    assert "training continues without it" in caplog.text


def test_missing_tracker_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("simpletuner.config.trackers.is_installed", lambda module: False)

    [problem] = found_by(check_trackers, TrackingConfig(report_to="tensorboard"))

    assert "pip install 'tensorboard>=" in problem.message
    assert list(open_trackers("all", run_in(tmp_path))) == []


def test_every_tracker_has_a_class_a_row_and_a_place_in_the_help() -> None:
    assert trackers.TRACKERS.keys() == PACKAGES.keys()

    explained = all_options()["report_to"].help
    assert [name for name in PACKAGES if name not in explained] == []


def test_a_tracker_may_need_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("simpletuner.config.trackers.PACKAGES", {"plain": None})
    monkeypatch.setattr(trackers, "TRACKERS", {"plain": lambda run: run.project})

    assert why_missing("plain") is None
    assert [name for name, _ in open_trackers("plain", run_in(tmp_path))] == ["plain"]


@pytest.mark.parametrize("key", ["tracker_project_name", "tracker_run_name"])
@pytest.mark.parametrize("name", ["/runs", "../runs", "runs/../.."])
def test_a_name_that_leaves_logging_dir_is_refused(key: str, name: str) -> None:
    problems = Problems()
    build_group(TrackingConfig, {key: name}, problems)
    message = "points outside logging_dir; it is a name, with no '..' and no '/' in front."

    assert [str(problem) for problem in problems] == [f"{key}: {name!r} {message}"]


def test_wandb_login_is_read_from_netrc_or_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_wandb_login()

    netrc_file = tmp_path / "home" / ".netrc"
    netrc_file.parent.mkdir(parents=True)
    netrc_file.write_text("machine api.wandb.ai login user password " + "a" * 40 + "\n")
    assert has_wandb_login()

    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_login()

    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    assert has_wandb_login()


def step_done(step: int) -> StepReport:
    return StepReport(step, 1, {"train_loss": 1 / step}, 0.1, timesteps=[10.0, 500.0])


def track(tracker: Tracker, output: Path, first: int, last: int) -> None:
    """Send the events of some steps, a preview after the last step, and the end."""
    send = TrackerEvents(tracker)
    for step in range(first, last + 1):
        send(step_done(step))
    send(MediaRendered(preview(output, last)))
    send(PhaseEnded(PhaseStarted("previews"), 1, 0.1, complete=True))
    send(StateChanged("finished", last, last))


@pytest.mark.slow(3)
def test_offline_wandb_run_continues_under_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    output = tmp_path / "out"
    logs = tmp_path / "logs"
    settings = {
        "learning_rate": 1e-4,
        "webhook_config": {"webhook_url": "https://example.org/geheim"},
    }

    for start in (0, 2):
        [(_, tracker)] = open_trackers("wandb", TrackedRun("p", "r", settings, output, logs, start))
        track(tracker, output, start + 1, start + 2)
    assert "stopped working" not in caplog.text

    run_id = json.loads((output / "wandb_run.json").read_text())["id"]
    files = sorted((logs / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2, "the resumed session goes on under the same id"

    content = b"".join(file.read_bytes() for file in files)
    assert b"train_loss" in content
    assert b"timesteps_scatter" in content
    assert b"validation/glimmer" in content
    assert b"geheim" not in content
    assert list((logs / "wandb").glob("offline-run-*/files/media/images/validation/*.png"))


def test_resumed_run_appends_to_the_tensorboard_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, last in ((0, 5), (3, 6)):
        [(_, tracker)] = open_trackers("tensorboard", run_in(tmp_path, start))
        track(tracker, tmp_path, start + 1, last)
    events = EventAccumulator(str(tmp_path / "logs" / "p" / "r"))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [1, 2, 3, 4, 5, 6]
    assert {*events.Tags()["scalars"]} == {*row_of(step_done(1))} - {"timesteps"}, (
        "the numbers of the record"
    )
    assert events.Tags()["images"] == ["validation/glimmer/0"]
    assert events.Tags()["histograms"] == ["timesteps"]


def test_a_clip_leaves_a_frame_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = "validation_videos/step_1_glimmer_0_32x32.mp4"
    (tmp_path / path).parent.mkdir()
    write_mp4(tmp_path / path, [Image.new("RGB", (32, 32), (120, 40, 160))] * 5, 8)
    [(_, tracker)] = open_trackers("tensorboard", run_in(tmp_path))

    send = TrackerEvents(tracker)
    send(MediaRendered(MediaRecord(1, "glimmer", "a star", path, 32, 32, 5)))
    send(PhaseEnded(PhaseStarted("previews"), 1, 0.1, complete=True))
    send(StateChanged("finished", 1, 1))

    events = EventAccumulator(str(tmp_path / "logs" / "p" / "r"))
    events.Reload()
    assert events.Tags()["images"] == ["validation/glimmer/0"]


@pytest.mark.parametrize("sign", "/\\\\#?%:")
def test_a_project_that_wandb_refuses_is_refused_before_the_run(
    sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    name = f"my{sign}project"

    for report_to, count in (("wandb", 1), ("all", 1), ("tensorboard", 0), ("none", 0)):
        settings = TrackingConfig(report_to=report_to, tracker_project_name=name)
        refusals = [
            str(problem)
            for problem in found_by(check_trackers, settings)
            if "wandb does not take" in problem.message
        ]
        assert len(refusals) == count


def test_the_names_that_wandb_refuses_are_those_of_its_package() -> None:
    wandb = pytest.importorskip("wandb")
    for name in ("x" * 129, *(f"a{sign}b" for sign in WANDB_REFUSED)):
        with pytest.raises(wandb.errors.UsageError):
            wandb.Settings(project=name)
    wandb.Settings(project="x" * 128)


class BrokenTracker:
    """A tracker whose server went away."""

    name = "broken"

    def __init__(self) -> None:
        self.calls: list[int] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append(step)
        raise ConnectionError("no route; api_key=abcdef123456\nsecond line")

    def log_timesteps(self, timesteps: Sequence[float], step: int) -> None: ...

    def log_media(self, media: Sequence[MediaRecord], step: int) -> None: ...

    def finish(self, exit_code: int = 0) -> None: ...


def test_a_failing_tracker_is_named_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    broken = BrokenTracker()
    events = EventStream()
    events.subscribe("broken", TrackerEvents(broken))

    with caplog.at_level(logging.WARNING, logger="simpletuner"):
        for step in (1, 2, 3):
            events.publish(step_done(step))
        events.publish(StateChanged("finished", 3, 3))

    assert broken.calls == [1]
    assert len(caplog.records) == 1
    assert (
        "broken stopped working; training continues without it. (ConnectionError: no route"
        in caplog.text
    )
    assert "abcdef" not in caplog.text


def test_a_tracker_that_cannot_be_opened_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(run: TrackedRun) -> BrokenTracker:
        raise ImportError("broken installation")

    monkeypatch.setattr(trackers, "TRACKERS", {"tensorboard": build})

    assert list(open_trackers("tensorboard", run_in(tmp_path))) == []

    assert (
        "tensorboard stopped working; training continues without it. (ImportError: broken "
        "installation)" in caplog.text
    )
