"""A small real technique: pulls hidden states towards cached features, by a trained projector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from simpletuner.caching.catalogue import FeatureKind
from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.models.cost import BatchShape, TransformerCost
from simpletuner.planning.techniques.spec import TechniqueCost, TechniqueSpec
from simpletuner.techniques.base import Site, Technique

CHANNELS = 16
PATCH = 2


class PatchTeacher:
    """A stand-in for a frozen vision encoder: the mean of a token's latents."""

    encoded = 0

    def encode(self, latents: Tensor) -> Tensor:
        """Features `S C` of latents `C F H W`, one row per token in raster order."""
        PatchTeacher.encoded += 1
        patches = latents.unflatten(-1, (-1, PATCH)).unflatten(-3, (-1, PATCH))  # C F h p w p
        tokens = patches.mean((-1, -3))  # C F h w
        return tokens.flatten(1).T.contiguous()


class PatchFeatures(FeatureKind):
    name = "alignment"

    @property
    def maker(self) -> Mapping[str, str | float]:
        return {"encoder": "patch mean", "patch": PATCH}


TEACHER = PatchFeatures()


class Alignment(Technique):
    """1 - cos(projector(hidden states of a block), teacher), over the tokens of the block."""

    def __init__(
        self, spec: TechniqueSpec | None = None, block: int = 1, weight: float = 0.5
    ) -> None:
        self.block = block
        self.weight = weight
        self.shapes: list[torch.Size] = []
        self.average = 0.0

    @classmethod
    def load_encoder(cls, *loading: Any) -> PatchTeacher:
        return PatchTeacher()

    def attach(self, site: Site) -> None:
        self.site = site
        # float32, whatever the model's dtype.
        self.project = nn.Linear(site.layout.width, CHANNELS)
        site.hidden.watch(self.block)

    def module(self) -> nn.Module:
        return self.project

    def adopt(self, module: nn.Module) -> None:
        self.project = module  # type: ignore[assignment]

    def extra_losses(self, noisy: NoisyBatch, prediction: Tensor) -> Mapping[str, Tensor]:
        hidden = self.site.hidden[self.block]
        self.shapes.append(hidden.shape)
        size = noisy.noisy_latents.shape[2:]
        order = self.site.layout.order(size[0], size[1] // PATCH, size[2] // PATCH)
        teacher = torch.stack(noisy.batch.features[TEACHER.name])[:, order]  # B S C
        self.kept = self.site.kept_tokens(self.block)
        if self.kept is not None:
            teacher = teacher.gather(1, self.kept[..., None].expand(-1, -1, CHANNELS))
        alignment = cosine_similarity(self.project(hidden.float()), teacher, dim=-1).mean()
        self.average = 0.9 * self.average + 0.1 * alignment.item()
        return {"alignment_loss": self.weight * (1 - alignment)}

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state["average"]


class AlignmentSpec(TechniqueSpec):
    name = "alignment"
    trains = "tests.techniques.alignment:Alignment"
    features = (TEACHER,)

    def cost(self, transformer: TransformerCost, batch: BatchShape) -> TechniqueCost:
        """The projector, its input in float32 (4 bytes), and three matmuls (6 FLOPs) with it."""
        tokens = batch.samples * batch.tokens
        weights = transformer.hidden * CHANNELS
        return TechniqueCost(
            weights + CHANNELS, 4.0 * tokens * transformer.hidden, 6.0 * tokens * weights
        )


SPEC = AlignmentSpec()
