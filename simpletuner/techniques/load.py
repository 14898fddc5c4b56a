"""Imports the classes of the techniques of a run, which their specs name."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name

from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.techniques.base import Technique


def technique_class(spec: type[TechniqueSpec]) -> type[Technique]:
    """The class that trains a technique."""
    technique: type[Technique] = resolve_name(spec.trains)
    return technique


def make_techniques(specs: Sequence[TechniqueSpec]) -> list[Technique]:
    """The techniques of a run, in the order of their specs."""
    return [technique_class(type(spec))(spec) for spec in specs]
