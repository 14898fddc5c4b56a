"""The documentation as pages: the Markdown files of docs/, which wheels include."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from unicodedata import category

from markdown_it import MarkdownIt
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from simpletuner.annexes.page.project import Refusal
from simpletuner.annexes.report.html import render

FOLDER = (
    Path(__file__).parents[2] / "docs"
).resolve()  # in a clone, a link to the folder of the repository
SHOWN = {".md", ".png"}


def show(request: Request) -> Response:
    """A page or picture of the documentation; without a path, the list of all pages.

    Raises:
        Refusal: 404 if it does not exist.
    """
    path = request.path_params["path"]
    file = FOLDER / path
    if path and not is_page(file):
        raise Refusal(404, f"The documentation has no page {path!r}.")
    if file.suffix == ".png":
        return FileResponse(file)
    title, body = to_html(file) if path else ("Documentation", Markup())
    return HTMLResponse(
        render("page/docs.html.jinja", title=title, body=body, pages=titles() if not path else {})
    )


def is_page(file: Path) -> bool:
    """Whether a path names a page or picture of the documentation."""
    return file.suffix in SHOWN and file.resolve().is_relative_to(FOLDER) and file.is_file()


@lru_cache(maxsize=1)
def titles() -> dict[str, str]:
    """The title of every page, by its path."""
    return {
        file.relative_to(FOLDER).as_posix(): to_html(file)[0]
        for file in sorted(FOLDER.rglob("*.md"))
    }


def to_html(file: Path) -> tuple[str, Markup]:
    """The title and the HTML of a Markdown file; headings have anchors for links."""
    markdown = MarkdownIt().enable("table")
    tokens = markdown.parse(file.read_text(encoding="utf-8"))
    for token, inline in pairwise(tokens):
        if token.type == "heading_open":
            token.attrs["id"] = anchor_of(inline.content)
        if token.type == "table_open":
            token.attrs["tabindex"] = "0"  # arrow keys can scroll wide tables
        for link in token.children or ():
            target = str(link.attrs.get("href", "#")).partition("#")[0]
            # A link to a file of the repository that wheels do not include.
            if target and ":" not in target and not is_page(file.parent / target):
                del link.attrs["href"]
    title = next(
        (inline.content for token, inline in pairwise(tokens) if token.tag == "h1"), file.stem
    )
    return title, Markup(markdown.renderer.render(tokens, markdown.options, {}))


def anchor_of(heading: str) -> str:
    """The anchor of a heading as on GitHub: lower case, without punctuation, spaces as dashes."""
    # Includes combining marks, as in Hindi, which `\w` does not match.
    kept = (char for char in heading.lower() if char in "-_ " or category(char)[0] in "LMN")
    return "".join(kept).replace(" ", "-")
