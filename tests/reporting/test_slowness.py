"""Slow steps are reported once, with a reason; pauses and larger shapes are not slow."""

from __future__ import annotations

import pytest

from simpletuner.reporting.events import StepReport
from simpletuner.reporting.pace import ENOUGH, RECENT, SlowSteps

SMALL = ((1, 16, 1, 8, 8),)
LARGE = ((1, 16, 1, 16, 16),)


class Run:
    """Steps on a clock that the test sets."""

    def __init__(self) -> None:
        self.time = 0.0
        self.watcher = SlowSteps(lambda: self.time)
        self.notices: list[str] = []

    def steps(
        self,
        count: int,
        seconds: float,
        *,
        data: float = 0.01,
        weights: float | None = None,
        shape: tuple[tuple[int, ...], ...] = SMALL,
        pause: float = 0.0,
    ) -> None:
        """Add steps of equal duration, with a pause before each of them."""
        for _ in range(count):
            self.time += pause + seconds
            notice = self.watcher.add(StepReport(1, 1, {}, seconds, data, weights, shapes=shape))
            self.notices += [notice] if notice else []


def test_every_slow_episode_is_reported_once() -> None:
    run = Run()
    run.steps(ENOUGH * 2, 1.0)

    run.steps(RECENT // 2, 1.6)
    assert run.notices == []

    run.steps(10, 1.6)
    assert len(run.notices) == 1

    run.steps(10, 1.3)
    run.steps(10, 1.6)
    assert len(run.notices) == 1, "it has not been fast in between"

    run.steps(40, 1.0)
    run.steps(10, 1.6)
    assert len(run.notices) == 2


def test_slightly_slower_steps_are_not_reported() -> None:
    run = Run()
    run.steps(ENOUGH * 2, 1.0)

    run.steps(20, 1.45)

    assert run.notices == []


@pytest.mark.parametrize(
    ("slow", "reason"),
    [
        ({"data": 1.2, "weights": 0.1}, "waiting for data"),
        ({"data": 0.01, "weights": 1.2}, "waiting for streamed weights"),
        ({"data": 0.02, "weights": 0.1}, "cause: another program uses the processor"),
    ],
)
def test_the_reason_is_the_part_that_slowed_down_most(slow: dict[str, float], reason: str) -> None:
    run = Run()
    run.steps(ENOUGH * 2, 1.0, data=0.01, weights=0.1)
    run.steps(RECENT, 2.0, **slow)

    [notice] = run.notices

    assert reason in notice
    assert (
        "2.00 s/step, 2.0 times the usual 1.00 s/step, over the last 5 steps of this size" in notice
    )


def test_steps_of_a_larger_bucket_are_not_slow() -> None:
    run = Run()
    for _ in range(8):
        run.steps(5, 1.0)
        run.steps(5, 3.0, shape=LARGE)
    assert run.notices == []

    run.steps(RECENT, 6.0, shape=LARGE)
    run.steps(RECENT, 2.0)
    assert len(run.notices) == 1, "both shapes are slow for one reason"


def test_the_first_steps_are_not_judged() -> None:
    run = Run()
    run.steps(ENOUGH // 2, 1.0)

    run.steps(ENOUGH // 2 - 1, 2.0)

    assert run.notices == []


def test_the_third_step_after_a_pause_is_judged() -> None:
    run = Run()
    run.steps(ENOUGH * 2, 1.0)

    for _ in range(RECENT):
        run.steps(1, 1.0, pause=5.0)
        run.steps(1, 1.0)
        run.steps(1, 2.0)

    assert len(run.notices) == 1


def test_steps_after_a_pause_are_not_judged() -> None:
    run = Run()
    run.steps(ENOUGH * 2, 1.0)

    # A checkpoint every second step, each of which slows down the steps after it.
    for _ in range(20):
        run.steps(1, 2.0, pause=5.0)
        run.steps(1, 2.0)
    assert run.notices == []

    # Short pauses, for the record and the trackers, are part of every step.
    run.steps(RECENT, 2.0, pause=0.2)
    assert len(run.notices) == 1
