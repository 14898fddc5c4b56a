"""A small technique for tests that deals the noise: of a noise and its opposite, the one nearer to
the sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simpletuner.config.schema import RunConfig
from simpletuner.diffusion.batch import Batch
from simpletuner.diffusion.seeds import Place
from simpletuner.planning.techniques.spec import TechniqueSpec, TrainedData
from simpletuner.techniques.base import Technique


class FacingSpec(TechniqueSpec):
    name = "facing noise"
    trains = "tests.techniques.facing:Facing"

    @classmethod
    def of(cls, config: RunConfig, data: TrainedData) -> FacingSpec:
        return cls()


class Facing(Technique):
    """Depends on each sample alone, so several processes deal what one does."""

    dealt = 0  # micro-batches

    def deal(self, batch: Batch, noise: Tensor, place: Place) -> Tensor:
        Facing.dealt += 1
        product = (noise * batch.latents).sum(dim=(1, 2, 3, 4), keepdim=True)
        return torch.where(product < 0, -noise, noise)
