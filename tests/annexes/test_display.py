"""Displays: few lines in a file, a live panel that leaves the terminal in order, and the choice."""

from __future__ import annotations

import io
import logging
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from simpletuner.annexes.display.log import setup_logging
from simpletuner.annexes.display.progress import PlainDisplay, make_display, shown_events
from simpletuner.annexes.display.terminal import LiveDisplay, sparkline, training_panel
from simpletuner.annexes.figures import Pace, RunningMean, ending
from simpletuner.reporting.events import (
    CACHING,
    EVALUATION,
    PREVIEWS,
    SAVING,
    CheckpointSaved,
    Event,
    EventStream,
    PhaseAdvanced,
    PhaseEnded,
    PhaseStarted,
    StateChanged,
    StepReport,
)
from simpletuner.reporting.intervals import Rounds
from simpletuner.reporting.wording import clock_text, pace_text, size_text


class Clock:
    """A clock that a test turns by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(step: int, seconds: float = 0.5) -> StepReport:
    metrics = {"train_loss": 1.0 / step, "learning_rate": 1e-4}
    return StepReport(
        step, 1, metrics, seconds, data_seconds=0.001, memory_bytes=3 * 2**30, epochs=4
    )


def running(total_steps: int, start_step: int = 0) -> StateChanged:
    return StateChanged("running", start_step, total_steps)


def test_a_run_of_300_steps_prints_about_30_lines() -> None:
    stream = io.StringIO()

    with closing(PlainDisplay(stream, Clock())) as display:
        display(running(300))
        for step in range(1, 301):
            display(report(step))

    lines = stream.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert 28 <= len(steps) <= 33
    assert steps[0].startswith("step 1/300  epoch 1/4  loss 1.0000  lr 1.00e-04  0.50 s/step")
    assert steps[-1].endswith("3.2 GB  compute 100 %, waiting for data 0 %")
    assert steps[-1].startswith("step 300/300")
    assert lines[-1].startswith("Trained 300 steps in 2:30 (0.50 s/step), step 300 of 300")


def test_slow_steps_are_printed_at_least_every_minute() -> None:
    stream = io.StringIO()
    time = Clock()
    display = PlainDisplay(stream, time)
    display(running(10_000))

    for step in range(1, 11):
        time.time += 31
        display(report(step, 31))

    lines = stream.getvalue().splitlines()
    # Every second of the ten steps: one step of 31 s is less than a minute.
    assert len([line for line in lines if line.startswith("step ")]) == 5


def test_a_quick_phase_prints_one_line() -> None:
    stream = io.StringIO()

    events = EventStream(PlainDisplay(stream, Clock()))

    with events.phase("Encoding captions", total=1200, unit="captions") as phase:
        for _ in range(1200):
            phase.advance(note="bild.txt")

    assert re.fullmatch(r"Encoding captions: 1,200 captions in [\d.]+ s\n", stream.getvalue())


def test_a_slow_phase_prints_every_ten_seconds() -> None:
    stream = io.StringIO()
    time = Clock()

    events = EventStream(PlainDisplay(stream, time))

    with events.phase("Encoding pictures", total=200, unit="pictures") as phase:
        for index in range(200):
            time.time += 0.5
            phase.advance(note=f"चित्र {index}.png")

    lines = stream.getvalue().splitlines()
    # 100 s make ten lines, and the phase ends with one.
    assert len(lines) == 11
    assert re.fullmatch(
        r"Encoding pictures: \d+/200 pictures \(\d+ %\) \(चित्र \d+\.png\)", lines[0]
    )
    assert re.fullmatch(r"Encoding pictures: 200 pictures in [\d.]+ s", lines[-1])


def test_interrupted_phase_prints_where_it_stopped() -> None:
    stream = io.StringIO()

    def interrupted() -> None:
        with EventStream(PlainDisplay(stream)).phase("Loading", total=4, unit="files") as phase:
            phase.advance()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert stream.getvalue() == "Loading: stopped at 1/4 files (25 %)\n"
    assert ending(PhaseEnded(PhaseStarted("Loading torch"), 0, 1.0, complete=False)) == "stopped"


def test_restarting_a_finished_run_prints_that_nothing_is_left() -> None:
    stream = io.StringIO()

    with closing(PlainDisplay(stream)) as display:
        display(running(300, start_step=300))

    assert "No step was needed" in stream.getvalue()


def test_display_is_chosen_by_the_output_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_display(io.StringIO()), PlainDisplay)
    assert isinstance(make_display(Terminal()), LiveDisplay)

    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(Terminal()), PlainDisplay)


def test_the_live_display_shows_the_run_and_restores_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()

    def interrupted() -> None:
        with shown_events(terminal) as events:
            with events.phase("Encoding captions", total=3, unit="captions") as phase:
                phase.advance(3, note="[bold]file[/].txt")
            events.publish(running(300, start_step=100))
            events.publish(report(101))
            events.notify("a line above")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    output = terminal.getvalue()
    assert "Encoding captions" in output
    assert "step 101 of 300" in output
    assert "compute 100 %, waiting for data 0 %" in output
    assert "a line above" in output

    hide = "\x1b[?25l"
    show = "\x1b[?25h"
    assert hide in output
    assert output.rindex(show) > output.rindex(hide)
    assert "Trained 1 step in" in output[output.rindex(show) :]


def test_echo_of_ctrl_c_fits_beside_the_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would wrap, and the first line of the display would stay on the screen."""
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()

    with closing(LiveDisplay(terminal)) as display:
        display(running(300))
        display(report(1))

    panel = re.search(r"╰─+╯", terminal.getvalue())
    assert panel is not None
    assert len(panel[0]) <= 80 - len("^C^C")


