"""Partners: the picture of a conditioning dataset that belongs to a training picture.

A partner lies under the same relative path and stem below its own root; the picture type may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .buckets import BucketRules, Geometry, Size
from .discovery import pair_key
from .inventory import FileFacts
from .sample import Sample

# How far the ratios of a picture and of a partner that takes over its crop may differ before it shows as a stretch.
STRETCH_TOLERANCE = 0.02


@dataclass(frozen=True)
class Partners:
    """The pictures of one conditioning dataset.

    Attributes:
        dataset_id: its id.
        conditioning_type: reference_strict takes over size and crop; reference_loose is cut to the same size by
            its own rules.
        root: its folder.
        facts: what is known of its pictures, by name.
        rules: its own crop rules.
        names: picture name by `pair_key`.
    """

    dataset_id: str
    conditioning_type: Literal["reference_strict", "reference_loose"]
    root: Path
    facts: Mapping[str, FileFacts]
    rules: BucketRules
    names: Mapping[str, str]

    def name_of(self, source: str) -> str | None:
        """Name of the partner of a source picture, or None when there is none."""
        return self.names.get(pair_key(source))

    def facts_of(self, source: str) -> FileFacts | None:
        """What is known of the partner of a source picture, or None when there is none."""
        name = self.name_of(source)
        return None if name is None else self.facts[name]

    def partner(self, source: str, geometry: Geometry, *token: object) -> Sample:
        """The partner of a source, cut so that it has the source's size.

        Raises:
            KeyError: it has none.
        """
        name = self.names[pair_key(source)]
        facts = self.facts[name]
        own = geometry
        if self.conditioning_type == "reference_loose":
            own = self.rules.follow(facts.picture_size, geometry, *token)
        return Sample(self.dataset_id, name, self.root / name, facts.content, facts.picture_size, own)


def names_by_key(names: Iterable[str]) -> dict[str, str]:
    """Picture names by what they are paired by; of two types of the same name the first counts."""
    keyed: dict[str, str] = {}
    for name in names:
        keyed.setdefault(pair_key(name), name)
    return keyed


def stretched(pairs: Sequence[tuple[Size, Size]]) -> int:
    """How many partners that take over a source's crop have another ratio and would be stretched."""
    return sum(abs(own[0] * other[1] / (own[1] * other[0]) - 1) > STRETCH_TOLERANCE for own, other in pairs)
