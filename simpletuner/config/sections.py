"""The place of every option on the web page and in the wizard, in their order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simpletuner.config.json_reader import read_toml
from simpletuner.config.option import Group
from simpletuner.config.schema import GROUPS, family_groups, sections, technique_groups


@dataclass(frozen=True)
class Section:
    """A part of a tab on the page, and a step of the wizard.

    Attributes:
        id: `tab/section`, also the anchor on the page.
        groups: sections of the reference page whose options are shown, in this order.
        keys: options shown first, instead of with their group.
    """

    id: str
    label: str
    groups: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def tab(self) -> str:
        return self.id.partition("/")[0]


DATASETS = "dataset/training_data"  # the section of the dataset file and its cards
TABLE = read_toml("simpletuner.config", "sections.toml")


def _read_sections() -> Iterator[Section]:
    """The sections of sections.toml.

    A section that `takes` a kind of groups shows those that no section names; so a new technique
    appears without a change there.
    """
    placed: set[str] = set()
    for section in TABLE["sections"]:
        placed.update(section.get("groups", ()))
    kinds: dict[str, Sequence[type[Group]]] = {
        "techniques": technique_groups(),
        "families": family_groups(),
        "others": [*GROUPS.values()],
    }
    for section in TABLE["sections"]:
        titles = [*section.get("groups", ())]
        for group in kinds.get(section.get("takes", ""), ()):
            title = group.__doc__ or ""
            if title not in placed:
                titles.append(title)
        yield Section(
            section["id"], section["label"], tuple(titles), tuple(section.get("keys", ()))
        )


SECTIONS = tuple(_read_sections())
EVERYDAY_WORDS: Mapping[str, Sequence[str]] = {
    words: keys.split() for words, keys in TABLE["words"].items()
}
EVERYDAY = tuple(
    Section(group["id"], group["label"], keys=tuple(group["keys"])) for group in TABLE["everyday"]
)
PARTS: Mapping[str, str] = TABLE["parts"]
CHOICES: Mapping[str, Mapping[str, str]] = TABLE["choices"]
TABS = tuple(dict.fromkeys(section.tab for section in SECTIONS))


@functools.cache
def section_of() -> dict[str, Section]:
    """The section of every option, by key and in the order of the page."""
    grouped = sections()
    placed: dict[str, Section] = {}
    for section in SECTIONS:
        placed |= dict.fromkeys(section.keys, section)
    for section in SECTIONS:
        names = [option.name for group in section.groups for option in grouped[group]]
        # A key that a section claims is not repeated with its group.
        placed |= {name: section for name in names if name not in placed}
    in_order: dict[str, Section] = {}
    for section in SECTIONS:
        keys = [key for key, place in placed.items() if place is section]
        in_order |= dict.fromkeys(keys, section)
    return in_order
