"""The losses of a step: on the device, on the host, and over all processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from simpletuner.diffusion.batch import NoisyBatch, upload
from simpletuner.techniques.base import Technique
from simpletuner.training.guard import stop_if_losses_not_finite

Item = TypeVar("Item")


@dataclass
class Losses:
    """Losses of the micro-steps, one item for each.

    They are tensors on the device, so that the host waits for it only once a step; `on_host` makes them numbers.
    """

    total: list[Any] = field(default_factory=list)
    diffusion: list[Any] = field(default_factory=list)  # the total without what techniques add to it
    per_sample: list[Any] = field(default_factory=list)
    timesteps: list[Any] = field(default_factory=list)
    extra: list[dict[str, Any]] = field(default_factory=list)  # by names that not all micro-steps have
    names: list[list[str]] = field(default_factory=list)

    def begin(self, noisy: NoisyBatch, loss: Tensor) -> None:
        """Begin a micro-step with the loss of each sample, before techniques weigh it: the mean is `train_loss`."""
        self.per_sample.append(loss)
        self.timesteps.append(noisy.timesteps)
        self.names.append(noisy.batch.names)
        self.extra.append({})

    def log(self, extra: Mapping[str, Tensor]) -> None:
        """Log scalars of the last micro-step, which may be on the CPU."""
        device = self.per_sample[-1].device
        self.extra[-1].update({name: upload(value.detach(), device) for name, value in extra.items()})

    @property
    def counts(self) -> list[int]:
        """Samples of each micro-batch."""
        return [len(names) for names in self.names]

    def on_host(self, more: Sequence[Tensor] = ()) -> tuple[Losses, Iterator[float]]:
        """The losses as numbers, and more scalars."""
        tensors = (self.total, self.diffusion, self.per_sample, self.timesteps, self.extra, list(more))
        each, structure = tree_flatten(tensors)
        # One tensor, one copy, one wait.
        numbers = iter(torch.cat([tensor.flatten() for tensor in each]).tolist())
        read = [list(islice(numbers, len(tensor))) if tensor.ndim else next(numbers) for tensor in each]
        total, diffusion, per_sample, timesteps, extra, scalars = tree_unflatten(read, structure)
        return Losses(total, diffusion, per_sample, timesteps, extra, self.names), iter(scalars)

    @classmethod
    def merged(cls, parts: Sequence[Losses]) -> Losses:
        """The numbers of all processes as those of one, with samples in the order of the global batch.

        Raises:
            NonFiniteError: naming the files of the micro-batches of one process.
        """
        # Before the means, in which one NaN would hide the micro-batch it came from.
        files = [names for part in parts for names in part.names]
        stop_if_losses_not_finite([loss for part in parts for loss in part.total], files)
        return cls(
            total=_averaged(part.total for part in parts),
            diffusion=_averaged(part.diffusion for part in parts),
            per_sample=_joined(part.per_sample for part in parts),
            timesteps=_joined(part.timesteps for part in parts),
            extra=[_averaged_by_name(micro) for micro in zip(*(part.extra for part in parts), strict=True)],
            names=_joined(part.names for part in parts),
        )

    def means(self, techniques: Iterable[Technique]) -> dict[str, float]:
        """The metrics of the step: every sample has the same weight, and every micro-step in what techniques log."""
        counts = torch.tensor(self.counts, dtype=torch.float32)
        shares = counts / counts.mean()  # all 1 if the batches are of one size
        means = {
            "train_loss": torch.tensor([*chain.from_iterable(self.per_sample)]).mean().item(),
            "optimization_loss": (torch.tensor(self.total) * shares).mean().item(),
        }
        if any(self.extra):
            means["diffusion_loss"] = (torch.tensor(self.diffusion) * shares).mean().item()
        means |= {name: torch.tensor(values).mean().item() for name, values in _by_name(self.extra).items()}
        for technique in techniques:
            means |= technique.summary(means)
        return means


def _averaged(columns: Iterable[list[float]]) -> list[float]:
    return [fmean(column) for column in zip(*columns, strict=True)]


def _averaged_by_name(extras: Iterable[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(values) for name, values in _by_name(extras).items()}


def _joined(columns: Iterable[list[list[Item]]]) -> list[list[Item]]:
    """The items of all processes by micro-step."""
    return [[*chain.from_iterable(micro)] for micro in zip(*columns, strict=True)]


def _by_name(extras: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values under each name, which need not be in all of these."""
    by_name: dict[str, list[float]] = {}
    for name, value in (pair for extra in extras for pair in extra.items()):
        by_name.setdefault(name, []).append(value)
    return by_name


def loss_divisor(counts: Sequence[int], accumulation: int) -> float:
    """The divisor for the loss of the last micro-batch; `accumulation` if it has as many samples as the first one.

    The number of samples in the window is unknown before its last batch, so this assumes batches like the first;
    `equalise_samples` corrects the sum afterwards.
    """
    return accumulation * counts[0] / counts[-1]
