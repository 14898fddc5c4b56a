"""Regularisation data: hold the model to what it did before.

For datasets marked `is_regularisation_data` the target is the prediction of the base model, that is, of the
transformer with its LoRA switched off; a picture of the same kind then cannot drift while a new concept is learned.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from diffusers.loaders.peft import PeftAdapterMixin
from torch import nn

from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.techniques.base import Technique


class Regularisation(Technique):
    """Replaces the target of samples from the given datasets by the base model's prediction."""

    def __init__(self, dataset_ids: frozenset[str]) -> None:
        self.dataset_ids = dataset_ids

    def attach(self, adapter: FamilyAdapter, transformer: nn.Module) -> None:
        self._adapter, self._transformer = adapter, transformer

    def before_forward(self, noisy: NoisyBatch) -> NoisyBatch:
        if noisy.batch.dataset_id not in self.dataset_ids:
            return noisy
        switch = cast(PeftAdapterMixin, self._transformer)
        switch.disable_adapters()
        try:
            with torch.no_grad():
                target = self._adapter.predict(self._transformer, noisy)
        finally:
            switch.enable_adapters()
        return replace(noisy, target=target)
