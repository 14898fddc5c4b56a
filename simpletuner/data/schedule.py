"""The lengths of epochs, from the windows in which datasets take part.

A run of 400,000 steps may have thousands of epochs, but its windows have few edges. Between two
edges all epochs have the same length, so only an epoch that an edge divides has to be planned to be
counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from simpletuner.data.dataset import Dataset

FOREVER = sys.maxsize  # number of an epoch or micro-batch that no run reaches


@dataclass(frozen=True)
class Origin:
    """Where in a run its data begins: in a continued run, the epoch of the checkpoint.

    Attributes:
        epoch: counted from 1.
        batches: micro-batches of the run before this epoch.
    """

    epoch: int = 1
    batches: int = 0


@dataclass(frozen=True)
class Stretch:
    """Consecutive epochs of the same length.

    Attributes:
        epochs: their numbers.
        before: micro-batches of the run before the first of them.
        length: micro-batches of each epoch; 0 if no dataset takes part in it.
    """

    epochs: range
    before: int
    length: int

    @property
    def after(self) -> int:
        """Micro-batches of the run up to the end of the last of these epochs."""
        return self.before + len(self.epochs) * self.length

    def before_epoch(self, epoch: int) -> int:
        """Micro-batches of the run before one of these epochs."""
        return self.before + (epoch - self.epochs.start) * self.length


@dataclass(eq=False)
class Schedule:
    """The lengths of the epochs of a run.

    Attributes:
        datasets: those with a probability above 0.
        origin: where the data begins.
        accumulation: micro-batches per optimizer step, which the windows count.
        count: (dataset, epoch) -> micro-batches of an epoch within the dataset's window.
        plan: (epoch, micro-batches of the run before it) -> micro-batches of an epoch that an edge
            divides.
    """

    datasets: Sequence[Dataset]
    origin: Origin
    accumulation: int
    count: Callable[[Dataset, int], int]
    plan: Callable[[int, int], int]
    _known: list[Stretch] = field(default_factory=list, init=False)

    @property
    def has_step_windows(self) -> bool:
        return any(has_step_window(dataset) for dataset in self.datasets)

    @property
    def has_windows(self) -> bool:
        """Whether a dataset takes part in some steps or epochs only."""
        if self.has_step_windows:
            return True
        always = range(1, FOREVER)
        return any(epochs_of(dataset) != always for dataset in self.datasets)

    def step_at(self, batches: int) -> int:
        """The step, counted from 1, that follows so many micro-batches of the run."""
        return batches // self.accumulation + 1

    def active(self, epoch: int) -> list[Dataset]:
        """The datasets with this epoch in their window of epochs."""
        return [dataset for dataset in self.datasets if epoch in epochs_of(dataset)]

    def stretches(self) -> Iterator[Stretch]:
        """All epochs from the origin on, up to the first in which no dataset takes part."""
        index = 0
        while index == 0 or self._known[index - 1].length > 0:
            if index == len(self._known):
                self._known.append(self._next_stretch())
            yield self._known[index]
            index += 1

    def length(self, epoch: int) -> int:
        """Micro-batches of an epoch; 0 if no dataset takes part in it or in an earlier epoch."""
        if not self.has_step_windows:  # the epochs before do not matter
            return sum(self.count(dataset, epoch) for dataset in self.active(epoch))
        stretch = self._stretch_with(epoch)
        if stretch is None:
            return 0
        return stretch.length

    def before(self, epoch: int) -> int:
        """Micro-batches of the run before an epoch."""
        stretch = self._stretch_with(epoch)
        if stretch is not None:
            return stretch.before_epoch(epoch)
        if epoch < self.origin.epoch:
            return self.origin.batches
        return self._known[-1].after

    def epoch_after(self, batches: int) -> int:
        """The epoch of the micro-batch that follows so many micro-batches of the run.

        Without windows it counts with the length of the first epoch: with random aspects, which
        change the length of every epoch, it would take minutes to count them all.
        """
        if not self.has_windows:
            after_origin = max(0, batches - self.origin.batches)
            return self.origin.epoch + after_origin // self.length(self.origin.epoch)
        for stretch in self.stretches():
            if stretch.length == 0:
                return stretch.epochs.start
            if batches < stretch.after:
                after_start = max(0, batches - stretch.before)
                return stretch.epochs.start + after_start // stretch.length
        raise AssertionError("schedules end with an empty epoch or never")

    def gap(self, *, batches: int = FOREVER, epochs: int = FOREVER) -> Stretch | None:
        """The first epoch without a dataset in a run of so many micro-batches and epochs."""
        if not self.has_windows:
            return None
        for stretch in self.stretches():
            if stretch.epochs.start > epochs or stretch.before >= batches:
                return None
            if stretch.length == 0:
                return stretch
        return None

    def takes_part(self, dataset: Dataset, batches: int) -> bool:
        """Whether a dataset takes part in the run before so many micro-batches are trained."""
        for stretch in self.stretches():
            if stretch.before >= batches or stretch.length == 0:
                return False
            # All epochs of a stretch lie on the same side of the edges of windows of epochs.
            if stretch.epochs.start not in epochs_of(dataset):
                continue
            first = self.step_at(stretch.before)
            last = self.step_at(min(stretch.after, batches) - 1)
            steps = steps_of(dataset)
            if first < steps.stop and steps.start <= last:
                return True
        return False

    def _stretch_with(self, epoch: int) -> Stretch | None:
        if epoch < self.origin.epoch:
            return None
        for stretch in self.stretches():
            if epoch in stretch.epochs:
                return stretch
        return None

    def _next_stretch(self) -> Stretch:
        """The epochs after the known ones, up to an edge that may change their length."""
        epoch = self.origin.epoch
        before = self.origin.batches
        if self._known:
            epoch = self._known[-1].epochs.stop
            before = self._known[-1].after
        active = self.active(epoch)
        step = self.step_at(before)
        ready = [dataset for dataset in active if step in steps_of(dataset)]
        if not ready:  # even if a dataset is waiting for its start_step: an epoch never stalls
            return Stretch(range(epoch, epoch + 1), before, 0)
        length = sum(self.count(dataset, epoch) for dataset in ready)
        undivided = (self._next_step_edge(active, step) - before) // length
        if undivided == 0:  # an edge lies within the next epoch
            return Stretch(range(epoch, epoch + 1), before, self.plan(epoch, before))
        if any(has_random_aspects(dataset) for dataset in ready):  # every epoch has its own length
            undivided = 1
        stop = min(epoch + undivided, self._next_epoch_edge(epoch), FOREVER)
        return Stretch(range(epoch, stop), before, length)

    def _next_step_edge(self, active: Sequence[Dataset], step: int) -> int:
        """The micro-batch of the run at which the next window of these datasets opens or closes."""
        edge = _next_edge([steps_of(dataset) for dataset in active], step)
        if edge == FOREVER:
            return FOREVER
        return (edge - 1) * self.accumulation

    def _next_epoch_edge(self, epoch: int) -> int:
        return _next_edge([epochs_of(dataset) for dataset in self.datasets], epoch)


def _next_edge(windows: Sequence[range], number: int) -> int:
    """The first number after this one at which a window opens or has closed, or `FOREVER`."""
    first = FOREVER
    for window in windows:
        for edge in (window.start, window.stop):
            if edge > number:
                first = min(first, edge)
    return first


def epochs_of(dataset: Dataset) -> range:
    """The epochs in which a dataset takes part."""
    config = dataset.config
    stop = FOREVER if config.end_epoch is None else config.end_epoch + 1
    return range(config.start_epoch, stop)


def steps_of(dataset: Dataset) -> range:
    """The optimizer steps, counted from 1, in which a dataset takes part."""
    config = dataset.config
    stop = FOREVER if config.end_step is None else config.end_step + 1
    return range(max(config.start_step, 1), stop)


def has_random_aspects(dataset: Dataset) -> bool:
    """Whether every epoch has other buckets, and so perhaps another number of batches."""
    return dataset.changes_each_epoch and dataset.config.crop_aspect == "random"


def has_step_window(dataset: Dataset) -> bool:
    """Whether a dataset takes part in some steps only."""
    return dataset.config.start_step > 1 or dataset.config.end_step is not None
