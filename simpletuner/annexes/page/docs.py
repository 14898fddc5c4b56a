"""The documentation as pages: the Markdown files of docs/, which wheels include, and a search."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from unicodedata import category

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from simpletuner.annexes.page.project import Refusal
from simpletuner.annexes.report.html import render

# In a clone, a link to the folder of the repository.
FOLDER = (Path(__file__).parents[2] / "docs").resolve()
INDEX = FOLDER / "README.md"
SHOWN = {".md", ".png"}
PAGE_LINK = re.compile(r"\]\(([\w/]+\.md)\)")
MOST_MATCHES = 40
# Characters of an excerpt before the first word that was searched, and in all.
BEFORE = 60
EXCERPT = 220


@dataclass(frozen=True)
class DocsSection:
    """A heading of a page, with the text below it.

    Attributes:
        address: of the heading, as a link.
        page: the title of the page.
        heading: the title of the page for what stands above the first heading.
        text: without markup.
    """

    address: str
    page: str
    heading: str
    text: str


@dataclass(frozen=True)
class DocsGroup:
    """Pages of the index below one of its headings.

    Attributes:
        pages: titles of pages by path.
    """

    heading: str
    pages: dict[str, str]


@dataclass(frozen=True)
class DocsMatch:
    """A section that a search found, and a part of its text in which the words are marked."""

    section: DocsSection
    excerpt: Markup


def show(request: Request) -> Response:
    """A page or picture of the documentation; without a path, the index, or the search for `q`.

    Raises:
        Refusal: 404 if it does not exist.
    """
    path = request.path_params["path"]
    file = FOLDER / path if path else INDEX
    if not is_page(file):
        raise Refusal(404, f"The documentation has no page {path!r}.")
    if file.suffix == ".png":
        return FileResponse(file)
    title, body = to_html(file)
    query = "" if path else request.query_params.get("q", "").strip()
    return HTMLResponse(
        render(
            "page/docs.html.jinja",
            title=title,
            body=body,
            is_index=not path,
            path=path,
            contents=contents(),
            query=query,
            matches=search_docs(query),
            most=MOST_MATCHES,
        )
    )


def is_page(file: Path) -> bool:
    """Whether a path names a page or picture of the documentation."""
    return file.suffix in SHOWN and file.resolve().is_relative_to(FOLDER) and file.is_file()


def listed_pages() -> list[str]:
    """The paths of the pages, in the order of the index."""
    return list(dict.fromkeys(PAGE_LINK.findall(INDEX.read_text(encoding="utf-8"))))


@lru_cache(maxsize=1)
def contents() -> list[DocsGroup]:
    """All pages as the index groups them."""
    groups: list[DocsGroup] = []
    _, tokens = parse_page(INDEX)
    for before, token in pairwise(tokens):
        if before.type == "heading_open" and before.tag == "h2":
            groups.append(DocsGroup(plain_text(token), {}))
        elif token.type == "inline" and groups:
            groups[-1].pages.update(linked_pages(token))
    return [group for group in groups if group.pages]


def linked_pages(token: Token) -> Iterator[tuple[str, str]]:
    """The paths and titles of the pages to which a text links."""
    for link, text in pairwise(token.children or ()):
        path = str(link.attrs.get("href", ""))
        if link.type == "link_open" and path.endswith(".md"):
            yield path, text.content


def parse_page(file: Path) -> tuple[str, list[Token]]:
    """The title and the tokens of a Markdown file; headings have anchors for links."""
    tokens = MarkdownIt().enable("table").parse(file.read_text(encoding="utf-8"))
    title = file.stem
    for token, inline in pairwise(tokens):
        if token.type == "heading_open":
            token.attrs["id"] = anchor_of(inline.content)
        if token.tag == "h1" and token.type == "heading_open":
            title = plain_text(inline)
    return title, tokens


def to_html(file: Path) -> tuple[str, Markup]:
    """The title and the HTML of a Markdown file."""
    title, tokens = parse_page(file)
    for token in tokens:
        if token.type == "table_open":
            token.attrs["tabindex"] = "0"  # arrow keys can scroll wide tables
        for link in token.children or ():
            target = str(link.attrs.get("href", "#")).partition("#")[0]
            # A link to a file of the repository that wheels do not include.
            if target and ":" not in target and not is_page(file.parent / target):
                del link.attrs["href"]
    markdown = MarkdownIt()
    return title, Markup(markdown.renderer.render(tokens, markdown.options, {}))


def anchor_of(heading: str) -> str:
    """The anchor of a heading as on GitHub: lower case, without punctuation, spaces as dashes."""
    # Includes combining marks, as in Hindi, which `\w` does not match.
    kept = (char for char in heading.lower() if char in "-_ " or category(char)[0] in "LMN")
    return "".join(kept).replace(" ", "-")


def plain_text(token: Token) -> str:
    """The text of a token without markup; empty if it has none."""
    if token.type == "fence":
        return token.content
    parts = []
    for child in token.children or ():
        if child.type in ("text", "code_inline"):
            parts.append(child.content)
        elif child.type == "softbreak":
            parts.append(" ")
    return "".join(parts)


def search_docs(query: str) -> list[DocsMatch]:
    """The sections that contain all words of a query; those with the words in a heading first."""
    words = [beginning_with(re.escape(word)) for word in query.split()]
    if not words:
        return []
    found = [section for section in all_sections() if contains_all(section, words)]
    found.sort(key=lambda section: heading_distance(section, words))
    any_word = beginning_with("|".join(map(re.escape, query.split())))
    return [
        DocsMatch(section, marked_excerpt(section.text, any_word))
        for section in found[:MOST_MATCHES]
    ]


def beginning_with(pattern: str) -> re.Pattern[str]:
    """Finds words that begin with a pattern, in any letter case."""
    # Chinese has no spaces, so only Latin letters and digits can be within a word. An underscore
    # begins a word: `rank` finds lora_rank.
    return re.compile(f"(?<![a-z0-9])(?:{pattern})", re.IGNORECASE)


def contains_all(section: DocsSection, words: Sequence[re.Pattern[str]]) -> bool:
    """Whether all words occur in a section, its heading or the title of its page."""
    text = f"{section.page}\n{section.heading}\n{section.text}"
    return all(word.search(text) for word in words)


def heading_distance(section: DocsSection, words: Sequence[re.Pattern[str]]) -> tuple[int, int]:
    """The number of words that are missing in a section's heading, and in the page's title."""
    return missing_words(section.heading, words), missing_words(section.page, words)


def missing_words(text: str, words: Sequence[re.Pattern[str]]) -> int:
    """The number of words that a text does not contain."""
    return len([word for word in words if not word.search(text)])


def marked_excerpt(text: str, words: re.Pattern[str]) -> Markup:
    """A part of a text from just before the first of the words, which are marked."""
    first = words.search(text)
    start = max(0, first.start() - BEFORE) if first else 0
    end = start + EXCERPT
    shown = text[start:end]
    marked = Markup("… ") if start else Markup()
    last = 0
    for match in words.finditer(shown):
        marked += escape(shown[last : match.start()])
        marked += Markup("<mark>{}</mark>").format(match[0])
        last = match.end()
    marked += escape(shown[last:])
    return marked + Markup(" …") if end < len(text) else marked


@lru_cache(maxsize=1)
def all_sections() -> list[DocsSection]:
    """The sections of all pages, in the order of the index."""
    sections: list[DocsSection] = []
    for path in listed_pages():
        sections += page_sections(path)
    return sections


def page_sections(path: str) -> Iterator[DocsSection]:
    """The sections of a page; a table and a block of code belong to the heading above them."""
    title, tokens = parse_page(FOLDER / path)
    address = f"/docs/{path}"
    heading = title
    texts: list[str] = []
    for before, token in pairwise(tokens):
        if before.type == "heading_open" and before.tag != "h1":
            yield DocsSection(address, title, heading, " ".join(texts))
            address = f"/docs/{path}#{before.attrs['id']}"
            heading = plain_text(token)
            texts = []
        elif before.type != "heading_open" and token.type in ("inline", "fence"):
            texts.append(plain_text(token))
    yield DocsSection(address, title, heading, " ".join(texts))
