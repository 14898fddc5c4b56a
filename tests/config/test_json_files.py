"""JSON files as people save them, and the messages about those that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.json_reader import expand_environment, read_json, same_value
from simpletuner.errors import Problem, Problems
from simpletuner.redaction import hidden_for_now, redact


def read(path: Path, text: str | bytes) -> tuple[Any, list[Problem]]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    problems = Problems()
    return read_json(path, problems), problems


@pytest.mark.parametrize(
    ("text", "value", "line"),
    [
        ('{"a": 1,}', {"a": 1}, 1),
        ('{\n"a": [1, 2 ,\n]\n}', {"a": [1, 2]}, 2),
        ('{"a": ",}",}', {"a": ",}"}, 1),
    ],
)
def test_a_trailing_comma_is_a_warning(tmp_path: Path, text: str, value: object, line: int) -> None:
    content, (problem,) = read(tmp_path / "c.json", text)

    assert content == value
    assert not problem.fatal
    assert f"a comma before a closing bracket (line {line})" in problem.message


def test_commas_inside_strings_are_kept(tmp_path: Path) -> None:
    assert read(tmp_path / "c.json", r'{"a": "x,}\",]"}') == ({"a": 'x,}",]'}, [])


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    assert read(tmp_path / "c.json", b'\xef\xbb\xbf{"a": 1}') == ({"a": 1}, [])


def test_invalid_json_is_reported_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    content, (problem,) = read(path, '{\n  "a": 1\n  "b": 2\n}')

    assert content is None
    assert (
        str(problem)
        == f"{path}: is not valid JSON: a comma or a closing bracket is missing (line 3, column 3)."
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ('{"a": 1', "it ends too early (line 1, column 8)"),
        ('{"a": 1 // half', "comments are not allowed (line 1, column 9)"),
        ('{"a": True}', "true, false and null are written in lower case"),
        ("{'a': 1}", "strings need double quotes"),
        (r'{"a": "C:\data"}', "a backslash is written twice; paths may use / instead"),
        ('{"a": "x\ny"}', "a string must end on the line on which it begins"),
        ("{a: 1}", "a key in double quotes is missing"),
        ('{"a" 1}', "a colon is missing"),
        # One problem: the comma before the bracket is ignored.
        ('{"a": 1,, }', "there is a comma too many"),
        ("[1,, ]", "there is a comma too many"),
        ('{"a": }', "a value is missing"),
        (b'{"a": "\xff"}', "is not UTF-8 text (byte 7)"),
        (b'\xff\xfe{\x00"\x00', "is not UTF-8 text"),
        ("[" * 100_000, "cannot be used"),
        ("[" * 101 + "]" * 101, "nested too deeply"),
        ('{"a": ' * 900 + "1" + "}" * 900, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        (r'{"a": {"\ud800": 1}}', "surrogates not allowed"),
    ],
)
def test_unusable_json_values_are_refused(
    tmp_path: Path, text: str | bytes, complaint: str
) -> None:
    content, (problem,) = read(tmp_path / "c.json", text)

    assert content is None
    assert problem.fatal
    assert complaint in problem.message


def test_a_folder_in_place_of_a_file_is_reported(tmp_path: Path) -> None:
    problems = Problems()

    assert read_json(tmp_path, problems) is None
    assert "is not a regular file" in problems[0].message


def test_a_key_twice_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    content, (problem,) = read(tmp_path / "c.json", '{"a": 1, "b": 2, "a": 3}')

    assert content == {"a": 3, "b": 2}
    assert problem.fatal
    assert "contains 'a' twice: 1 and 3" in problem.message
    assert read(tmp_path / "c.json", '{"a": 1, "a": "1"}')[1] == []


@pytest.mark.parametrize(
    ("left", "right"), [(20, "20"), (1e-4, "0.0001"), (True, "True"), ("a", "A"), ([1], [1])]
)
def test_spellings_of_one_value_are_equal(left: object, right: object) -> None:
    assert same_value(left, right)
    assert same_value(right, left)


@pytest.mark.parametrize(
    ("left", "right"), [(20, "21"), ("lora", "full"), ([1], "1"), ({}, []), ("", "0")]
)
def test_different_values_are_not_equal(left: object, right: object) -> None:
    assert not same_value(left, right)


@pytest.mark.parametrize(
    ("name", "secret", "is_hidden"),
    [("HOOK_OF_MINE", False, False), ("HOOK_OF_MINE", True, True), ("HOOK_TOKEN", False, True)],
)
def test_variables_of_secrets_stay_hidden_when_they_are_unset(
    name: str, secret: bool, is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = f"https://hooks.example/{name}-{secret}"
    monkeypatch.setenv(name, value)

    with hidden_for_now():
        content = expand_environment(f"{{env:{name}}}", "key", Problems(), secret=secret)
        monkeypatch.delenv(name)
        printed = redact(f"sent to {value}")

    assert content == value
    assert (value not in printed) == is_hidden
