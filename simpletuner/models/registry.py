"""The model families."""

from __future__ import annotations

from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE, KANDINSKY5_VIDEO
from simpletuner.models.sanavideo.spec import SANA_VIDEO
from simpletuner.models.spec import FamilySpec

SPECS = (KANDINSKY5_IMAGE, KANDINSKY5_VIDEO, SANA_VIDEO)
FAMILIES: dict[str, FamilySpec] = {spec.name: spec for spec in SPECS}
# Keys of datasets that only some families read.
FAMILY_DATASET_KEYS = frozenset().union(*(spec.captions.dataset_keys for spec in SPECS))


def canonical_family_name(name: str) -> str:
    """`Kandinsky5_Image` and `kandinsky5-image` are the same family."""
    return name.strip().lower().replace("_", "-")
