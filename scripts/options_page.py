"""Write the tables of docs/OPTIONS.md from the option schema and the families; `--check` only
compares.

The introduction above them and the table of environment variables below them are written by hand,
on the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from simpletuner.config.option import Option, as_written
from simpletuner.config.schema import all_options, sections
from simpletuner.models.registry import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "OPTIONS.md"
FAMILIES_TITLE = "Defaults of the model families"
VARIABLES_TITLE = "Environment configuration variables"
CONTENTS = "\n- ["  # how the table of contents begins, the first part that is generated


def render_page(written: str) -> str:
    """The page as Markdown, with what is written by hand in it as it is."""
    introduction, rest = written.split(CONTENTS, 1)
    variables = rest.split(f"## {VARIABLES_TITLE}\n", 1)[1]
    groups = sections()
    # With the anchors that GitHub gives to headings.
    titles = [*groups, FAMILIES_TITLE, VARIABLES_TITLE]
    contents = "\n".join(f"- [{title}](#{title.lower().replace(' ', '-')})" for title in titles)
    tables = {title: _table(options) for title, options in groups.items()} | {
        FAMILIES_TITLE: _family_table()
    }
    parts = ["\n".join([f"## {title}\n", *lines, ""]) for title, lines in tables.items()]
    return "\n".join([introduction, f"{contents}\n", *parts, f"## {VARIABLES_TITLE}\n{variables}"])


def _table(options: list[Option]) -> Iterator[str]:
    if (needed := options[0].group.requires) is not None:
        yield f"Requires `{needed}`.\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for option in options:
        kind = " ".join(filter(None, (option.type_name, option.limit_text)))
        yield f"| `{option.name}` | {kind} | {_cell(option.default_text)} | {_meaning(option)} |"


def _meaning(option: Option) -> str:
    # What the whole group requires stands above its table.
    rows = {
        title: [name for name in names if name != str(option.group.requires)]
        for title, names in option.relations.items()
    }
    related = (
        f" {title} {', '.join(f'`{name}`' for name in names)}."
        for title, names in rows.items()
        if names
    )
    return _cell(option.help + "".join(related))


def _family_table() -> Iterator[str]:
    by_family = {name: {**spec.defaults, **spec.fixed} for name, spec in FAMILIES.items()}
    yield f"| key | {' | '.join(by_family)} |"
    yield "|---|" + "---|" * len(by_family)
    keys = {key for defaults in by_family.values() for key in defaults}
    for key in (key for key in all_options() if key in keys):
        values = (
            _cell(as_written(defaults[key])) if key in defaults else ""
            for defaults in by_family.values()
        )
        yield f"| `{key}` | {' | '.join(values)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")  # a bare | ends a cell


def main(arguments: list[str]) -> None:
    """Write the page, or exit with 1 when `--check` finds it stale."""
    written = PAGE.read_text(encoding="utf-8")
    text = render_page(written)
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
    elif written != text:
        sys.exit("docs/OPTIONS.md is stale; ./scripts/docs writes it anew.")


if __name__ == "__main__":
    main(sys.argv[1:])
