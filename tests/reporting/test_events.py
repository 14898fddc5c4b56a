"""The event stream: subscribers that fail do not disturb the others, unless the run must end."""

from __future__ import annotations

import logging

import pytest

from simpletuner.reporting.events import Event, EventStream, Notice

LOGGER = "simpletuner.reporting.events"


def text_of(event: Event) -> str:
    assert isinstance(event, Notice)
    return event.text


def test_a_subscriber_that_raises_is_named_once_and_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[Event] = []
    received: list[Event] = []

    def fail(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("a bug; api_key=abcdef123456\nsecond line")

    events = EventStream()
    events.subscribe("My exporter", fail)
    events.subscribe("The others", received.append)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        events.notify("one")
        events.notify("two")

    assert [text_of(event) for event in calls] == ["one"]
    assert [text_of(event) for event in received] == ["one", "two"]
    (record,) = caplog.records
    assert record.message.startswith(
        "My exporter stopped working; training continues without it. (RuntimeError: a bug"
    )
    assert "abcdef" not in record.message
    assert "second line" not in record.message


def test_an_error_that_ends_the_run_reaches_the_publisher() -> None:
    def fill_the_disk(event: Event) -> None:
        raise OSError("no space left")

    events = EventStream()
    events.subscribe("The log", fill_the_disk, ends_run=OSError)

    with pytest.raises(OSError, match="no space left"):
        events.notify("one")


def test_an_error_that_does_not_end_the_run_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def misread(event: Event) -> None:
        raise KeyError("a field")

    events = EventStream()
    events.subscribe("The log", misread, ends_run=OSError)

    events.notify("one")

    assert "The log stopped working" in caplog.text


def test_ctrl_c_inside_a_subscriber_is_not_swallowed() -> None:
    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    events = EventStream()
    events.subscribe("Busy", interrupt)

    with pytest.raises(KeyboardInterrupt):
        events.notify("one")


def test_a_subscriber_failing_at_its_own_event_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = EventStream()

    def answer(event: Event) -> None:
        if text_of(event) == "question":
            events.notify("answer")
        raise ValueError(text_of(event))

    events.subscribe("Talkative", answer)
    events.notify("question")

    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1


def test_required_subscribers_may_end_the_run() -> None:
    received: list[Event] = []

    def fail(event: Event) -> None:
        raise LookupError("enough")

    events = EventStream(received.append, fail)

    with pytest.raises(LookupError, match="enough"):
        events.notify("one")
    assert len(received) == 1
