"""The words for what is learned: what they must say, and the name of a run that follows from them.

`zkt, a grey cat` is a word that the model does not know, and what it is.
"""

from __future__ import annotations

import re
from unicodedata import category

SUBJECT = "subject"  # the purpose of which the words must also say what it is
EXAMPLE = "zkt, a grey cat"


def split_trigger(trigger: str) -> tuple[str, str]:
    """The word, and what it is; the latter is empty if the trigger does not say it."""
    word, _, subject_class = trigger.partition(",")
    return word.strip(), subject_class.strip()


def why_incomplete(purpose: str, trigger: str) -> str:
    """What the words lack, as a sentence; empty if they are complete."""
    word, subject_class = split_trigger(trigger)
    if not word:
        return f"Name it: a made-up word, then what it is, as in: {EXAMPLE}"
    if purpose == SUBJECT and not subject_class:
        return (
            f"Say what {word} is, too, after a comma, as in: {EXAMPLE}. Else the model takes "
            f"{word} for everything in the pictures."
        )
    return ""


def name_from(words: str) -> str:
    """The name of a run or a folder from a few words; empty if they hold no usable character."""
    name = "".join(char if _is_in_names(char) else " " for char in words)
    return re.sub(r"\s+", "-", name.strip()).strip("-.")


def _is_in_names(char: str) -> bool:
    """Whether the name of a run may contain a character."""
    # L, M and N: letters, vowel signs (of Devanagari, which \w does not match), and digits.
    return char in "_.-" or category(char)[0] in "LMN"
