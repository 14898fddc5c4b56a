"""From planned batches to tensors: cached entries read ahead of the training loop.

One background thread reads; the loop finds its next batch ready. What a batch holds is a pure function of the seed
and its place in the run, so reading ahead, stopping and resuming cannot change it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from simpletuner.config.schema import CachingConfig
from simpletuner.data.sampler import PlannedBatch, Sampler
from simpletuner.diffusion.batch import Batch

__all__ = ["BatchLoader", "ReadBatch"]

ReadBatch = Callable[[PlannedBatch], Batch]


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class BatchLoader:
    """An endless supply of batches, in the sampler's order.

    Args:
        sampler: decides the order; its position is that of the last batch handed out.
        read: makes a batch from cached entries; called in the background.
        prepare_epoch: called in the loop's own thread before the first batch of each epoch is read, so that caches
            can be completed for random crops that change.
        pin: keep batches in page-locked memory, for uploads that need not wait.
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
        self._supply: Iterator[Batch] | None = None

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Batch:
        while True:
            if self._supply is None:
                self._supply = self._read_epoch()
            batch = next(self._supply, None)
            if batch is not None:
                self.sampler.index += 1
                return batch
            self.sampler.epoch, self.sampler.index, self._supply = self.epoch + 1, 0, None

    @property
    def epoch(self) -> int:
        """Where the last batch came from, counted from 1."""
        return self.sampler.epoch

    @property
    def epochs_done(self) -> int:
        """Epochs of which every batch was handed out."""
        complete = self.sampler.index >= self.sampler.batches_per_epoch(self.epoch)
        return self.epoch if complete else self.epoch - 1

    def state_dict(self) -> dict[str, Any]:
        """Where the run is in the data."""
        return {"epoch": self.epoch, "position": self.sampler.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the last batch that was handed out."""
        self.close()
        self.sampler.epoch, self.sampler.index = state["epoch"], state["position"]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._supply is not None:
            self._supply.close()  # type: ignore[attr-defined]
            self._supply = None

    def _read_epoch(self) -> Iterator[Batch]:
        """The rest of the current epoch."""
        self.prepare_epoch(self.epoch)
        planned = self.sampler.batches(self.epoch)[self.sampler.index :]
        return read_ahead(planned, self._make, self.ahead)

    def _make(self, planned: PlannedBatch) -> Batch:
        batch = self.read(planned)
        return batch.pin_memory() if self.pin and torch.cuda.is_available() else batch


def read_ahead(planned: Sequence[PlannedBatch], make: ReadBatch, ahead: int) -> Iterator[Batch]:
    """Batches in order, made by a background thread that stays at most `ahead` in front."""
    ready: queue.Queue[Batch | _Failure | None] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(item: Batch | _Failure | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for each in planned:
                if not put(make(each)):
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the loop's thread, which raises it
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
        worker.join()
