"""Random faults: what is planted, which tests belong to it, and what they say of it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.tools import belonging, random_mutations
from tests.tools.belonging import Suite
from tests.tools.faults import (
    OPERATORS,
    ROOMS_OUTSIDE,
    Equivalent,
    Fault,
    draw,
    faults_of,
    files_of_the_core,
    read_equivalents,
    why_equivalent,
)
from tests.tools.mutations import ROOT
from tests.tools.random_mutations import Verdict, conclude, judge

PART = "simpletuner/room/part.py"
LIMIT = """
    MOST = 3

    def limited(x):
        while True:
            if x > MOST:
                x = MOST
            break
        return x
"""
# Of every fault the line that is changed to; the same line of the source may stand for several.
PLANTED = {
    "comparison": ("a = b < c", {"a = b <= c", "a = b >= c"}),
    "boolean": ("a = (b) and c", {"a = (b) or c"}),
    "operand": ("a = b or c", {"a = ((b))", "a = ((c))"}),
    "condition": ("a = b if c else d", {"a = b if (not (c)) else d"}),
    "branch": ("a = [b for b in c if d]", {"a = [b for b in c if True]"}),
    "arithmetic": ("a += b * c", {"a -= b * c", "a += b / c"}),
    "sign": ("a = not b", {"a = (b)"}),
    "number": ("a = 0.5", {"a = 1.5", "a = (-0.5)"}),
    "switch": ("def a(b=True): c", {"def a(b=False): c"}),
    "name": ("a = 'run.end'", {'a = "run.end_"'}),
    "extreme": ("a = b.min(c)", {"a = b.max(c)"}),
    "call": ("b(c)", {"pass"}),
    "assignment": ("a.b = c", {"pass"}),
    "refusal": ("raise b from c", {"pass"}),
    "leap": ("for a in b: break", {"for a in b: continue"}),
    "keyword": ("a = b(c, d=e)", {"a = b(c, )"}),
}


def write(root: Path, files: dict[str, str]) -> None:
    """Write Python files below a root."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))


def test_every_operator_has_its_example() -> None:
    assert list(PLANTED) == list(OPERATORS)


