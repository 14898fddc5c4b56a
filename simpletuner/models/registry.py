"""The model families. Importing this module completes the option schema: families declare a part of it."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from simpletuner.config.schema import declare_families
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE, KANDINSKY5_VIDEO
from simpletuner.models.sanavideo.spec import SANA_VIDEO
from simpletuner.models.spec import FamilySpec

if TYPE_CHECKING:
    from simpletuner.models.adapter import Captioner, FamilyAdapter

FAMILIES: dict[str, FamilySpec] = {spec.name: spec for spec in (KANDINSKY5_IMAGE, KANDINSKY5_VIDEO, SANA_VIDEO)}
declare_families(spec.options for spec in FAMILIES.values())
# Keys of datasets that only some families read.
FAMILY_DATASET_KEYS = frozenset(key for spec in FAMILIES.values() for key in spec.words.dataset_keys)


def canonical_family_name(name: str) -> str:
    """`Kandinsky5_Image` and `kandinsky5-image` are the same family."""
    return name.strip().lower().replace("_", "-")


def load_adapter(spec: FamilySpec) -> type[FamilyAdapter]:
    """Import the adapter class that a spec names, and torch with it."""
    adapter: type[FamilyAdapter] = pkgutil.resolve_name(spec.adapter)
    return adapter


def load_captioner(spec: FamilySpec) -> type[Captioner]:
    """Import the captioner class that a spec names, and torch with it."""
    captioner: type[Captioner] = pkgutil.resolve_name(spec.words.captioner or "")
    return captioner
