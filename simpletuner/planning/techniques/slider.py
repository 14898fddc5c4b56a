"""Sliders: datasets that train the LoRA at a strength of their own."""

from __future__ import annotations

from collections.abc import Mapping

from simpletuner.config.schema import RunConfig
from simpletuner.planning.techniques.spec import TechniqueSpec, TrainedData


class SliderSpec(TechniqueSpec):
    """Turned on by datasets with a `slider_strength`.

    Attributes:
        strengths: strength by dataset id; 1 for all other datasets.
    """

    name = "slider"
    trains = "simpletuner.techniques.slider:Slider"

    def __init__(self, strengths: Mapping[str, float]) -> None:
        self.strengths = strengths

    @classmethod
    def of(cls, config: RunConfig, data: TrainedData) -> SliderSpec | None:
        return cls(data.strengths) if data.strengths else None