def test_lines_of_the_live_display_end_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    path = "output/a-rather-long-name/of-a-folder/pytorch_lora_weights.safetensors"

    with closing(LiveDisplay(terminal)) as display:
        display.print_lines(f"Saved {path}; all tensors load through the stock pipeline.")

    first, *further = terminal.getvalue().splitlines()
    assert first == "Saved"
    assert further[0].strip() == f"{path};"
    assert max(map(len, further[1:])) <= 40


def test_phase_without_a_total_shows_no_count() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100)

    with closing(LiveDisplay(Terminal())) as display:
        display.show(PhaseStarted("Loading torch"))
        display.show(PhaseStarted("Encoding", 3, "captions"))
        console.print(display._bars)

    uncounted, counted = stream.getvalue().splitlines()
    assert "Loading torch" in uncounted
    assert "/" not in uncounted
    assert "0/3 captions (0 %)" in counted


def test_log_lines_appear_above_the_live_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    setup_logging(debug_file=None)
    with shown_events(terminal) as events:
        events.publish(running(10))
        logging.getLogger("simpletuner.test").warning("checkpoint saved")

    before, after = terminal.getvalue().split("WARNING checkpoint saved\n", 1)

    assert "\x1b[?25l" in before, "the display was running"
    assert "Training" in after, "and was drawn again below the line"


def test_running_mean_starts_unbiased() -> None:
    mean = RunningMean(0.98)

    assert mean.add(4.0) == pytest.approx(4.0)
    assert mean.add(2.0) == pytest.approx((0.98 * 4 + 2) / 1.98)


LOSS = {"train_loss": 0.5, "learning_rate": 1e-4}


def test_pace_reports_remaining_time_and_share_spent_waiting() -> None:
    pace = Pace(total_steps=110, start_step=100)

    pace.note(StepReport(101, 1, LOSS, seconds=2.0, data_seconds=0.5))

    assert pace.remaining_seconds == pytest.approx(18.0)
    assert pace.shares == pytest.approx({"compute": 0.75, "data": 0.25})


def test_remaining_time_includes_previews_evaluation_and_saving() -> None:
    rounds = {
        PREVIEWS: Rounds(every=50, seconds=60.0, at_end=True),
        EVALUATION: Rounds(every=2.5),
        SAVING: Rounds(every=4, at_end=True),
        CACHING: Rounds(every=5),
    }
    pace = Pace(total_steps=110, start_step=100, rounds=rounds)

    pace.note(StepReport(101, 1, LOSS, seconds=2.0))
    assert pace.remaining_seconds == pytest.approx(9 * 2 + 60), (
        "previews at the end, as the plan expects them"
    )

    events = EventStream(pace.note)
    events.publish(PhaseEnded(PhaseStarted("", kind=PREVIEWS), 1, 40.0, complete=True))
    events.publish(PhaseEnded(PhaseStarted("", kind=EVALUATION), 1, 3.0, complete=True))
    events.publish(CheckpointSaved(Path("checkpoint-100"), 100, 0.5))
    assert pace.remaining_seconds == pytest.approx(9 * 2 + 40 + 4 * 3 + 3 * 0.5)


def test_last_previews_are_part_of_the_remaining_time_until_they_are_rendered() -> None:
    rounds = {PREVIEWS: Rounds(every=50, seconds=60.0, at_end=True), SAVING: Rounds(every=50)}
    pace = Pace(total_steps=100, start_step=0, rounds=rounds)
    phase = PhaseStarted("Rendering previews", 6, kind=PREVIEWS)

    pace.note(PhaseEnded(phase, 6, 30.0, complete=True))
    pace.note(CheckpointSaved(Path("checkpoint-50"), 50, 2.0))
    pace.note(StepReport(100, 1, LOSS, seconds=2.0))
    left = [pace.remaining_seconds]
    for event in (
        PhaseAdvanced(phase, 3),
        PhaseEnded(phase, 6, 30.0, complete=True),
        CheckpointSaved(Path("checkpoint-100"), 100, 2.0),
    ):
        pace.note(event)
        left.append(pace.remaining_seconds)

    assert left == [32.0, 17.0, 2.0, 0.0]


