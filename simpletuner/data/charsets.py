"""Guesses the encoding of a text that is not UTF-8, for a message: older editors of Windows wrote
others.
"""

from __future__ import annotations

from collections.abc import Callable

# A text in which no more of the bytes are beyond ASCII is in a language with accents.
FEW = 0.3
SHOWN = 20  # characters of the text

# (name for iconv, name for Python, whether a character is one of its language)
EAST_ASIAN: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    (
        "SHIFT_JIS",
        "shift_jis",
        lambda character: "\u3041" <= character <= "\u30fe",
    ),  # kana; no Japanese lacks them
    ("EUC-KR", "euc_kr", lambda character: "\uac00" <= character <= "\ud7a3"),
    ("GB18030", "gb18030", lambda character: "\u4e00" <= character <= "\u9fff"),
)
SHARE = 0.1  # of the characters beyond ASCII that are letters of the language
CYRILLIC = frozenset({*range(0xC0, 0x100), 0xA8, 0xB8})  # bytes of letters in Windows-1251


def likely_encoding(content: bytes) -> str | None:
    """The encoding that iconv calls so; None without a plausible one."""
    high = [byte for byte in content if byte > 0x7F]
    if len(high) <= FEW * len(content):
        return "WINDOWS-1252" if _decoded(content, "cp1252") is not None else None
    if CYRILLIC.issuperset(high):
        return "WINDOWS-1251"
    for name, codec, is_letter in EAST_ASIAN:
        text = _decoded(content, codec)
        beyond = [character for character in text or "" if ord(character) > 0x7F]
        if beyond and sum(map(is_letter, beyond)) > SHARE * len(beyond):
            return name
    return None


def encoding_advice(content: bytes) -> str:
    """How to make the text UTF-8, as the end of a sentence."""
    name = likely_encoding(content)
    if name is None:
        return "save it as UTF-8"
    start = content.decode(name, "replace").strip()[:SHOWN]
    return (
        f"it seems to be {name} ({start!r}); save it as UTF-8, for example with iconv -f {name} "
        "-t UTF-8"
    )


def _decoded(content: bytes, codec: str) -> str | None:
    try:
        return content.decode(codec)
    except UnicodeDecodeError:
        return None
