"""Displays: throttled lines in files, a terminal that is left in order, and the choice between them."""

from __future__ import annotations

import io
import logging
import re
from dataclasses import replace

import pytest

from simpletuner.reporting.log import setup_logging
from simpletuner.reporting.pace import Pace, RunningMean, clock, pace_text, size_text
from simpletuner.reporting.plain import PlainProgress
from simpletuner.reporting.progress import SilentProgress, StepNumbers, make_progress
from simpletuner.reporting.terminal import LiveProgress, sparkline


class Clock:
    """A clock that a test turns by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(step: int, seconds: float = 0.5) -> StepNumbers:
    return StepNumbers(step, 1, 1.0 / step, 1e-4, seconds, data_wait_seconds=0.001, memory_bytes=3 * 2**30, epochs=4)


def test_a_run_of_300_steps_prints_about_30_lines() -> None:
    stream = io.StringIO()
    with PlainProgress(stream, Clock()) as progress:
        progress.start_training(300)
        for step in range(1, 301):
            progress.step(report(step))
    lines = stream.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert 28 <= len(steps) <= 33
    assert steps[0].startswith("step 1/300  epoch 1/4  loss 1.0000  lr 1.00e-04  0.50 s/step")
    assert steps[-1].endswith("3.0 GiB  compute 100 %, waiting for data 0 %")
    assert steps[-1].startswith("step 300/300")
    assert lines[-1].startswith("Trained 300 steps in 2:30 (0.50 s/step), step 300 of 300")


def test_slow_steps_are_told_at_least_every_minute() -> None:
    stream, time = io.StringIO(), Clock()
    progress = PlainProgress(stream, time)
    progress.start_training(10_000)
    for step in range(1, 11):
        time.time += 31
        progress.step(report(step, 31))
    assert len([line for line in stream.getvalue().splitlines() if line.startswith("step ")]) == 5


def test_a_quick_phase_prints_one_line() -> None:
    stream = io.StringIO()
    with PlainProgress(stream, Clock()).phase("Encoding captions", total=1200, unit="captions") as phase:
        for _ in range(1200):
            phase.advance(note="bild.txt")
    assert stream.getvalue() == "Encoding captions: 1,200 captions in 0.0 s\n"


def test_a_slow_phase_prints_about_every_tenth() -> None:
    stream, time = io.StringIO(), Clock()
    with PlainProgress(stream, time).phase("Encoding pictures", total=200, unit="pictures") as phase:
        for index in range(200):
            time.time += 0.5
            phase.advance(note=f"चित्र {index}.png")
    lines = stream.getvalue().splitlines()
    assert 10 <= len(lines) <= 14
    assert re.fullmatch(r"Encoding pictures: \d+/200 pictures \(\d+ %\) \(चित्र \d+\.png\)", lines[0])
    assert lines[-1] == "Encoding pictures: 200 pictures in 1:40"


def test_an_interrupted_phase_says_where_it_stopped() -> None:
    stream = io.StringIO()

    def interrupted() -> None:
        with PlainProgress(stream).phase("Loading", total=4, unit="files") as phase:
            phase.advance()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue() == "Loading: stopped at 1/4 files (25 %)\n"


def test_a_finished_run_started_again_says_so() -> None:
    stream = io.StringIO()
    with PlainProgress(stream) as progress:
        progress.start_training(300, start_step=300)
    assert "No step was needed" in stream.getvalue()


def test_the_stream_decides_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_progress(io.StringIO()), PlainProgress)
    assert isinstance(make_progress(Terminal()), LiveProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(Terminal()), PlainProgress)


def test_the_live_display_shows_the_run_and_restores_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()

    def interrupted() -> None:
        with make_progress(terminal) as progress:
            with progress.phase("Encoding captions", total=3, unit="captions") as phase:
                phase.advance(3, note="[bold]file[/].txt")
            progress.start_training(300, start_step=100)
            progress.step(report(101))
            progress.say("a line above")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    shown = terminal.getvalue()
    assert "Encoding captions" in shown
    assert "step 101 of 300" in shown
    assert "compute 100 %, waiting for data 0 %" in shown
    assert "a line above" in shown
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert hide in shown
    assert shown.rindex(show) > shown.rindex(hide)
    assert "Trained 1 step in" in shown[shown.rindex(show) :]


def test_log_lines_appear_above_the_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    setup_logging("INFO", debug_file=None)
    with make_progress(terminal) as progress:
        progress.start_training(10)
        logging.getLogger("simpletuner.test").warning("checkpoint saved")
    before, after = terminal.getvalue().split("WARNING checkpoint saved\n", 1)
    assert "\x1b[?25l" in before, "the display was running"
    assert "Training" in after, "and was drawn again below the line"


def test_silence() -> None:
    with SilentProgress() as progress, progress.phase("x", 3) as phase:
        phase.advance(2)
        progress.step(report(1))


def test_the_first_values_of_a_running_mean_are_not_pulled_to_zero() -> None:
    mean = RunningMean(0.98)
    assert mean.add(4.0) == pytest.approx(4.0)
    assert mean.add(2.0) == pytest.approx((0.98 * 4 + 2) / 1.98)


def test_remaining_time_and_waiting_share() -> None:
    pace = Pace(total_steps=110, start_step=100)
    pace.add(StepNumbers(101, 1, 0.5, 1e-4, seconds=2.0, data_wait_seconds=0.5))
    assert pace.remaining_seconds == pytest.approx(18.0)
    assert pace.shares == pytest.approx({"compute": 0.75, "data": 0.25})


def test_the_line_that_explains_the_speed() -> None:
    pace = Pace(total_steps=110, start_step=100)
    pace.add(StepNumbers(101, 1, 0.5, 1e-4, seconds=2.0, data_wait_seconds=0.1))
    assert pace.speed == "compute 95 %, waiting for data 5 %"
    streamed = StepNumbers(102, 1, 0.5, 1e-4, 2.0, data_wait_seconds=0.1, weights_wait_seconds=0.4, mfu=0.38)
    pace = Pace(total_steps=110, start_step=101)
    pace.add(streamed)
    assert pace.speed == "compute 75 %, waiting for weights 20 %, waiting for data 5 %, MFU 38 %"
    # A fast step in between counts for as long as it took: 2 s at .38 and 1 s at .76, the second a bit more.
    pace.add(replace(streamed, step=103, seconds=1.0, mfu=0.76))
    assert pace.mfu == pytest.approx((0.9 * 2 * 0.38 + 0.76) / (0.9 * 2 + 1))


def test_numbers_for_people() -> None:
    assert [clock(7.21), clock(59.6), clock(245), clock(7209)] == ["7.2 s", "1:00", "4:05", "2:00:09"]
    assert [pace_text(1.919), pace_text(0.0381)] == ["1.92 s/step", "38 ms/step"]
    assert [size_text(0), size_text(512), size_text(1536), size_text(12_240_656_794)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "11.4 GiB",
    ]
    assert sparkline([1.0, 2.0, 3.0], 3) == "▁▅█"
    assert sparkline([], 8) == ""
    assert len(sparkline([float(x) for x in range(1000)], 32)) == 32
