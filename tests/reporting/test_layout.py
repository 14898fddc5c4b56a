"""Text in the width of a terminal: nothing is cut, and no word is broken."""

from __future__ import annotations

import io

import pytest

from simpletuner.reporting.layout import Layout
from simpletuner.reporting.screen import layout_of

NARROW = Layout(40)
PROSE = "The model needs 18.1 GB on the device, where 16.0 GB can be used by this program."
LONG_PATH = "/home/somebody/projects/cats/config/kandinsky/config.json"


def test_prose_is_wrapped_between_words() -> None:
    lines = [*NARROW.wrap(PROSE, indent=2)]

    assert max(map(len, lines)) <= 40
    assert " ".join(line.strip() for line in lines) == PROSE
    assert all(line.startswith("    ") for line in lines[1:])


def test_a_word_with_hyphens_is_not_broken() -> None:
    prose = "It needs more memory than any well-known-adapter-checkpoints."

    assert " ".join(line.strip() for line in NARROW.wrap(prose)) == prose


def test_command_between_backticks_stays_on_one_line() -> None:
    command = "`simpletuner train env=cats max_train_steps=500`"

    assert any(command in line for line in NARROW.wrap(f"To train it for longer, run {command}."))


def test_path_loses_its_middle_and_a_sentence_is_wrapped() -> None:
    path, *sentence = NARROW.pairs([("file", LONG_PATH), ("text", PROSE)])

    assert len(path) == 40
    assert path.startswith("  file  /home/")
    assert path.endswith("/config.json")
    assert " ".join(line.strip() for line in sentence) == f"text  {PROSE}"


def test_a_value_keeps_its_ends_where_there_is_no_space_at_all() -> None:
    assert Layout(10).shorten("abcdef", used=20) == "a…f"


def test_nothing_is_wrapped_or_cut_in_a_pipe() -> None:
    layout = Layout()

    assert [*layout.wrap(PROSE, indent=2)] == [f"  {PROSE}"]
    assert [*layout.pairs([("file", LONG_PATH)])] == [f"  file  {LONG_PATH}"]


def test_columns_of_a_table_are_aligned_and_move_together_where_space_is_short() -> None:
    rows = [("phase", "device", "host"), ("training", "18.1 GB", "1.2 GB")]

    wide = [*Layout(80).table(rows)]
    narrow = [*Layout(26).table(rows)]

    assert wide == ["  phase        device      host", "  training    18.1 GB    1.2 GB"]
    assert narrow == ["  phase     device   host", "  training 18.1 GB 1.2 GB"]


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("0", None), ("wide", None)])
def test_width_of_a_pipe_is_that_of_columns(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int | None
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    assert layout_of(io.StringIO()).width == width
