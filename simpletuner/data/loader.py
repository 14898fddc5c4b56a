"""From planned batches to tensors: cached entries are read ahead of the training loop.

One background thread reads, so that the loop's next batch is ready. The content of a batch is a pure function of the
seed and its place in the run, so reading ahead, stopping and resuming cannot change it.

Models are loaded in the loop's thread only (`in_loop`). While a library loads one, it replaces functions of torch and
the default dtype of the whole process: what another thread creates would end up on `meta` or in another dtype.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from simpletuner.config.schema import CachingConfig
from simpletuner.data.sampler import PlannedBatch, Sampler
from simpletuner.diffusion.batch import Batch

ReadBatch = Callable[[PlannedBatch], Batch]
Item = TypeVar("Item")
Result = TypeVar("Result")


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
    _supply: Generator[Batch] | None = None

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
        return self.epoch if self.index >= self.sampler.batches_per_epoch(self.epoch) else self.epoch - 1

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
            self._supply.close()  # ends its background thread
            self._supply = None

    def _read_epoch(self) -> Generator[Batch]:
        """The rest of the current epoch."""
        self.prepare_epoch(self.epoch)
        batches, before = self.sampler.batches(self.epoch), self.count - self.index

        def make(index: int) -> Batch:
            # Planned here, by the reading thread.
            batch = self.complete(self.read(batches[index]), before + index)
            return batch.pin_memory() if self.pin and torch.cuda.is_available() else batch

        # One batch even without prefetching, so that reading overlaps with the step.
        ahead = self.config.dataloader_prefetch_qlen if self.config.dataloader_prefetch else 1
        return read_ahead(range(self.index, len(batches)), make, ahead)


@dataclass(frozen=True)
class Errands:
    """The calls that a reading thread leaves to the loop's thread.

    Attributes:
        asked: calls; None where another item is done.
        answered: their results; None once the loop has ended.
    """

    asked: SimpleQueue[Callable[[], Any] | None] = field(default_factory=SimpleQueue)
    answered: SimpleQueue[Future[Any] | None] = field(default_factory=SimpleQueue)


# Of this thread; None unless it reads ahead.
_ERRANDS: ContextVar[Errands | None] = ContextVar("errands", default=None)


def read_ahead(items: Iterable[Item], make: Callable[[Item], Result], ahead: int) -> Generator[Result]:
    """Yield `make(item)` for every item, in order; a background thread works up to `ahead` items in advance."""
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    errands = Errands()

    def begin() -> None:
        _ERRANDS.set(errands)
        if gpu is not None:  # a thread starts with the first, where locking pages would take memory
            torch.cuda.set_device(gpu)

    def start(item: Item) -> Future[Result]:
        made = reader.submit(make, item)
        made.add_done_callback(lambda _: errands.asked.put(None))
        return made

    rest, waiting = iter(items), deque[Future[Result]]()
    with ThreadPoolExecutor(1, "batch-reader", begin) as reader:
        try:
            # Beside those in front, the one that is being made.
            waiting.extend(map(start, islice(rest, ahead + 1)))
            while waiting:
                for call in iter(errands.asked.get, None):
                    errands.answered.put(_run(call))
                made = waiting.popleft().result()
                waiting.extend(map(start, islice(rest, 1)))
                yield made
        finally:
            # First, and in C: a second Ctrl-C may come at any call in Python, and the thread must end all the same.
            errands.answered.put(None)
            reader.shutdown(wait=False, cancel_futures=True)


def _run(call: Callable[[], Any]) -> Future[Any]:
    result = Future[Any]()
    try:
        result.set_result(call())
    except BaseException as error:  # noqa: BLE001 - passed to the reading thread, which raises it
        result.set_exception(error)
    return result


def in_loop(call: Callable[[], Result]) -> Result:
    """The result of a call that the loop's thread makes: at once, or when it asks for the batch that is read here."""
    errands = _ERRANDS.get()
    if errands is None:
        return call()
    errands.asked.put(call)
    made: Future[Result] | None = errands.answered.get()
    if made is None:
        errands.answered.put(None)  # for the item that is read next
        raise CancelledError
    return made.result()
