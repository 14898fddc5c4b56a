"""The table of all techniques as the plan sees them, and what follows from it."""

from __future__ import annotations

from simpletuner.config.schema import RunConfig
from simpletuner.errors import Problems
from simpletuner.planning.techniques.crepa import CrepaSpec
from simpletuner.planning.techniques.masked_loss import MaskedLossSpec
from simpletuner.planning.techniques.preservation import PreservationSpec, RegularisationSpec
from simpletuner.planning.techniques.scheduled_sampling import ScheduledSamplingSpec
from simpletuner.planning.techniques.slider import SliderSpec
from simpletuner.planning.techniques.spec import TechniqueSpec, TrainedData
from simpletuner.planning.techniques.tread import TreadSpec

# In the order in which a micro-step calls them. The losses that they add are summed in this order,
# too, which decides how the sum rounds.
SPECS: tuple[type[TechniqueSpec], ...] = (
    # First, so that all forward passes have its strength, also those of the techniques below.
    SliderSpec,
    # It replaces the input, and those below must see the input that is trained.
    ScheduledSamplingSpec,
    # Its target is the base model's prediction for that input.
    RegularisationSpec,
    # It reads the clean latents and the hidden states; any place would do.
    CrepaSpec,
    # Its prior predicts for the input that is trained, and TREAD keeps the tokens of its masks.
    MaskedLossSpec,
    TreadSpec,
    # Its passes come after the main one, when no technique acts; any place would do.
    PreservationSpec,
)


def chosen_techniques(
    config: RunConfig, data: TrainedData = TrainedData()
) -> tuple[TechniqueSpec, ...]:
    """The techniques that a configuration and the data turn on, in calling order."""
    chosen = []
    for technique in SPECS:
        spec = technique.of(config, data)
        if spec is not None:
            chosen.append(spec)
    return tuple(chosen)


def ruling_techniques(config: RunConfig) -> list[type[TechniqueSpec]]:
    """The techniques whose rules apply, in the order of the schema: on, or without a switch."""
    by_group = {technique.keys: technique for technique in SPECS}
    return [by_group[type(group)] for group in config.techniques_in_use]


def check_encoders(config: RunConfig, report: Problems) -> None:
    """Report vision encoders that techniques need and that cannot be used."""
    for technique in chosen_techniques(config):
        for kind in technique.features:
            if kind.encoder is not None:
                kind.encoder.check(report)
