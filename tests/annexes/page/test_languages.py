"""The start card in the language of the browser."""

from __future__ import annotations

import json
import re

import pytest

from simpletuner.annexes.page.new.start_card import LANGUAGES, card_content
from simpletuner.annexes.start.recipe import RECIPES, TITLES

TABLES = json.loads(LANGUAGES.read_text(encoding="utf-8"))
PAGE = LANGUAGES.parents[1]
NEW = PAGE / "new"


def said() -> set[str]:
    """Every text that the card asks for: in its template, its script, and the recipes."""
    scripts = ("start.js", "drop.js", "writer.js")
    templates = [NEW / "start.html.jinja", NEW / "cards.html.jinja", PAGE / "writer.html.jinja"]
    sources = [*templates, *(LANGUAGES.parent / name for name in scripts)]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    calls = "".join(re.findall(r"\bsay\(((?:[^()\"]|\"[^\"]*\")*)", text))
    return {
        *re.findall(r'"([^"]+)"', calls),
        *(recipe.title for recipe in RECIPES.values()),
        *TITLES.values(),
    }


@pytest.mark.parametrize("language", TABLES)
def test_translations_are_of_texts_that_are_said_and_keep_placeholders(language: str) -> None:
    table = TABLES[language]
    assert table.keys() <= said()
    for text, translated in table.items():
        assert sorted(re.findall(r"{\w+}", translated)) == sorted(re.findall(r"{\w+}", text)), text


@pytest.mark.parametrize(
    ("accepted", "language"),
    [
        ("", "en"),
        ("de", "en"),
        ("es-MX,es;q=0.9,en;q=0.8", "es"),
        ("de-AT, zh-TW;q=.5", "zh"),
        ("en-GB,hi", "en"),
    ],
)
def test_the_first_language_of_the_browser(accepted: str, language: str) -> None:
    content = card_content(accepted)
    assert content["language"] == language
    assert content["say"]("Model") == TABLES.get(language, {}).get("Model", "Model")
