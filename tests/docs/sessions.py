"""Code of the documentation, with numbers that make it quick."""

from __future__ import annotations

import re


def shortened(text: str, **counts: int) -> str:
    """The text with other values of keys, each of which occurs once."""
    for key, count in counts.items():
        text, replacements = re.subn(rf'(\b{key}"?[:=] ?)\d+', rf"\g<1>{count}", text)
        assert replacements == 1, key
    return text
