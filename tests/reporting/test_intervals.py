"""When recurring work is due, and how often it is still to come."""

from __future__ import annotations

from simpletuner.reporting.intervals import Interval, Rounds


def test_an_interval_of_steps_is_due_at_its_multiples() -> None:
    assert [step for step in range(1, 13) if Interval(5).is_due(step)] == [5, 10]


def test_an_interval_of_zero_steps_is_never_due() -> None:
    assert not Interval(0).is_due(1)
    assert not Interval(None).is_due(1)


def test_an_interval_of_epochs_is_due_once_when_a_step_completes_several() -> None:
    interval = Interval(None, epochs=2)

    assert not interval.is_due(1, epochs_before=0, epochs_done=1)
    assert interval.is_due(2, epochs_before=1, epochs_done=5)
    assert not interval.is_due(3, epochs_before=5, epochs_done=5)


def test_the_end_of_an_epoch_is_due_between_steps_of_the_interval() -> None:
    assert Interval(10, epochs=1).is_due(4, epochs_before=0, epochs_done=1)


def test_remaining_rounds_are_counted() -> None:
    assert [Rounds(10).after(step, 35) for step in (0, 9, 10, 34, 35)] == [3, 3, 2, 0, 0]
    assert [Rounds(10, at_end=True).after(step, 35) for step in (0, 30, 34, 35)] == [4, 1, 1, 0]
    assert Rounds(10, at_end=True).after(0, 30) == 3, "the end of an interval is the end of the run"
    assert Rounds(2.5).after(4, 10) == 3