def test_remaining_time_is_that_of_the_plan_until_a_step_is_measured() -> None:
    pace = Pace(total_steps=100, start_step=90, step_seconds=3.0)

    assert pace.remaining_seconds == 30.0


def test_encoding_new_crops_does_not_count_as_a_slow_step() -> None:
    pace = Pace(total_steps=110, start_step=100, rounds={CACHING: Rounds(every=5)})
    pace.note(PhaseEnded(PhaseStarted("", kind=CACHING), 8, 30.0, complete=True))

    pace.note(StepReport(101, 1, LOSS, seconds=32.5, data_seconds=30.5))

    assert pace.seconds_per_step == pytest.approx(2.5)
    assert pace.remaining_seconds == pytest.approx(9 * 2.5 + 2 * 30)


def test_run_stopped_before_its_first_step_is_not_called_finished() -> None:
    assert Pace(300, 300).summary().startswith("No step was needed")
    assert Pace(300, 100).summary() == "No step was completed; the run is at step 100 of 300."


def test_speed_line_shows_where_the_time_goes() -> None:
    pace = Pace(total_steps=110, start_step=100)
    pace.note(StepReport(101, 1, LOSS, seconds=2.0, data_seconds=0.1))
    assert pace.speed == "compute 95 %, waiting for data 5 %"

    streamed = StepReport(102, 1, LOSS, 2.0, data_seconds=0.1, weights_seconds=0.4, mfu=0.38)
    pace = Pace(total_steps=110, start_step=101)
    pace.note(streamed)
    assert pace.speed == "compute 75 %, waiting for weights 20 %, waiting for data 5 %, MFU 38 %"

    # A mean over time, in which the past fades by 0.9 a step: 2 s at .38, then 1 s at .76.
    pace.note(replace(streamed, step=103, seconds=1.0, mfu=0.76))
    assert pace.mfu == pytest.approx((0.9 * 2 * 0.38 + 0.76) / (0.9 * 2 + 1))


def test_numbers_in_the_panel_fit_eighty_columns() -> None:
    pace = Pace(total_steps=2000, start_step=100)
    pace.note(
        StepReport(
            101, 12, {**LOSS, "learning_rate": 1e-4}, 2.0, epochs=31, memory_bytes=23_400_000_000
        )
    )
    console = Console(width=80, file=io.StringIO(), record=True)

    console.print(training_panel(pace))
    [line] = [line for line in console.export_text().splitlines() if "loss" in line]

    assert all(name in line for name in ("lr 1.00e-04", "s/step", "epoch 12/31", "memory 23.4 GB"))


class DeadTerminal(Terminal):
    """A terminal whose window is closed once `alive` is False."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = True

    def write(self, text: str) -> int:
        if not self.alive:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("kind", ["xterm-256color", "dumb"])
def test_closed_terminal_ends_the_display_but_not_the_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", kind)
    terminal = DeadTerminal()
    steps: list[int] = []

    def note_step(event: Event) -> None:
        if isinstance(event, StepReport):
            steps.append(event.step)

    with shown_events(terminal) as events:
        events.subscribe("steps", note_step)
        events.publish(running(10))
        terminal.alive = False
        with events.phase("Rendering previews", 1) as phase:
            phase.advance()
        events.publish(report(1))
        events.publish(report(2))

    assert steps == [1, 2]


def test_durations_speeds_and_sizes_are_readable() -> None:
    assert clock_text(7.21) == "7.2 s"
    assert clock_text(45.2) == "45 s"
    assert clock_text(59.6) == "1:00"
    assert clock_text(245) == "4:05"
    assert clock_text(7209) == "2:00:09"

    assert pace_text(1.919) == "1.92 s/step"
    assert pace_text(0.0381) == "0.038 s/step"

    assert size_text(0) == "0 B"
    assert size_text(512) == "512 B"
    assert size_text(1536) == "1.5 kB"
    assert size_text(12_240_656_794) == "12.2 GB"


def test_sparkline_draws_the_last_values_in_a_given_width() -> None:
    assert sparkline([1.0, 2.0, 3.0], 3) == "▁▅█"
    assert sparkline([], 8) == ""
    assert len(sparkline([float(x) for x in range(1000)], 32)) == 32
