"""The page in the language of its user: the table of texts, and the choice of a language."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.languages.say import (
    ENGLISH,
    NAMES,
    TEXTS,
    UNITS,
    choose_language,
    say,
    say_counted,
    say_duration,
    say_label,
    speaking,
    words_of_scripts,
)
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import CONSENT_ON_PAGE
from simpletuner.annexes.page.runs.run_list import MONTHS
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.runs.run import PAUSED
from simpletuner.annexes.runs.sentence import LABELS, NOT_STARTED, STAGES, VERIFIED
from simpletuner.annexes.start.recipe import RECIPES, TITLES
from simpletuner.reporting.step_figures import FIGURES
from tests.annexes.page.page import serving

ANNEXES = TEXTS.parents[1]
TABLES = json.loads(TEXTS.read_text(encoding="utf-8"))
ROWS = {text: row for table in TABLES.values() for text, row in table.items()}
OF_START = {
    "start.js",
    "drop.js",
    "dropwords.js",
    "writer.js",
    "cards.js",
}  # scripts of the place "New"
TRANSLATIONS = [language for language in NAMES if language != ENGLISH]
CALL = re.compile(r"\b(?:say|say_counted|sayCounted)\(")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
CODE = ("advice/*.py", "runs/*.py", "page/**/*.py")
PLACE = re.compile(r"{\w+}")

# What a run announces of itself, in English: the labels of its stages, the names of its figures,
# and states of jobs. The page translates those that it has.
ANNOUNCED = {
    "Downloading the model",
    "Encoding captions",
    "Encoding clips",
    "Encoding pictures",
    "Evaluating at step {step}",
    "Files",
    "Loss, first to last tenth",
    "Lowest held-out loss",
    "Rehearsing the memory peaks",
    "Rendering previews at step {step}",
    "Saving a checkpoint",
    "Stopped",
    "Cancelled",
    "Time in steps",
    "waiting",
}


def calls(text: str) -> Iterator[str]:
    """What stands in the parentheses of every call of `say` in a template or a script."""
    for call in CALL.finditer(text):
        end = call.end()
        rest = STRING.sub(lambda string: "_" * len(string[0]), text[end:])
        depth = 1
        for length, character in enumerate(rest):
            depth += {"(": 1, ")": -1}.get(character, 0)
            if not depth:
                yield text[end : end + length]
                break


def said_in(pattern: str) -> set[str]:
    """The texts that templates or scripts say."""
    found = set()
    for path in ANNEXES.glob(pattern):
        for call in calls(path.read_text(encoding="utf-8")):
            found |= set(STRING.findall(call))
    return found


def sources() -> str:
    """The code, templates and scripts that say texts."""
    patterns = (*CODE, "page/**/*.jinja", "report/*.jinja", "page/static/*.js")
    paths = [path for pattern in patterns for path in ANNEXES.glob(pattern)]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    return re.sub(r'"\n +"', "", text)  # texts of several lines


def said_in_code() -> set[str]:
    """The texts in calls of `say` and `say_counted`."""
    found = set()
    for path in chain.from_iterable(ANNEXES.glob(pattern) for pattern in CODE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("say"):
                constants = [each for each in node.args if isinstance(each, ast.Constant)]
                found |= {str(each.value) for each in constants}
    return found


def in_tables_of_python() -> set[str]:
    """The texts that are said by a name: states, stages, figures, months, purposes, models."""
    return {
        *LABELS.values(),
        *STAGES.values(),
        *VERIFIED.values(),
        *MONTHS,
        *(text for texts in UNITS.values() for text in texts),
        *(figure.title for figure in FIGURES if figure.title),
        *(recipe.title for recipe in RECIPES.values()),
        *TITLES.values(),
        CONSENT_ON_PAGE,
        NOT_STARTED,
        PAUSED,
    }


def words_in(text: str) -> bool:
    """Whether a string is a text for people, and not a format or a key."""
    return re.search(r"[A-Za-z]{3}", PLACE.sub("", text)) is not None


def test_every_text_of_the_templates_is_in_the_table() -> None:
    said = {
        text for text in said_in("page/**/*.jinja") | said_in("report/*.jinja") if words_in(text)
    }

    assert sorted(said - ROWS.keys()) == []


@pytest.mark.parametrize(
    "path", sorted(ANNEXES.glob("page/static/*.js")), ids=lambda path: path.name
)
def test_every_text_of_a_script_is_sent_to_it(path: Path) -> None:
    said = {text for text in said_in(f"page/static/{path.name}") if words_in(text)}

    sent = TABLES["scripts"] | (TABLES["start"] if path.name in OF_START else {})

    assert sorted(said - sent.keys()) == []


def test_every_text_of_the_code_is_in_the_table() -> None:
    assert sorted(said_in_code() - ROWS.keys()) == []


def test_every_text_that_is_said_by_a_name_is_in_the_table() -> None:
    assert sorted(in_tables_of_python() - ROWS.keys()) == []


def test_every_text_in_the_table_is_said() -> None:
    named = in_tables_of_python() | ANNOUNCED
    text = sources().replace('\\"', '"')

    assert [each for each in ROWS if each not in named and f'"{each}"' not in text] == []
    assert len(ROWS) == sum(map(len, TABLES.values())), "each stands in one section"


@pytest.mark.parametrize("language", TRANSLATIONS)
def test_translations_are_complete_and_keep_their_places(language: str) -> None:
    for text, row in ROWS.items():
        assert sorted(PLACE.findall(row[language])) == sorted(PLACE.findall(text)), text


@pytest.mark.parametrize(
    ("wanted", "accepted", "language"),
    [
        ("", "", "en"),
        ("", "de", "en"),
        ("", "es-MX,es;q=0.9,en;q=0.8", "es"),
        ("", "de-AT, zh-TW;q=.5", "zh"),
        ("", "en-GB,hi", "en"),
        ("hi", "es", "hi"),
        ("en", "es", "en"),
        ("../x", "es", "es"),
    ],
)
def test_the_language_of_the_page_is_the_chosen_one_or_the_browsers(
    wanted: str, accepted: str, language: str
) -> None:
    assert choose_language(wanted, accepted) == language


@pytest.mark.parametrize(
    ("language", "count", "text"),
    [
        ("en", 1, "1 checkpoint"),
        ("en", 0, "0 checkpoints"),
        ("es", 1, "1 checkpoint"),
        ("es", 1200, "1,200 checkpoints"),
        ("zh", 1, "1 个检查点"),
        ("zh", 5, "5 个检查点"),
        ("hi", 5, "5 चेकपॉइंट"),
    ],
)
def test_numbers_have_the_plural_of_the_language(language: str, count: int, text: str) -> None:
    with speaking(language):
        assert say_counted(count, "1 checkpoint", "{count} checkpoints") == text


def test_hindi_has_the_singular_for_none() -> None:
    one = "{count} step is done."
    several = "{count} steps are done."

    with speaking("hi"):
        assert say_counted(0, one, several) == "0 स्टेप पूरा हुआ।"
        assert say_counted(2, one, several) == "2 स्टेप पूरे हुए।"


def test_labels_of_stages_are_translated_with_their_step() -> None:
    with speaking("zh"):
        assert say_label("Rendering previews at step 100") == "正在渲染第 100 步的预览"
        assert say_label("A stage of {tomorrow} 3") == "A stage of {tomorrow} 3"


def test_durations_are_said_in_words() -> None:
    with speaking("es"):
        assert [say_duration(seconds) for seconds in (20, 60, 300, 7200)] == [
            "20 s",
            "1 minuto",
            "5 minutos",
            "2 horas",
        ]


def test_only_the_texts_of_one_language_are_sent() -> None:
    with speaking("hi"):
        assert words_of_scripts("start").keys() == TABLES["start"].keys()
        assert words_of_scripts("start")["Start without them"] == "उनके बिना शुरू करें"
    assert words_of_scripts("start") == {}


@pytest.mark.parametrize("language", NAMES)
def test_the_page_says_which_language_it_is_in(language: str, tmp_path: Path) -> None:
    client = TestClient(create_app(Project(tmp_path)), cookies={"language": language})

    text = client.get("/").text

    with speaking(language):
        assert f">{say('Runs')}</a>" in text
    assert f'<html lang="{language}">' in text
    assert f'<option value="{language}" lang="{language}" selected>' in text


def test_programs_get_english(tmp_path: Path) -> None:
    client = TestClient(create_app(Project(tmp_path)))

    assert '<html lang="en">' in client.get("/").text


@pytest.mark.slow
def test_a_chosen_language_stays_when_the_page_is_opened_again(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright").expect
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path.resolve()) as (port, _), browser.browser.new_context() as context:
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/#start")

        page.get_by_label("Language").select_option("es")
        expect(page.get_by_role("heading", name="Entrena con tus propias")).to_be_visible()
        page.goto(f"http://127.0.0.1:{port}/#run")

        expect(page.get_by_role("link", name="Entrenamientos")).to_be_visible()
        assert page.evaluate("document.documentElement.lang") == "es"
