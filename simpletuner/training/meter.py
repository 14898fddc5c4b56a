"""Measures a step: duration, waits and FLOPs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

from torch import nn

from simpletuner.diffusion.batch import Batch
from simpletuner.memory.offload.streamer import Streamer
from simpletuner.models.cost import NO_ADAPTERS, Adapters, BatchShape, FamilyCost, Kernels, Work
from simpletuner.models.spec import FamilySpec
from simpletuner.reporting.events import StepReport
from simpletuner.techniques.base import Technique
from simpletuner.timing import HostClock
from simpletuner.training.loader import BatchLoader
from simpletuner.training.losses import Losses
from simpletuner.weights.files import Shape

# (tokens, text tokens) -> FLOPs of training on one sample. Recomputation is not counted, and
# block-sparse attention counts as if it visited all tiles.
SampleFlops = Callable[[int, int], Work]


class StepMeter:
    """Measures a step, starting at construction.

    Args:
        step: number of the step, counted from 1.
        streamer: copies weights to the device during the step; None without streaming.

    Attributes:
        waiting_for_data: clock that runs while the step waits for data.
    """

    def __init__(self, step: int, streamer: Streamer | None) -> None:
        self._step = step
        self._streamer = streamer
        self._started = time.perf_counter()
        self._work = Work()
        self._shapes: list[tuple[int, ...]] = []
        self.waiting_for_data = HostClock()
        if streamer is not None:
            streamer.waited()  # discard the waits of previews since the last step

    def count(self, batch: Batch, work: Work) -> None:
        """Count a micro-batch and its share of work in this process."""
        self._shapes.append(tuple(batch.latents.shape))
        self._work += work

    def report(
        self,
        loader: BatchLoader,
        losses: Losses,
        metrics: Mapping[str, float],
        tiles: Mapping[int, tuple[float, int]],
        passes: int,
    ) -> StepReport:
        """The report of the step, which ends now.

        Args:
            losses: losses of all processes.
            tiles: (tile pairs visited by block-sparse attention, all tile pairs), by tokens of a
                sample.
            passes: forward passes of the step.
        """
        work = self._work
        # Before the waits are read, which may block until the device has caught up.
        seconds = time.perf_counter() - self._started
        weights_seconds = None
        if self._streamer is not None:
            weights_seconds = self._streamer.waited()
        # The share of block-sparse attention that was computed; 1 without it.
        visited: float = 1
        pairs = 1
        if tiles:
            visited = sum(count for count, _ in tiles.values())
            pairs = sum(count for _, count in tiles.values())
        return StepReport(
            step=self._step,
            epoch=loader.epoch,
            metrics=metrics,
            seconds=seconds,
            data_seconds=self.waiting_for_data.read(),
            weights_seconds=weights_seconds,
            timesteps=[*chain.from_iterable(micro.timesteps for micro in losses)],
            epochs_done=loader.epochs_done,
            flops=replace(work, sparse=work.sparse * visited / pairs).total or None,
            shapes=tuple(sorted(self._shapes)),
            passes=passes,
            densities={tokens: visited / pairs for tokens, (visited, pairs) in tiles.items()},
        )


def batch_work(batch: Batch, spec: FamilySpec, sample_flops: SampleFlops | None) -> Work:
    """Model FLOPs of a micro-batch; zero if the family's cost is unknown."""
    work = Work()
    if sample_flops is None:
        return work
    tokens = spec.tokens(*batch.latent_size)
    for embeds in batch.embeds:
        work += sample_flops(tokens, len(embeds["prompt_embeds"]))
    return work


# Cache size for a few bucket shapes, each with a few hundred caption lengths.
REMEMBERED = 4096


def count_flops(
    transformer: nn.Module, cost: FamilyCost, adapters: Adapters, techniques: Sequence[Technique]
) -> SampleFlops:
    """A function (tokens, text tokens) -> FLOPs of a sample, forward and backward.

    Recomputation by checkpointing is not counted, nor are tokens in blocks that they skip.
    Block-sparse attention counts all tiles.
    """
    model: Any = transformer
    costs = cost.transformer(model.config, weight_shapes(model), Kernels(tile_lists=True))
    if costs.density is not None:
        costs = replace(costs, density=lambda tokens: 1.0)
    # Without an adapter, every weight has a gradient.
    is_full = adapters is NO_ADAPTERS
    routes = [route for technique in techniques for route in technique.routes]

    @lru_cache(REMEMBERED)
    def flops(tokens: int, text_tokens: int) -> Work:
        # One row, since only the number of tokens matters.
        load = costs.routed(
            BatchShape(samples=1, frames=1, height=1, width=tokens, text=text_tokens), routes
        )
        return costs.forward(load, adapters) + costs.backward(load, adapters, full=is_full)

    return flops


def weight_shapes(model: nn.Module) -> dict[str, Shape]:
    """Weight shapes of linear layers and convolutions, by their names as without a LoRA."""
    shapes: dict[str, Shape] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d) and ".lora_" not in name:
            plain_name = f"{name.removesuffix('.base_layer')}.weight"
            if isinstance(module, nn.Linear):
                # The shape of a quantised weight may differ from that of its layer.
                shapes[plain_name] = (module.out_features, module.in_features)
            else:
                shapes[plain_name] = tuple(module.weight.shape)
    return shapes
