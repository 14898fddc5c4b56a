"""From planned batches to tensors: cached entries are read ahead of the training loop.

One background thread reads, so that the loop's next batch is ready. The content of a batch is a pure function of the
seed and its place in the run, so reading ahead, stopping and resuming cannot change it.

Models are loaded in the loop's thread only (`in_loop`). While a library loads one, it replaces functions of torch and
the default dtype of the whole process: what another thread creates would end up on `meta` or in another dtype.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch

from simpletuner.config.schema import CachingConfig
from simpletuner.data.sampler import PlannedBatch, Sampler
from simpletuner.diffusion.batch import Batch

ReadBatch = Callable[[PlannedBatch], Batch]
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Errand:
    """A call that the reading thread leaves to the loop's thread."""

    call: Callable[[], Any]
    result: Future[Any]

    def run(self) -> None:
        try:
            self.result.set_result(self.call())
        except BaseException as error:  # noqa: BLE001 - passed to the reading thread, which raises it
            self.result.set_exception(error)


@dataclass(eq=False)
class BatchLoader:
    """An endless supply of batches, in the sampler's order.

    Attributes:
        sampler: decides the order.
        read: builds a batch from cached entries; called in the background.
        prepare_epoch: called in the loop's own thread before the first batch of each epoch is read, to fill the
            caches with new random crops.
        pin: page-lock batches, so that uploads do not block.
        complete: (batch, micro-batches of the run before it) -> batch; called in the background.
        count: micro-batches of the run so far; to be set where a run starts or continues.
        epoch: epoch of the last batch handed out, counted from 1.
        index: how many batches of it have been handed out.
    """

    sampler: Sampler
    read: ReadBatch
    config: CachingConfig
    prepare_epoch: Callable[[int], None]
    pin: bool
    complete: Callable[[Batch, int], Batch] = lambda batch, number: batch
    epoch: int = 1
    index: int = 0
    count: int = 0
    _supply: Iterator[Batch] | None = None

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Batch:
        # A run may resume at the very end of an epoch, which then has no batch left.
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
        # Planned lazily, by the reading thread.
        planned = (batches[index] for index in range(self.index, len(batches)))
        # One batch even without prefetching, so that reading overlaps with the step.
        ahead = self.config.dataloader_prefetch_qlen if self.config.dataloader_prefetch else 1
        return read_ahead(planned, partial(self._make, count(self.count)), ahead)

    def _make(self, numbers: Iterator[int], planned: PlannedBatch) -> Batch:
        batch = self.complete(self.read(planned), next(numbers))
        return batch.pin_memory() if self.pin and torch.cuda.is_available() else batch


class _ReadingThread(threading.Thread):
    """Builds batches in order and stays at most `ahead` of them in front of who takes them from `ready`.

    Attributes:
        stopped: to be set when nobody takes any more.
    """

    def __init__(self, planned: Iterable[PlannedBatch], make: ReadBatch, ahead: int) -> None:
        # A daemon: a reader that waits at a full queue must not keep a failed process alive.
        super().__init__(name="batch-reader", daemon=True)
        self._planned, self._make_batch = planned, make
        self.ready: queue.Queue[Batch | _Errand | BaseException | None] = queue.Queue(maxsize=ahead)
        self.stopped = threading.Event()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(self) -> None:
        try:
            if self._gpu is not None:  # a thread starts with the first, where locking pages would take memory
                torch.cuda.set_device(self._gpu)
            for each in self._planned:
                self._put(self._make_batch(each))
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - passed to the loop's thread, which raises it
            with suppress(CancelledError):
                self._put(error)

    def ask(self, call: Callable[[], Result]) -> Result:
        """The result of a call that the loop's thread makes when it wants the next batch."""
        errand = _Errand(call, Future())
        self._put(errand)
        # In short waits: a loop that has stopped never makes the call.
        while not wait([errand.result], timeout=0.1).done:
            self._check()
        result: Result = errand.result.result()
        return result

    def _put(self, item: Batch | _Errand | BaseException | None) -> None:
        while True:  # wait in short steps: nobody may ever take from a full queue again
            self._check()
            with suppress(queue.Full):
                return self.ready.put(item, timeout=0.1)

    def _check(self) -> None:
        if self.stopped.is_set():
            raise CancelledError


def read_ahead(planned: Iterable[PlannedBatch], make: ReadBatch, ahead: int) -> Iterator[Batch]:
    """Batches in order, built by a background thread that stays at most `ahead` batches in front."""
    reader = _ReadingThread(planned, make, ahead)
    reader.start()
    try:
        while (item := reader.ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, _Errand):
                item.run()
            else:
                yield item
    finally:
        reader.stopped.set()
        with suppress(queue.Empty):
            reader.ready.get_nowait()  # it may be waiting for room
        reader.join()


def in_loop(call: Callable[[], Result]) -> Result:
    """The result of a call that the loop's thread makes, wherever it is needed."""
    thread = threading.current_thread()
    return thread.ask(call) if isinstance(thread, _ReadingThread) else call()
