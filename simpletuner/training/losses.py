"""The losses of a step: on the device, on the host, and over all processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from simpletuner.diffusion.batch import upload
from simpletuner.techniques.base import Technique
from simpletuner.training.guard import stop_if_losses_not_finite


@dataclass
class MicroLoss:
    """The losses of one micro-step.

    Tensors on the device until the host reads all of a step at once (`StepNumbers.to_host`), then
    numbers.

    Attributes:
        names: names of the samples.
        timesteps: timestep per sample.
        per_sample: loss per sample, before techniques weight it; its mean is `train_loss`.
        diffusion: the total without the terms of techniques.
        total: the minimised loss.
        extra: scalars logged by techniques, by name; names may differ between micro-steps.
    """

    names: list[str]
    timesteps: Any
    per_sample: Any
    diffusion: Any = None
    total: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    def log(self, extra: Mapping[str, Tensor]) -> None:
        """Log scalars, which may be on the CPU."""
        for name, value in extra.items():
            self.extra[name] = upload(value.detach(), self.per_sample.device)

    @classmethod
    def merged(cls, parts: Sequence[MicroLoss]) -> MicroLoss:
        """Merge the numbers of all processes, with samples in the order of the global batch."""
        extra = _values_by_name(part.extra for part in parts)
        return cls(
            names=[*chain.from_iterable(part.names for part in parts)],
            timesteps=[*chain.from_iterable(part.timesteps for part in parts)],
            per_sample=[*chain.from_iterable(part.per_sample for part in parts)],
            diffusion=fmean(part.diffusion for part in parts),
            total=fmean(part.total for part in parts),
            extra={name: fmean(values) for name, values in extra.items()},
        )


class Losses(list[MicroLoss]):
    """The losses of a step, one item per micro-step."""

    @property
    def names(self) -> list[list[str]]:
        """The samples of each micro-batch."""
        return [micro.names for micro in self]

    @property
    def counts(self) -> list[int]:
        """The number of samples in each micro-batch."""
        return [len(micro.names) for micro in self]

    @classmethod
    def merged(cls, parts: Sequence[Losses]) -> Losses:
        """Merge the numbers of all processes.

        Raises:
            NonFiniteError: naming the files of the affected micro-batches.
        """
        # Before averaging, which would hide the micro-batch of a NaN.
        separate = Losses(chain.from_iterable(parts))
        stop_if_losses_not_finite([micro.total for micro in separate], separate.names)
        return cls(map(MicroLoss.merged, zip(*parts, strict=True)))

    def means(self, techniques: Iterable[Technique]) -> dict[str, float]:
        """The metrics of the step.

        In losses, all samples have equal weight; in scalars of techniques, all micro-steps.
        """
        counts = torch.tensor(self.counts, dtype=torch.float32)
        shares = counts / counts.mean()  # all 1 if batches have equal sizes
        per_sample = torch.tensor([*chain.from_iterable(micro.per_sample for micro in self)])
        totals = torch.tensor([micro.total for micro in self])
        means = {
            "train_loss": per_sample.mean().item(),
            "optimization_loss": (totals * shares).mean().item(),
        }
        extra = _values_by_name(micro.extra for micro in self)
        if extra:
            diffusion = torch.tensor([micro.diffusion for micro in self])
            means["diffusion_loss"] = (diffusion * shares).mean().item()
        for name, values in extra.items():
            means[name] = torch.tensor(values).mean().item()
        for technique in techniques:
            means |= technique.summary(means)
        return means


@dataclass
class StepNumbers:
    """All that the host reads of a step, as tensors or as numbers.

    Tensors are scalars, or 1-D with a value per sample.

    Attributes:
        sizes: size of the gradient that is clipped, by name, for the model and for the modules of
            techniques.
        tiles: see `BlockLayout.take_tiles`.
    """

    losses: Losses
    sizes: list[dict[str, Any]] = field(default_factory=list)
    tiles: Mapping[int, tuple[Any, int]] = field(default_factory=dict)

    def to_host(self) -> StepNumbers:
        """The same as numbers, copied to the host in one transfer."""
        micro_losses = [vars(micro) for micro in self.losses]
        leaves, structure = tree_flatten((micro_losses, self.sizes, self.tiles))
        tensors = [leaf.flatten() for leaf in leaves if isinstance(leaf, Tensor)]
        # One tensor, one copy, one synchronisation.
        numbers = torch.cat(tensors).tolist()
        # Put the numbers in the places of the tensors: a list for 1-D tensors, else a scalar.
        start = 0
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                end = start + leaf.numel()
                leaves[index] = numbers[start:end] if leaf.ndim else numbers[start]
                start = end
        micro_losses, sizes, tiles = tree_unflatten(leaves, structure)
        return StepNumbers(Losses(MicroLoss(**micro) for micro in micro_losses), sizes, tiles)


def _values_by_name(extras: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    by_name: dict[str, list[float]] = {}
    for extra in extras:
        for name, value in extra.items():
            by_name.setdefault(name, []).append(value)
    return by_name


def loss_divisor(counts: Sequence[int], accumulation: int) -> float:
    """The divisor for the loss of the last micro-batch.

    It is `accumulation` if that batch is as large as the first one. The number of samples in the
    window is unknown before its last batch, so this assumes batches of the first size;
    `equalise_samples` corrects the sum afterwards.
    """
    return accumulation * counts[0] / counts[-1]
