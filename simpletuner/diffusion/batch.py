"""What travels through the training corridor: `Batch` in, `NoisyBatch` through, a loss out.

Latents keep one layout everywhere, `B C F H W` with F = 1 for pictures; an adapter turns them into the layout its
transformer wants and turns the prediction back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from simpletuner.diffusion.seeds import Place

# The cached embeddings of one caption, by name, without a batch dimension and without padding.
TextEmbeds = dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """One micro-batch, as it comes from the caches.

    Attributes:
        latents: clean latents z as the model sees them (scaled, normalised), float32, `B C F H W`.
        embeds: text embeddings, one entry per sample; lengths may differ.
        names: `dataset/relative path` per sample, for messages.
        dataset_id: the dataset all samples come from.
        condition: latents of the paired source pictures in the same layout, or None.
        loss_mask: weight of each latent position in the loss, `B 1 F H W`, or None.
    """

    latents: Tensor
    embeds: list[TextEmbeds]
    names: list[str]
    dataset_id: str = ""
    condition: Tensor | None = None
    loss_mask: Tensor | None = None

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """The same batch on a device."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        embeds = [
            {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in one.items()} for one in self.embeds
        ]
        latents = self.latents.to(device, non_blocking=non_blocking)
        return replace(
            self, latents=latents, embeds=embeds, condition=move(self.condition), loss_mask=move(self.loss_mask)
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, so that uploads need not wait."""

        def pin(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.pin_memory()

        embeds = [{name: tensor.pin_memory() for name, tensor in one.items()} for one in self.embeds]
        return replace(
            self,
            latents=self.latents.pin_memory(),
            embeds=embeds,
            condition=pin(self.condition),
            loss_mask=pin(self.loss_mask),
        )


@dataclass(frozen=True)
class NoisyBatch:
    """A batch at one noise level per sample.

    Attributes:
        batch: where it came from.
        noise: standard normal, float32, `B C F H W`.
        sigmas: share of noise in (0, 1], float32, `B`.
        noisy_latents: `(1 - sigma) z + sigma noise`, float32, `B C F H W`.
        timesteps: `1000 sigma`, float32, `B`.
        target: `noise - z`, float32, `B C F H W`.
        protected: positions that techniques which leave out tokens must not leave out: bool, on any device, of a
            shape that broadcasts to `B 1 F H W`, or None.
        place: where in the run this is, for techniques that draw random numbers; None outside of a run.
    """

    batch: Batch
    noise: Tensor
    sigmas: Tensor
    noisy_latents: Tensor
    timesteps: Tensor
    target: Tensor
    protected: Tensor | None = None
    place: Place | None = None


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting for what the device has under way: only locked pages copy like that."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
