"""A small technique that deals noise: the noise or its opposite, whichever is nearer the sample."""

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
    """Depends only on the sample, so several processes choose the same noise as one."""

    micro_batches = 0

    def choose_noise(self, batch: Batch, noise: Tensor, place: Place) -> Tensor:
        Facing.micro_batches += 1
        product = (noise * batch.latents).sum(dim=(1, 2, 3, 4), keepdim=True)
        return torch.where(product < 0, -noise, noise)
