"""Sliders: a LoRA whose strength runs from one end of a property to the other.

Datasets with a `slider_strength` show the two ends. In a step on such a dataset, that number multiplies the LoRA's
strength, so a negative number trains the opposite direction. Gandikota et al., "Concept Sliders", arXiv 2311.12092,
train such a LoRA on pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer

from simpletuner.diffusion.batch import Batch
from simpletuner.techniques.base import Site, Technique


class Slider(Technique):
    """Multiplies the scale of the LoRA in micro-steps of given datasets.

    Args:
        strengths: by dataset id; for all other datasets, 1.
    """

    def __init__(self, strengths: Mapping[str, float]) -> None:
        self.strengths = strengths

    def attach(self, site: Site) -> None:
        self._layers = [each for each in site.transformer.modules() if isinstance(each, BaseTunerLayer)]

    @contextmanager
    def acting(self, batch: Batch) -> Iterator[None]:
        """Also during the backward pass, which recomputes checkpointed blocks."""
        # Kept, not divided out again: x * s / s is not always x.
        usual = [dict(layer.scaling) for layer in self._layers]
        strength = self.strengths.get(batch.dataset_id, 1.0)
        try:
            for layer in self._layers:
                layer.scaling.update({name: strength * scale for name, scale in layer.scaling.items()})
            yield
        finally:
            for layer, scaling in zip(self._layers, usual, strict=True):
                layer.scaling.update(scaling)
