"""From planned batches to tensors: cached entries are read ahead of the training loop.

One background thread reads, so that the loop's next batch is ready. The content of a batch is a pure function of the
seed and its place in the run, so reading ahead, stopping and resuming cannot change it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch

from simpletuner.config.schema import CachingConfig
from simpletuner.data.sampler import PlannedBatch, Sampler
from simpletuner.diffusion.batch import Batch

ReadBatch = Callable[[PlannedBatch], Batch]


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class BatchLoader:
    """An endless supply of batches, in the sampler's order.

    Args:
        sampler: decides the order.
        read: builds a batch from cached entries; called in the background.
        prepare_epoch: called in the loop's own thread before the first batch of each epoch is read, to fill the
            caches with new random crops.
        pin: page-lock batches, so that uploads do not block.

    Attributes:
        complete: (batch, micro-batches of the run before it) -> batch; called in the background.
        count: micro-batches of the run so far; to be set where a run starts or continues.
        epoch: epoch of the last batch handed out, counted from 1.
        index: how many batches of it have been handed out.
    """

    def __init__(
        self,
        sampler: Sampler,
        read: ReadBatch,
        config: CachingConfig,
        prepare_epoch: Callable[[int], None],
        *,
        pin: bool,
    ) -> None:
        self.sampler = sampler
        self.read = read
        self.prepare_epoch = prepare_epoch
        self.pin = pin
        self.ahead = config.dataloader_prefetch_qlen if config.dataloader_prefetch else 1
        self.epoch, self.index, self.count = 1, 0, 0
        self.complete: Callable[[Batch, int], Batch] = lambda batch, number: batch
        self._supply: Iterator[Batch] | None = None

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Batch:
        while True:
            if self._supply is None:
                self._supply = self._read_epoch()
            batch = next(self._supply, None)
            if batch is not None:
                self.index, self.count = self.index + 1, self.count + 1
                return batch
            self.epoch, self.index, self._supply = self.epoch + 1, 0, None

    @property
    def epochs_done(self) -> int:
        """Number of epochs whose every batch has been handed out."""
        complete = self.index >= self.sampler.batches_per_epoch(self.epoch)
        return self.epoch if complete else self.epoch - 1

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return {"epoch": self.epoch, "position": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch that was handed out."""
        self.close()
        self.epoch, self.index = state["epoch"], state["position"]

    def planned(self, state: dict[str, Any], count: int) -> list[PlannedBatch]:
        """The next `count` batches after a position, as planned."""
        epoch, index, found = state["epoch"], state["position"], list[PlannedBatch]()
        while len(found) < count:
            batches = self.sampler.batches(epoch)
            found += [batches[each] for each in range(index, len(batches))[: count - len(found)]]
            epoch, index = epoch + 1, 0
        return found

    def close(self) -> None:
        """Stop reading ahead."""
        if self._supply is not None:
            self._supply.close()  # type: ignore[attr-defined]  # a generator: ends its background thread
            self._supply = None

    def _read_epoch(self) -> Iterator[Batch]:
        """The rest of the current epoch."""
        self.prepare_epoch(self.epoch)
        batches = self.sampler.batches(self.epoch)
        planned = (batches[index] for index in range(self.index, len(batches)))
        return read_ahead(planned, partial(self._make, count(self.count)), self.ahead)

    def _make(self, numbers: Iterator[int], planned: PlannedBatch) -> Batch:
        batch = self.complete(self.read(planned), next(numbers))
        return batch.pin_memory() if self.pin and torch.cuda.is_available() else batch


def read_ahead(planned: Iterable[PlannedBatch], make: ReadBatch, ahead: int) -> Iterator[Batch]:
    """Batches in order, built by a background thread that stays at most `ahead` batches in front."""
    ready: queue.Queue[Batch | _Failure | None] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(item: Batch | _Failure | None) -> bool:
        while not stopped.is_set():  # wait in short steps: nobody may ever take from a full queue again
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for each in planned:
                if stopped.is_set() or not put(make(each)):
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - passed to the loop's thread, which raises it
            put(_Failure(error))

    worker = threading.Thread(target=work, name="batch-reader", daemon=True)
    worker.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stopped.set()
        with suppress(queue.Empty):
            ready.get_nowait()  # the worker may be waiting for room
        worker.join()
