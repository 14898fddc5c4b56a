"""Pages in other languages have the code blocks of the English ones.

`python -m tests.docs.plans` copies them. Of long pages there are short forms, with some of the
blocks.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
LANGUAGES = {"zh": "中文", "hi": "हिन्दी", "es": "Español"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRANSLATED = [DOCS / "INSTALL.md", *sorted((DOCS / "quickstart").glob("*.md"))]
SHORTENED = [DOCS / f"{name}.md" for name in ("TUTORIAL", "CHOOSING", "MEMORY")]


def with_blocks(text: str, english: str) -> str:
    """The text with the code blocks of the English page, one after another."""
    blocks = (block[0] for block in FENCE.finditer(english))
    return FENCE.sub(lambda block: next(blocks, block[0]), text)
