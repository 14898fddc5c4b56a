"""Write the list of files in docs/ARCHITECTURE.md from docstrings; `--check` only compares."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "simpletuner"
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
TITLE = "## Every file\n"


def render_page(written: str) -> str:
    """The page as Markdown: what is written by hand, then one line per file."""
    by_hand = written.partition(TITLE)[0]
    generated = "\n".join(_folder_lines(PACKAGE))
    return f"{by_hand}{TITLE}\n{generated}".rstrip() + "\n"


def _folder_lines(folder: Path) -> Iterator[str]:
    """Lines of a folder's files, then the sections of its folders."""
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    for path in files:
        yield f"- `{path.name}`: {first_sentence(path)}"
    for inner in sorted(folder.iterdir()):
        if not (inner / "__init__.py").is_file():
            continue
        yield ""
        yield f"### {inner.relative_to(PACKAGE).as_posix()}/"
        yield ""
        yield first_sentence(inner / "__init__.py")
        yield ""
        yield from _folder_lines(inner)


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring.

    Raises:
        ValueError: the module has no docstring.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(
            f"{path.relative_to(ROOT)} has no docstring; its first sentence is its line in "
            f"{PAGE.name}"
        )
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".:") + "."


def main() -> int:
    """Write or compare the page; 1 if it is stale."""
    written = PAGE.read_text(encoding="utf-8")
    page = render_page(written)
    if page == written:
        return 0
    if "--check" in sys.argv[1:]:
        print(
            f"{PAGE.relative_to(ROOT)} is stale; run `python scripts/files_page.py`.",
            file=sys.stderr,
        )
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
