"""Regularisation data: keep the model's behaviour on other pictures.

For datasets marked `is_regularisation_data` the target is the prediction of the base model (the transformer with its
LoRA disabled), so pictures of the same kind do not drift while a new concept is learned.
"""

from __future__ import annotations

from dataclasses import replace

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.techniques.base import Predict, Site, Technique


class Regularisation(Technique):
    """Replaces the target of samples from given datasets with the base model's prediction."""

    def __init__(self, dataset_ids: frozenset[str]) -> None:
        self.dataset_ids = dataset_ids

    def attach(self, site: Site) -> None:
        self._disabled = site.disabled

    def before_forward(self, noisy: NoisyBatch, predict: Predict) -> NoisyBatch:
        if noisy.batch.dataset_id not in self.dataset_ids:
            return noisy
        with self._disabled():
            return replace(noisy, target=predict(noisy))
