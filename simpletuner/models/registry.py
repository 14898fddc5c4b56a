"""The model families."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE, KANDINSKY5_VIDEO
from simpletuner.models.sanavideo.spec import SANA_VIDEO
from simpletuner.models.spec import FamilySpec

if TYPE_CHECKING:
    from simpletuner.models.adapter import FamilyAdapter

FAMILIES: dict[str, FamilySpec] = {spec.name: spec for spec in (KANDINSKY5_IMAGE, KANDINSKY5_VIDEO, SANA_VIDEO)}
# Keys of datasets that only some families read.
FAMILY_DATASET_KEYS = frozenset(key for spec in FAMILIES.values() for key in spec.words.dataset_keys)


def canonical_family_name(name: str) -> str:
    """`Kandinsky5_Image` and `kandinsky5-image` are the same family."""
    return name.strip().lower().replace("_", "-")


def load_adapter(spec: FamilySpec) -> type[FamilyAdapter]:
    """Import the adapter class that a spec names, and torch with it."""
    return resolve_name(spec.adapter)
