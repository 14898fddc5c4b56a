"""What a step takes: its seconds, what they went into, and its arithmetic."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from simpletuner.diffusion.batch import Batch
from simpletuner.training.state import Assembly


class StepMeter:
    """Runs from the moment it is made.

    Attributes:
        data_seconds: waited for batches so far.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._started = time.perf_counter()
        self._flops = 0.0
        self._shapes: list[tuple[int, ...]] = []
        self.data_seconds = 0.0
        if assembly.streamer is not None:
            assembly.streamer.waited()  # what previews waited for since the step before

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around whatever brings the next batch."""
        started = time.perf_counter()
        yield
        self.data_seconds += time.perf_counter() - started

    def count(self, batch: Batch) -> None:
        """Take a micro-batch into account."""
        self._shapes.append(tuple(batch.latents.shape))
        self._flops += batch_flops(self._assembly, batch)

    @property
    def seconds(self) -> float:
        """Up to now."""
        return time.perf_counter() - self._started

    @property
    def flops(self) -> float | None:
        """What the model's arithmetic takes; None where the family's cost is not known."""
        return self._flops or None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the latents of each micro-batch, smallest first."""
        return tuple(sorted(self._shapes))

    def read_weights_seconds(self) -> float | None:
        """Waited for streamed weights since this was last asked; None when none are streamed."""
        return None if self._assembly.streamer is None else self._assembly.streamer.waited()


def batch_flops(assembly: Assembly, batch: Batch) -> float:
    """What the model's arithmetic takes on a micro-batch; 0 where the family's cost is not known."""
    if assembly.sample_flops is None:
        return 0.0
    tokens = tokens_of(assembly, batch)
    return sum(assembly.sample_flops(tokens, len(embeds["prompt_embeds"])) for embeds in batch.embeds)


def tokens_of(assembly: Assembly, batch: Batch) -> int:
    """Tokens of each sample's latents."""
    return assembly.adapter.spec.tokens(*batch.latents.shape[-3:])
