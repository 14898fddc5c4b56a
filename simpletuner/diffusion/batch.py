"""The data of a training step: a `Batch` read from the caches, the `NoisyBatch` the model gets.

Latents always have the layout `B C F H W`, with F = 1 for pictures; a family's adapter converts to
and from the layout of its transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from simpletuner.diffusion.seeds import Place

# Cached embeddings of one caption, by name, without batch dimension or padding.
TextEmbeds = dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """One micro-batch, as read from the caches.

    Attributes:
        latents: clean latents z, scaled and normalised, float32, `B C F H W`.
        embeds: text embeddings, one entry per sample; lengths may differ.
        names: `dataset/relative path` per sample, for messages.
        dataset_id: the dataset of all samples.
        condition: latents of the paired source pictures in the same layout, or None.
        loss_mask: weight of each latent position in the loss, float32, `B 1 F H W`, or None.
        other_embeds: per sample, embeddings of the caption whose prediction is preserved, or None.
        features: cached features of techniques per sample, by kind; any shape and dtype.
        host_mask: `loss_mask` on the host, for reads without synchronisation.
        noise: standard normal, shaped like the latents, if drawn ahead.
        place: position in the run for which the noise was drawn.
    """

    latents: Tensor
    embeds: list[TextEmbeds]
    names: list[str]
    dataset_id: str = ""
    condition: Tensor | None = None
    loss_mask: Tensor | None = None
    other_embeds: list[TextEmbeds] | None = None
    features: Mapping[str, list[Tensor]] = field(default_factory=dict)
    host_mask: Tensor | None = None
    noise: Tensor | None = None
    place: Place | None = None

    @property
    def latent_size(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the latents, `F H W`."""
        frames, rows, columns = self.latents.shape[-3:]
        return frames, rows, columns

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """The same batch on a device."""
        moved = self._mapped(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        # Techniques read the mask to choose the number of tokens; reading it from the device would
        # synchronise.
        host_mask = self.host_mask
        if host_mask is None:
            host_mask = self.loss_mask
        return replace(moved, host_mask=host_mask)

    def pin_memory(self) -> Batch:
        """The same batch in pinned memory, so that uploads do not block."""
        return self._mapped(lambda tensor: tensor.pin_memory())

    def _mapped(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor moved, except the mask on the host."""
        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        moved = tree_map_only(Tensor, move, values)
        moved["host_mask"] = self.host_mask
        return Batch(**moved)


@dataclass(frozen=True)
class NoisyBatch:
    """A batch at one noise level per sample.

    Attributes:
        batch: the clean batch.
        noise: standard normal, float32, `B C F H W`.
        sigmas: noise levels in (0, 1], float32, `B`.
        noisy_latents: `(1 - sigma) z + sigma noise` unless a technique changes it, float32,
            `B C F H W`.
        timesteps: `1000 sigma`, float32, `B`.
        target: `noise - z`, float32, `B C F H W`.
        frame_weights: weight of each latent frame in the loss, float32, `1 1 F 1 1`, or None.
        protected: positions that techniques must not drop, bool, on any device, broadcastable to
            `B 1 F H W`, or None.
        place: position in the run, for techniques that draw random numbers; None outside of a run.
        host_sigmas: `sigmas` on the host, for reads without synchronisation; empty outside of a
            run.
    """

    batch: Batch
    noise: Tensor
    sigmas: Tensor
    noisy_latents: Tensor
    timesteps: Tensor
    target: Tensor
    frame_weights: Tensor | None = None
    protected: Tensor | None = None
    place: Place | None = None
    host_sigmas: tuple[float, ...] = ()

    def subset(self, rows: Sequence[int]) -> NoisyBatch:
        """A subset of the samples, for forward passes only: lacks the inputs of the loss."""

        def pick(tensor: Tensor) -> Tensor:
            # `tensor[rows]` would copy the indices to the device.
            return torch.stack([tensor[row] for row in rows])

        batch = self.batch
        picked = Batch(
            latents=pick(batch.latents),
            embeds=[batch.embeds[row] for row in rows],
            names=[batch.names[row] for row in rows],
            dataset_id=batch.dataset_id,
            condition=None if batch.condition is None else pick(batch.condition),
        )
        return NoisyBatch(
            batch=picked,
            noise=pick(self.noise),
            sigmas=pick(self.sigmas),
            noisy_latents=pick(self.noisy_latents),
            timesteps=pick(self.timesteps),
            target=pick(self.target),
        )

    @property
    def given_frames(self) -> int:
        """Number of initial latent frames that are a clean condition: 1 in i2v clips, else 0."""
        is_clip = self.noisy_latents.shape[2] > 1
        return 1 if is_clip and self.batch.condition is not None else 0

    @property
    def coverage(self) -> Tensor | None:
        """Weight of each position in the loss, broadcastable to `B 1 F H W`; None if all are 1."""
        mask = self.batch.loss_mask
        if mask is None:
            return self.frame_weights
        if self.frame_weights is None:
            return mask
        return mask * self.frame_weights

    def is_drawn(self, share: float, purpose: str) -> bool:
        """Whether this micro-batch belongs to a random share of all; one draw for all processes."""
        generator = self.place_for(purpose).shared_generator(purpose)
        return bool(torch.rand((), generator=generator) < share)

    def place_for(self, technique: str) -> Place:
        """The position in the run, for the schedule or random numbers of a technique.

        Raises:
            ValueError: the batch has no position.
        """
        if self.place is None:
            raise ValueError(
                f"{technique} depends on the position in the run, which this batch does not have"
            )
        return self.place

    def at_sigmas(self, sigmas: Tensor, latents: Tensor) -> NoisyBatch:
        """The same batch, noise and target at other noise levels.

        A first frame that is a condition stays.

        Args:
            sigmas: noise levels for the timesteps, `B`.
            latents: model inputs, `B C F H W`.
        """
        count = self.given_frames
        if count:
            latents = torch.cat([self.noisy_latents[:, :, :count], latents[:, :, count:]], dim=2)
        # float32 like the sigmas: a bf16 timestep would be off by up to 1.9 of 1000.
        return replace(self, sigmas=sigmas, timesteps=1000 * sigmas, noisy_latents=latents)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without synchronising."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()  # else the copy blocks, whatever `non_blocking` is
    return tensor.to(device, non_blocking=True)
