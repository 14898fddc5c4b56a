"""Requests to stop, by files and by signals."""

from __future__ import annotations

import signal
import threading

import pytest

from simpletuner.distributed.requests import Handler, Stop, signals_as_interrupt, stop_on_interrupt
from simpletuner.errors import Interrupted


def test_sources_are_polled_until_one_requests_a_stop() -> None:
    answers = iter([False, True])
    stop = Stop(lambda: False)
    stop.add_source(lambda: next(answers))

    stop.check()

    assert not stop.requested, "only its request counts"
    with pytest.raises(Interrupted, match="A stop was requested"):
        stop.check()
    assert stop.is_due(), "there is no third answer"
    assert stop.requested


@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN])
def test_the_first_signal_requests_a_stop_and_the_second_interrupts(
    inherited: Handler, request: pytest.FixtureRequest
) -> None:
    """Also in a background job of a script, which starts with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, inherited)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    stop = Stop()
    announced = threading.Event()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    with stop_on_interrupt(stop, announced.set):
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        assert announced.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_forwarded_signal_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to a group of processes reaches a process twice if its parent passes it on."""
    now = 100.0
    monkeypatch.setattr("simpletuner.distributed.requests.time.monotonic", lambda: now)
    stop = Stop()
    with signals_as_interrupt(), stop_on_interrupt(stop, lambda: None):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested, "the run stops after this step"
        now += 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