@pytest.mark.parametrize("operator", PLANTED)
def test_an_operator_changes_one_piece_of_a_line(operator: str) -> None:
    source, expected = PLANTED[operator]

    faults = [fault for fault in faults_of(PART, source) if fault.operator == operator]

    assert {fault.apply(source) for fault in faults} == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Between 0 and 1."""',
        "a: Literal['one'] = b",
        "Kind = Literal['one', 'two']",
        "if TYPE_CHECKING: import a",
        "assert a < 1",
        "a = f'{b + 1} of 3'",
        "a = 'a text for people'",
        "a = zip(b, c, strict=True)",
        "a = 'a text ' + b",
    ],
)
def test_what_does_nothing_is_left_alone(source: str) -> None:
    assert faults_of(PART, source) == []


def test_faults_are_printed_as_lines() -> None:
    source = "def a():\n    return (\n        b\n        < c\n    )\n"

    (fault, *_) = faults_of(PART, source)

    assert fault.place == f"{PART}:3"
    assert fault.names == ("a",)
    assert fault.difference(source) == ["-        < c", "+        <= c"]


def test_a_seed_draws_the_same_faults_on_different_lines(tmp_path: Path) -> None:
    write(tmp_path, {PART: LIMIT})

    drawn = draw(tmp_path, 3, 7, [PART])

    assert drawn == draw(tmp_path, 3, 7, [PART])
    assert drawn != draw(tmp_path, 3, 8, [PART])
    assert len({fault.line for fault in drawn}) == 3


def test_faults_are_planted_in_the_core() -> None:
    rooms = {path.split("/")[1] for path in files_of_the_core(ROOT)}

    assert {"api.py", "atomic.py", "config", "training", "run"} <= rooms
    assert not rooms & {*ROOMS_OUTSIDE}


def test_tests_of_the_room_the_importers_and_the_words_belong_to_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        PART: LIMIT,
        "simpletuner/other/user.py": "from simpletuner.room.part import limited",
        "simpletuner/far/away.py": "",
        "tests/room/test_part.py": """
            from simpletuner.room.part import limited

            def test_others(): ...

            @pytest.mark.slow(30)
            def test_a_whole_run_is_limited(): ...

            class TestLimit:
                def test_more_than_MOST_is_limited(self): ...
        """,
        "tests/room/test_more.py": "def test_more(): ...",
        "tests/other/test_user.py": "def test_user(): ...",
        "tests/far/test_away.py": "def test_away(): ...",
        "tests/far/test_words.py": "def test_limited_while_x_is_MOST(): ...",
        "tests/docs/test_docs.py": "def test_limited_MOST(): ...",
    }
    write(tmp_path, files)
    monkeypatch.setattr(belonging, "CLOSEST", 2)
    fault = Fault(PART, 2, "number", 8, 9, "4", ("MOST",))

    names = [test.name for test in Suite(tmp_path).belonging(fault, 60)]

    assert names == [
        "tests/room/test_part.py::TestLimit::test_more_than_MOST_is_limited",
        "tests/far/test_words.py::test_limited_while_x_is_MOST",
        "tests/room/test_part.py::test_others",
        "tests/other/test_user.py::test_user",
        "tests/room/test_more.py::test_more",
        "tests/room/test_part.py::test_a_whole_run_is_limited",
    ]
    assert [test.name for test in Suite(tmp_path).belonging(fault, 0.5)] == names[:1]
    others = Suite(tmp_path, [f"{names[0]}[a case that fails anyway]"]).belonging(fault, 60)
    assert names[0] not in [test.name for test in others]


def test_only_what_tests_look_at_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "simpletuner/__init__.py": "",
        "simpletuner/room/__init__.py": "",
        PART: LIMIT,
        "tests/__init__.py": "",
        "tests/room/__init__.py": "",
        "tests/room/test_part.py": """
            from simpletuner.room.part import limited

            def test_more_is_limited():
                assert limited(5) == 3
        """,
    }
    write(tmp_path, files)
    monkeypatch.setattr(random_mutations, "HANGS_AFTER", 1.0)
    source = (tmp_path / PART).read_text()
    faults = {
        fault.apply(source).splitlines()[fault.line - 1].strip(): fault
        for fault in faults_of(PART, source)
    }
    verdicts = {}
    for number, line in enumerate(("if x >= MOST:", "MOST = 4", "continue"), 1):
        verdicts[line] = judge(faults[line], tmp_path, number, Suite(tmp_path), 60)

    test = "tests/room/test_part.py::test_more_is_limited"
    told = {line: (verdict.killer, verdict.how) for line, verdict in verdicts.items()}
    assert told == {
        "if x >= MOST:": ("", ""),
        "MOST = 4": (test, "failed"),
        "continue": (test, "hung"),
    }
    assert (tmp_path / PART).read_text() == source


def test_more_survivors_than_the_bar_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path, {PART: LIMIT})
    monkeypatch.setattr(random_mutations, "ROOT", tmp_path)
    fault = faults_of(PART, (tmp_path / PART).read_text())[0]
    alive = Verdict(fault)
    killed = Verdict(fault, killer="a test", how="failed")

    assert conclude(3, 8, [alive, *[killed] * 6]) == 0
    printed = capsys.readouterr().out
    assert conclude(3, 6, [alive, *[killed] * 5]) == 1

    assert printed.splitlines()[1:] == [
        f"{PART}:2 (number, seed 3)",
        "-MOST = 3",
        "+MOST = 4",
        "",
        "seed 3: 8 planted, 1 do not count, 6 killed, 1 survived (14 %)",
    ]


def test_a_listed_equivalent_tells_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def a():\n    return 3\n"
    (more, *_) = faults_of(PART, source)
    listed = [Equivalent(PART, ("-return 3", "+return 4"), "3 is enough")]
    monkeypatch.setattr("tests.tools.faults.read_equivalents", lambda: listed)

    assert why_equivalent(more, source) == "3 is enough"
    assert why_equivalent(more, source.replace("return", "return 1 +")) is None


def test_listed_equivalents_are_faults_of_the_tree() -> None:
    for equivalent in read_equivalents():
        source = (ROOT / equivalent.path).read_text(encoding="utf-8")
        old = equivalent.lines[0].removeprefix("-")
        faults = [
            fault
            for fault in faults_of(equivalent.path, source)
            if source.splitlines()[fault.line - 1].strip() == old
        ]

        assert equivalent.reason in [why_equivalent(fault, source) for fault in faults], old
