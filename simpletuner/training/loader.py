"""Prefetching data loader: a background thread makes batches ahead of the training loop.

The content of a batch is a pure function of the seed and the position in the run, so prefetching,
stopping and resuming cannot change it.

Models are loaded in the loop's thread only (`in_loop`). While a library loads a model, it patches
torch functions and the default dtype for the whole process: tensors created by another thread would
end up on `meta` or in another dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch

from simpletuner.config.schema import CachingConfig
from simpletuner.data.sampler import PlannedBatch, Sampler
from simpletuner.diffusion.batch import Batch
from simpletuner.training.noise import NoiseSource

ReadBatch = Callable[[PlannedBatch], Batch]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class BatchLoader:
    """An endless iterator of batches, in the sampler's order.

    Attributes:
        sampler: decides the order.
        read: builds a batch from cached entries; called in the background.
        prepare_epoch: called in the loop's thread before the first batch of each epoch is read, to
            fill the caches with new random crops.
        pin: pin the memory of batches, so that uploads do not block.
        noise: draws the noise of batches ahead of the step, in the background, since that is slow;
            None leaves it to the step.
        count: micro-batches of the run so far.
        epoch: epoch of the last batch yielded, counted from 1.
        index: number of batches yielded in that epoch.
    """

    sampler: Sampler
    read: ReadBatch
    config: CachingConfig
    prepare_epoch: Callable[[int], None]
    pin: bool
    noise: NoiseSource | None = None
    count: int = 0
    epoch: int = 1
    index: int = 0
    _supply: Generator[Batch] | None = None

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Batch:
        # A run may resume at the end of an epoch, which has no batch left.
        while True:
            if self._supply is None:
                self._supply = self._read_epoch()
            batch = next(self._supply, None)
            if batch is not None:
                self.index += 1
                self.count += 1
                return batch
            self.epoch += 1
            self.index = 0
            self._supply = None

    @property
    def epochs_done(self) -> int:
        """Number of complete epochs."""
        is_complete = self.index >= self.sampler.batches_per_epoch(self.epoch)
        return self.epoch if is_complete else self.epoch - 1

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return {"epoch": self.epoch, "position": self.index}

    def beginning(self) -> dict[str, Any]:
        """The position at which the data of this session begins."""
        return {"epoch": self.sampler.origin.epoch, "position": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch yielded."""
        self.close()
        self.epoch = state["epoch"]
        self.index = state["position"]

    def planned(self, state: dict[str, Any], count: int) -> list[PlannedBatch]:
        """The `count` planned batches after a position."""
        epoch = state["epoch"]
        index = state["position"]
        upcoming: list[PlannedBatch] = []
        while len(upcoming) < count:
            batches = self.sampler.batches(epoch)
            end = min(index + count - len(upcoming), len(batches))
            upcoming += [batches[number] for number in range(index, end)]
            epoch += 1
            index = 0
        return upcoming

    def close(self) -> None:
        """Stop prefetching."""
        if self._supply is not None:
            self._supply.close()  # joins the background thread
            self._supply = None

    def _read_epoch(self) -> Generator[Batch]:
        """The rest of the current epoch."""
        self.prepare_epoch(self.epoch)
        batches = self.sampler.batches(self.epoch)
        count_before_epoch = self.count - self.index

        def make(index: int) -> Batch:
            # Batches are planned when they are indexed, so in the reading thread.
            batch = self.read(batches[index])
            if self.noise is not None:
                batch = self.noise.draw_ahead(batch, count_before_epoch + index)
            return batch.pin_memory() if self.pin and torch.cuda.is_available() else batch

        # One batch ahead even without prefetching, so that reading overlaps with the step.
        ahead = self.config.dataloader_prefetch_qlen if self.config.dataloader_prefetch else 1
        return read_ahead(range(self.index, len(batches)), make, ahead)


class OnlyInLoopError(Exception):
    """A prefetch thread would have to load a model."""


# Set in prefetch threads.
_READS_AHEAD: ContextVar[bool] = ContextVar("reads ahead", default=False)


def read_ahead(
    items: Iterable[Item], make: Callable[[Item], Result], ahead: int
) -> Generator[Result]:
    """Yield `make(item)` for every item, in order.

    A background thread prefetches up to `ahead` items.
    """
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def prepare_thread() -> None:
        _READS_AHEAD.set(True)
        if gpu is not None:
            # A new thread uses GPU 0, where pinning memory would create a context and take memory.
            torch.cuda.set_device(gpu)

    remaining = iter(items)
    pending = deque[tuple[Item, Future[Result]]]()
    with ThreadPoolExecutor(1, "batch-reader", prepare_thread) as reader:

        def start(count: int) -> None:
            for item in islice(remaining, count):
                pending.append((item, reader.submit(make, item)))

        try:
            start(ahead + 1)  # `ahead` items, and the one being made
            while pending:
                item, future = pending.popleft()
                try:
                    result = future.result()
                except OnlyInLoopError:
                    # No thread may create tensors while a model is loaded.
                    wait(later for _, later in pending)
                    result = make(item)
                start(1)
                yield result
        finally:
            reader.shutdown(wait=False, cancel_futures=True)


def in_loop(call: Callable[[], Result]) -> Result:
    """Make a call that loads a model, unless in a prefetch thread.

    There, the error makes the loop repeat the work of the item in its own thread.

    Raises:
        OnlyInLoopError: in a prefetch thread.
    """
    if _READS_AHEAD.get():
        raise OnlyInLoopError
    return call()
