"""Write docs/OPTIONS.md from the option schema and the families; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from simpletuner.config.render import render_options
from simpletuner.models.registry import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "OPTIONS.md"


def main(arguments: list[str]) -> None:
    """Write the page, or exit with 1 when `--check` finds it stale."""
    text = render_options({name: {**spec.defaults, **spec.fixed} for name, spec in FAMILIES.items()})
    if "--check" not in arguments:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/OPTIONS.md is stale; ./scripts/docs writes it anew.")


if __name__ == "__main__":
    main(sys.argv[1:])
