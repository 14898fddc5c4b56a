"""The table of all techniques: their names, and the classes that train."""

from __future__ import annotations

from collections.abc import Sequence

from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.techniques.base import Technique
from simpletuner.techniques.crepa import Crepa
from simpletuner.techniques.masked_loss import MaskedLoss
from simpletuner.techniques.preservation import Preservation, Regularisation
from simpletuner.techniques.scheduled_sampling import ScheduledSampling
from simpletuner.techniques.slider import Slider
from simpletuner.techniques.tread import Tread

# By the name of the spec (`simpletuner.planning.techniques.table.SPECS`, which also has their order).
TECHNIQUES: dict[str, type[Technique]] = {
    "crepa": Crepa,
    "masked loss": MaskedLoss,
    "preservation": Preservation,
    "regularisation": Regularisation,
    "scheduled sampling": ScheduledSampling,
    "slider": Slider,
    "tread": Tread,
}


def make_techniques(specs: Sequence[TechniqueSpec]) -> list[Technique]:
    """The techniques of a run, in the order of their specs."""
    return [TECHNIQUES[spec.name](spec) for spec in specs]
