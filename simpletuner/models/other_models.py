"""Models that are not trained here: what they are, and which family is nearest."""

from __future__ import annotations

import functools
import re

from simpletuner.config.json_reader import read_toml
from simpletuner.weights.part import hub_id_of

PACKAGE = "simpletuner.models"
SPELLED = "spelled"
REPOSITORIES = "repositories"
SEPARATOR = "[-_. ]*"


def why_not_trained(name: str) -> str:
    """Why a family or a flavour is not one here, worded to follow its name; empty if unknown.

    The longest name that it begins with decides: `wan-s2v-14b` is Wan S2V, not Wan.
    """
    word = name.strip().lower().replace("5.0", "5")  # Kandinsky 5.0 is called kandinsky5 here
    found = ""
    longest = 0
    for pattern, sentence in _sentences().items():
        match = re.match(pattern, word)
        if match is not None and match.end() > longest:
            longest = match.end()
            found = sentence
    return found


def why_not_trained_from(location: str) -> str:
    """The same for a hub id, or for a folder with the name of a published model."""
    published = (hub_id_of(location) or location).strip().lower().replace("\\", "/").rstrip("/")
    folder = published.rpartition("/")[2]
    found = ""
    longest = 0
    for beginning, name in read_toml(PACKAGE, "other_models.toml")[REPOSITORIES].items():
        repository = beginning.lower()
        is_it = published.startswith(repository) or folder.startswith(repository.split("/")[1])
        if is_it and len(repository) > longest:
            longest = len(repository)
            found = why_not_trained(name)
    return found


@functools.cache
def _sentences() -> dict[str, str]:
    """What to say, by a pattern of the beginning of a name."""
    sentences: dict[str, str] = {}
    for section, rows in read_toml(PACKAGE, "other_models.toml").items():
        if section == REPOSITORIES:
            continue
        is_spelling = section == SPELLED
        for names, words in rows.items():
            sentence = f"cannot be trained here: {words}. The nearest family is {section}."
            if is_spelling:
                sentence = f"is not the name of a family here: set {words}."
            for name in names.split():
                sentences[_pattern(name, whole=is_spelling)] = sentence
    return sentences


def _pattern(name: str, *, whole: bool) -> str:
    """`sd` also begins `sd15` and `sd-turbo`, but not `sdxl`; `z-image` is also `zimage`."""
    words = [re.escape(word) for word in name.split("-")]
    return SEPARATOR.join(words) + ("$" if whole else "(?![a-z])")
