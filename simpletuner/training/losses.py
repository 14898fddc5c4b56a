"""The losses of a step: on the device, on the host, and over all processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
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
    """The losses of one micro-step: tensors on the device, so that the host waits for it only once a step, or numbers.

    Attributes:
        names: of the samples.
        timesteps: of each sample.
        per_sample: of each sample, before techniques weigh it; its mean is `train_loss`.
        diffusion: the total without what techniques add to it.
        total: what is minimised.
        extra: what techniques log, by name; micro-steps may differ in their names.
    """

    names: list[str]
    timesteps: Any
    per_sample: Any
    diffusion: Any = None
    total: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    def log(self, extra: Mapping[str, Tensor]) -> None:
        """Log scalars, which may be on the CPU."""
        self.extra |= {name: upload(value.detach(), self.per_sample.device) for name, value in extra.items()}

    @classmethod
    def merged(cls, parts: Sequence[MicroLoss]) -> MicroLoss:
        """The numbers of all processes as those of one, with samples in the order of the global batch."""
        return cls(
            names=[*chain.from_iterable(part.names for part in parts)],
            timesteps=[*chain.from_iterable(part.timesteps for part in parts)],
            per_sample=[*chain.from_iterable(part.per_sample for part in parts)],
            diffusion=fmean(part.diffusion for part in parts),
            total=fmean(part.total for part in parts),
            extra={name: fmean(values) for name, values in _by_name(part.extra for part in parts).items()},
        )


class Losses(list[MicroLoss]):
    """The losses of a step, one item a micro-step."""

    @property
    def names(self) -> list[list[str]]:
        """The samples of each micro-batch."""
        return [micro.names for micro in self]

    @property
    def counts(self) -> list[int]:
        """The number of samples in each micro-batch."""
        return [len(micro.names) for micro in self]

    def on_host(self, *more: Any) -> tuple[Losses, list[Any]]:
        """The losses as numbers, and structures of further tensors (0-D) as structures of numbers."""
        leaves, structure = tree_flatten(([vars(micro) for micro in self], *more))
        # One tensor, one copy, one wait.
        numbers = iter(torch.cat([leaf.flatten() for leaf in leaves if isinstance(leaf, Tensor)]).tolist())
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[place] = [*islice(numbers, len(leaf))] if leaf.ndim else next(numbers)
        losses, *rest = tree_unflatten(leaves, structure)
        return Losses(MicroLoss(**micro) for micro in losses), rest

    @classmethod
    def merged(cls, parts: Sequence[Losses]) -> Losses:
        """The numbers of all processes as those of one.

        Raises:
            NonFiniteError: naming the files of the micro-batches of one process.
        """
        # Before the means, in which one NaN would hide the micro-batch it came from.
        everyone = Losses(chain.from_iterable(parts))
        stop_if_losses_not_finite([micro.total for micro in everyone], everyone.names)
        return cls(map(MicroLoss.merged, zip(*parts, strict=True)))

    def means(self, techniques: Iterable[Technique]) -> dict[str, float]:
        """The metrics of the step: every sample has the same weight, and every micro-step in what techniques log."""
        counts = torch.tensor(self.counts, dtype=torch.float32)
        shares = counts / counts.mean()  # all 1 if the batches are of one size
        means = {
            "train_loss": torch.tensor([*chain.from_iterable(micro.per_sample for micro in self)]).mean().item(),
            "optimization_loss": (torch.tensor([micro.total for micro in self]) * shares).mean().item(),
        }
        extra = _by_name(micro.extra for micro in self)
        if extra:
            means["diffusion_loss"] = (torch.tensor([micro.diffusion for micro in self]) * shares).mean().item()
        means |= {name: torch.tensor(values).mean().item() for name, values in extra.items()}
        for technique in techniques:
            means |= technique.summary(means)
        return means


def _by_name(extras: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    by_name: dict[str, list[float]] = {}
    for name, value in chain.from_iterable(extra.items() for extra in extras):
        by_name.setdefault(name, []).append(value)
    return by_name


def loss_divisor(counts: Sequence[int], accumulation: int) -> float:
    """The divisor for the loss of the last micro-batch; `accumulation` if it has as many samples as the first one.

    The number of samples in the window is unknown before its last batch, so this assumes batches like the first;
    `equalise_samples` corrects the sum afterwards.
    """
    return accumulation * counts[0] / counts[-1]
