"""Guesses the encoding of a text that is not UTF-8, as older editors of Windows wrote it."""

from __future__ import annotations

from typing import NamedTuple

# Largest share of bytes beyond ASCII in a text of a language with accents.
FEW = 0.3
SHOWN = 20  # characters of the text


class EastAsianEncoding(NamedTuple):
    """An encoding, and the first and last of the characters that texts in it contain."""

    name: str  # as iconv calls it
    codec: str  # as Python calls it
    first: str
    last: str


EAST_ASIAN = (
    EastAsianEncoding("SHIFT_JIS", "shift_jis", "\u3041", "\u30fe"),  # kana: all Japanese has them
    EastAsianEncoding("EUC-KR", "euc_kr", "\uac00", "\ud7a3"),  # hangul
    EastAsianEncoding("GB18030", "gb18030", "\u4e00", "\u9fff"),  # Chinese characters
)
SHARE = 0.1  # of the characters beyond ASCII that must be characters of the language
CYRILLIC = frozenset({*range(0xC0, 0x100), 0xA8, 0xB8})  # bytes of letters in Windows-1251


def likely_encoding(content: bytes) -> str | None:
    """The encoding that a text seems to have, as iconv calls it; None without a plausible one."""
    high = [byte for byte in content if byte > 0x7F]
    if len(high) <= FEW * len(content):
        if _decoded(content, "cp1252") is None:
            return None
        return "WINDOWS-1252"
    if CYRILLIC.issuperset(high):
        return "WINDOWS-1251"
    for encoding in EAST_ASIAN:
        text = _decoded(content, encoding.codec) or ""
        beyond_ascii = [character for character in text if ord(character) > 0x7F]
        expected = [
            character for character in beyond_ascii if encoding.first <= character <= encoding.last
        ]
        if len(expected) > SHARE * len(beyond_ascii):
            return encoding.name
    return None


def encoding_advice(content: bytes) -> str:
    """How to make the text UTF-8, as the end of a sentence."""
    name = likely_encoding(content)
    if name is None:
        return "save it as UTF-8"
    start = content.decode(name, "replace").strip()[:SHOWN]
    advice = f"save it as UTF-8, for example with iconv -f {name} -t UTF-8"
    return f"it seems to be {name} ({start!r}); {advice}"


def _decoded(content: bytes, codec: str) -> str | None:
    try:
        return content.decode(codec)
    except UnicodeDecodeError:
        return None
