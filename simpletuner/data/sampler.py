"""The order of samples: a pure function of the seed and the epoch.

No generator keeps state, so a run that is interrupted and resumed any number of times sees the same
batches as an uninterrupted one. `loader.BatchLoader` keeps the position: epoch and index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from random import Random
from typing import Literal

from simpletuner.config.types import Size
from simpletuner.data.chance import fraction, generator
from simpletuner.data.dataset import Dataset
from simpletuner.data.sample import Sample
from simpletuner.data.schedule import Origin, Schedule, has_step_window, steps_of
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.rounding import ceil_div

# Sides of a slider, in the order in which their batches alternate; without sliders every dataset is
# neutral.
POSITIVE, NEGATIVE, NEUTRAL = range(3)
SIDES = 3

Sampling = Literal["auto-weighting", "uniform"]


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """One micro-batch of one process.

    Attributes:
        epoch: counted from 1.
        index: position in the epoch, counted from 0.
        dataset_id, bucket, size: common to all samples; size is width and height in pixels.
        samples: the samples, in order.
        captions: the caption drawn for each sample.
        slots: positions of the samples in the global batch, which seed the random draws of the
            samples.
    """

    epoch: int
    index: int
    dataset_id: str
    bucket: str
    size: Size
    samples: tuple[Sample, ...]
    captions: tuple[str, ...]
    slots: range


@dataclass(frozen=True, eq=False)
class Epoch(Sequence[PlannedBatch]):
    """The batches of an epoch, planned lazily.

    Attributes:
        groups: dataset and samples of each global batch.
        plan: (dataset, samples, index) -> this process's share.
    """

    groups: Sequence[tuple[str, list[Sample]]]
    plan: Callable[[str, list[Sample], int], PlannedBatch]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> PlannedBatch:  # type: ignore[override]  # nobody needs slices
        # `range` normalises a negative index.
        return self.plan(*self.groups[index], range(len(self))[index])


@dataclass(eq=False)
class Sampler:
    """Plans batches of one shape each.

    An epoch ends after every sample has been seen `repeats` + 1 times.

    Attributes:
        datasets: the datasets to train on; those with probability 0 are dropped.
        seed: seed of the run.
        sampling: auto-weighting draws the next batch's dataset by remaining size x probability,
            uniform by probability alone.
        accumulation: micro-batches per optimizer step, for datasets with a window of steps.
        world: the processes that train together. A global batch has `world.size` shares of the same
            shape, one per process.
        origin: where in the run the data begins, for windows of steps.
    """

    datasets: Sequence[Dataset]
    seed: int
    sampling: Sampling = "auto-weighting"
    accumulation: int = 1
    world: World = field(default_factory=World)
    origin: Origin = field(default_factory=Origin)
    _batches: dict[int, Epoch] = field(default_factory=dict, init=False)
    _lengths: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.datasets = [dataset for dataset in self.datasets if dataset.config.probability > 0]

    @cached_property
    def schedule(self) -> Schedule:
        """The lengths of all epochs."""

        def planned(epoch: int, before: int) -> int:
            return len(self._plan(epoch, before))

        return Schedule(self.datasets, self.origin, self.accumulation, self._group_count, planned)

    def batches_per_epoch(self, epoch: int) -> int:
        """Number of batches this process gets in an epoch; 0 if no dataset takes part in it."""
        if epoch not in self._lengths:
            self._lengths[epoch] = self.schedule.length(epoch)
        return self._lengths[epoch]

    def batches(self, epoch: int) -> Epoch:
        """All batches of an epoch, in order.

        Raises:
            UserError: no dataset takes part in it.
        """
        if epoch not in self._batches:
            # Windows count steps of the whole run, so earlier epochs count too.
            before = 0
            if self.schedule.has_step_windows:
                before = self.schedule.before(epoch)
            planned = self._plan(epoch, before)
            if not planned:
                raise UserError(
                    f"no dataset takes part in epoch {epoch}: see start_epoch, end_epoch and "
                    "their steps."
                )
            # Only one epoch is kept; planning it again is cheap enough.
            self._batches = {epoch: Epoch(planned, partial(self._batch, epoch))}
        return self._batches[epoch]

    def _plan(self, epoch: int, before: int) -> list[tuple[str, list[Sample]]]:
        """Dataset and samples of each global batch of an epoch.

        Args:
            before: batches of the run before the epoch.
        """
        active = self.schedule.active(epoch)
        queues = [
            _Queue(dataset, self._groups(dataset.at_epoch(epoch), epoch)) for dataset in active
        ]
        if len(queues) == 1 and not has_step_window(active[0]):
            # Queues are popped from the end, and a single queue needs no draw.
            return [(active[0].id, group) for group in reversed(queues[0].groups)]
        random = generator(self.seed, epoch, "datasets")
        batches: list[tuple[str, list[Sample]]] = []
        side = NEUTRAL
        while True:
            step = self.schedule.step_at(before + len(batches))
            ready = [queue for queue in queues if queue.groups and step in steps_of(queue.dataset)]
            if not ready:  # even if a dataset is waiting for its start_step: an epoch never stalls
                break
            ready = next_side(ready, side)
            queue = ready[0]
            if len(ready) > 1:
                queue = random.choices(ready, self._weights(ready))[0]
            side = queue.side
            batches.append((queue.dataset.id, queue.groups.pop()))
        return batches

    def _group_count(self, dataset: Dataset, epoch: int) -> int:
        """Number of groups from `_groups`.

        It depends on the epoch only if random aspects change the buckets.
        """
        if dataset.config.crop_aspect == "random":
            dataset = dataset.at_epoch(epoch)
        size = self._global_size(dataset)
        # `shuffled_passes` pads every bucket to whole batches.
        passes = dataset.repeats + 1
        return sum(ceil_div(len(samples) * passes, size) for samples in dataset.buckets.values())

    def _global_size(self, dataset: Dataset) -> int:
        """Samples per global batch."""
        return dataset.batch_size * self.world.size

    def _weights(self, queues: Sequence[_Queue]) -> list[float]:
        """Weights of the draw of the next batch's dataset, see `sampling`."""
        if self.sampling == "uniform":
            return [queue.dataset.config.probability for queue in queues]
        return [queue.dataset.config.probability * queue.remaining for queue in queues]

    def _groups(self, dataset: Dataset, epoch: int) -> list[list[Sample]]:
        """The global batches of a dataset in an epoch, each from one bucket."""
        size = self._global_size(dataset)
        groups = []
        # One generator per bucket, so that its order does not depend on the other buckets.
        for label, samples in dataset.buckets.items():
            random = generator(self.seed, epoch, dataset.id, label)
            order = shuffled_passes(samples, dataset.repeats + 1, size, random)
            groups += [order[start : start + size] for start in range(0, len(order), size)]
        generator(self.seed, epoch, dataset.id, "batches").shuffle(groups)
        return groups

    def _batch(
        self, epoch: int, dataset_id: str, group: Sequence[Sample], index: int
    ) -> PlannedBatch:
        """This process's share of a group."""
        slots = self.world.slots(len(group) // self.world.size)
        samples = tuple(group[slots.start : slots.stop])
        captions: list[str] = []
        for slot, sample in zip(slots, samples, strict=True):
            # By the position in the global batch, so that captions do not depend on the number of
            # processes.
            draw = fraction(self.seed, epoch, index, slot, "caption")
            captions.append(sample.captions[int(draw * len(sample.captions))])
        geometry = samples[0].geometry
        return PlannedBatch(
            epoch=epoch,
            index=index,
            dataset_id=dataset_id,
            bucket=geometry.bucket,
            size=geometry.size,
            samples=samples,
            captions=tuple(captions),
            slots=slots,
        )


@dataclass
class _Queue:
    """The remaining groups of a dataset in an epoch; the next group is last."""

    dataset: Dataset
    groups: list[list[Sample]]

    @property
    def remaining(self) -> int:
        """Number of remaining samples."""
        return len(self.groups) * len(self.groups[0])

    @property
    def side(self) -> int:
        """The dataset's side of a slider."""
        strength = self.dataset.config.slider_strength or 0
        if strength > 0:
            return POSITIVE
        if strength < 0:
            return NEGATIVE
        return NEUTRAL


def next_side(ready: Sequence[_Queue], last: int) -> list[_Queue]:
    """The queues of the side after `last`; a side without queues is skipped."""
    # Turns to wait: 0 for the side that is due, 2 for the side used last.
    turns = [(queue.side - last - 1) % SIDES for queue in ready]
    first = min(turns)
    return [queue for queue, turn in zip(ready, turns, strict=True) if turn == first]


def shuffled_passes(
    samples: Sequence[Sample], times: int, batch: int, random: Random
) -> list[Sample]:
    """Every sample `times` times, in shuffled passes, padded to whole batches.

    No batch holds a sample twice, not even across passes, unless the bucket is smaller than a
    batch.
    """
    order: list[Sample] = []
    for _ in range(times):
        order += _next_pass(samples, order, batch, random)
    # Loops more than once only for buckets smaller than a batch.
    while len(order) % batch:
        missing = batch - len(order) % batch
        order += _next_pass(samples, order, batch, random)[:missing]
    return order


def _next_pass(
    samples: Sequence[Sample], order: Sequence[Sample], batch: int, random: Random
) -> list[Sample]:
    """A shuffled pass that starts with samples that are not in the unfinished batch."""
    shuffled = random.sample(samples, len(samples))
    begun = len(order) % batch  # samples in the unfinished batch
    present = {sample.name for sample in order[len(order) - begun :]}
    absent = [sample for sample in shuffled if sample.name not in present]
    head = absent[: batch - begun]
    chosen = {sample.name for sample in head}
    return head + [sample for sample in shuffled if sample.name not in chosen]
