"""Sliders: LoRAs whose strength moves a property between two extremes.

Datasets with a `slider_strength` show the two extremes. In a step on one of these datasets, that
number multiplies the LoRA's strength, so a negative number trains the opposite direction. Gandikota
et al., "Concept Sliders", arXiv 2311.12092, train sliders on pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer

from simpletuner.diffusion.batch import Batch
from simpletuner.planning.techniques.slider import SliderSpec
from simpletuner.techniques.base import Site, Technique


class Slider(Technique):
    """Multiplies the scale of the LoRA in micro-steps on slider datasets."""

    def __init__(self, spec: SliderSpec) -> None:
        self.strengths = spec.strengths

    def attach(self, site: Site) -> None:
        self._layers = [
            module for module in site.transformer.modules() if isinstance(module, BaseTunerLayer)
        ]

    @contextmanager
    def acting(self, batch: Batch) -> Iterator[None]:
        """Scale the LoRA, also during the backward pass, which recomputes checkpointed blocks."""
        # Saved, not divided out again: x * s / s is not always x.
        usual = [dict(layer.scaling) for layer in self._layers]
        strength = self.strengths.get(batch.dataset_id, 1.0)
        try:
            for layer in self._layers:
                for name, scale in layer.scaling.items():
                    layer.scaling[name] = strength * scale
            yield
        finally:
            for layer, scaling in zip(self._layers, usual, strict=True):
                layer.scaling.update(scaling)
