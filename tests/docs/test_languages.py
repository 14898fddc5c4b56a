"""The translated pages have the code, the headings and the links of the English ones.

Short forms have some of them, the same in each language.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.languages import DOCS, FENCE, LANGUAGES, SHORTENED, TRANSLATED, with_blocks

PAGES = [
    pytest.param(page, language, id=f"{language}-{page.stem}")
    for page in TRANSLATED
    for language in LANGUAGES
]
SHORT_PAGES = [
    pytest.param(page, language, id=f"{language}-{page.stem}")
    for page in SHORTENED
    for language in LANGUAGES
]
CODE = re.compile(r"`([^`\n]+)`")


def read(page: Path, language: str = "") -> str:
    return (DOCS / language / page.name if language else page).read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "language"), PAGES)
def test_translated_commands_match_the_english_page(page: Path, language: str) -> None:
    text = read(page, language)

    english = read(page)

    assert [block[0] for block in FENCE.finditer(text)] == [
        block[0] for block in FENCE.finditer(english)
    ]
    assert with_blocks(text, english) == text


@pytest.mark.parametrize(("page", "language"), PAGES)
def test_translated_sections_are_complete(page: Path, language: str) -> None:
    """The same headings, rows of tables, links, and names of keys, files and commands."""
    text = FENCE.sub("", read(page, language))

    english = FENCE.sub("", read(page))

    assert re.findall(r"^#+ ", text, re.MULTILINE) == re.findall(r"^#+ ", english, re.MULTILINE)
    assert len(re.findall(r"^\|", text, re.MULTILINE)) == len(
        re.findall(r"^\|", english, re.MULTILINE)
    )
    assert set(CODE.findall(text)) == set(CODE.findall(english))
    assert links(text) == links(english)


def links(text: str) -> set[str]:
    """The pages and sections that a page links to; not its own sections, whose names differ."""
    return set(re.findall(r"\]\((?:[./]|quickstart/|zh/|hi/|es/)*(\w+\.md[^)]*)\)", text))


@pytest.mark.parametrize(("page", "language"), SHORT_PAGES)
def test_short_forms_quote_commands_and_names_of_the_english_pages(
    page: Path, language: str
) -> None:
    text = read(page, language)

    pages = [*DOCS.glob("*.md"), *DOCS.glob("quickstart/*.md")]
    english = "".join(path.read_text(encoding="utf-8") for path in pages)
    commands = {block[0] for block in FENCE.finditer(read(page))}

    assert {block[0] for block in FENCE.finditer(text)} <= commands
    assert [name for name in CODE.findall(FENCE.sub("", text)) if name not in english] == []


@pytest.mark.parametrize(("page", "language"), SHORT_PAGES)
def test_short_forms_say_the_same_in_every_language(page: Path, language: str) -> None:
    assert outline(read(page, language)) == outline(read(page, "zh"))


def outline(text: str) -> dict[str, object]:
    """What does not depend on the language: blocks, names, links, and the shape of the page."""
    prose = FENCE.sub("", text)
    return {
        "blocks": [block[0] for block in FENCE.finditer(text)],
        "shape": re.findall(r"^(?:#+ |\||- |\d+\. )", prose, re.MULTILINE),
        "names": set(CODE.findall(prose)),
        "links": links(prose),
    }


@pytest.mark.parametrize("page", [*TRANSLATED, *SHORTENED], ids=lambda page: page.stem)
def test_translations_link_to_each_other(page: Path) -> None:
    for language in ("", *LANGUAGES):
        head = read(page, language).partition("\n## ")[0]
        expected = {name for code, name in {"": "English", **LANGUAGES}.items() if code != language}
        assert expected == set(re.findall(r"\[(English|中文|हिन्दी|Español)\]", head))
