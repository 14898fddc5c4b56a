"""Work between steps that is split among the processes: filling caches, evaluation, previews.

No process waits in a collective, which would time out before the slowest process is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from simpletuner.data.entries import ProgressBar
from simpletuner.distributed.requests import Stop
from simpletuner.distributed.world import World
from simpletuner.errors import Interrupted
from simpletuner.reporting.events import EventStream, PhaseStarted, RunningPhase

Item = TypeVar("Item")
Result = TypeVar("Result")
POLL_SECONDS = 0.1


@dataclass
class FinishedPart(Generic[Result]):
    """What a process has done of the work.

    Attributes:
        results: in order.
        is_complete: False if a stop request interrupted it.
    """

    results: list[Result] = field(default_factory=list)
    is_complete: bool = False


@dataclass
class SharedPhase:
    """A phase that reports the progress of all processes.

    Attributes:
        count: see `World.counters`.
    """

    phase: RunningPhase
    count: Callable[[str, int], int]

    def advance(self, count: int = 1, note: str = "") -> None:
        """Report `count` more finished units in this process."""
        total = self.count("done", count)
        self.phase.advance(total - self.phase.done, note)

    def wait(self, size: int) -> None:
        """Report the progress of other processes until all have finished.

        Stop requests are forwarded to them.
        """
        finished = self.count("finished", 1)
        while True:
            # Even if this process is the last: the shared counter has advanced since.
            with suppress(Interrupted):
                self.advance(0)
            if finished >= size:
                return
            time.sleep(POLL_SECONDS)
            finished = self.count("finished", 0)

    def run(
        self, world: World, work: Callable[[ProgressBar], Iterable[Result]]
    ) -> list[FinishedPart[Result]]:
        """Do this process's part and wait for the others. Collective.

        Returns:
            the parts of all processes, by rank.
        """
        part = FinishedPart[Result]()
        with suppress(Interrupted):
            for result in work(self):  # one by one, to keep the results before an interruption
                part.results.append(result)
            part.is_complete = True
        self.wait(world.size)
        return world.gather(part)


def share_items(
    world: World,
    events: EventStream,
    phase: PhaseStarted,
    items: Sequence[Item],
    work: Callable[[Sequence[Item], ProgressBar], Iterable[Result]],
    *,
    in_lockstep: bool = False,
) -> Generator[Result]:
    """Split a list among the processes, and wait for all of them.

    The main process reports the phase.

    Args:
        phase: its total counts the work of all processes.
        work: returns one result for each of its items, in order.
        in_lockstep: all processes do all of the work together, step by step, instead of splitting
            it.

    Yields:
        the results of all items, in their order, on every process; with a single process, as soon
        as they are ready.

    Raises:
        Interrupted: a process was asked to stop. Raised in all processes, after the results so far.
    """
    if in_lockstep or _is_alone(world):
        with _undivided(world, events, phase) as bar:
            yield from work(items, bar)
        return
    with _divided(world, events, phase) as shared:
        parts = shared.run(world, partial(work, world.share(items)))
        yield from _in_order(parts)
        _stop_if_interrupted(events, parts)


def share_work(
    world: World, events: EventStream, phase: PhaseStarted, work: Callable[[ProgressBar], Result]
) -> list[Result]:
    """Do this process's part of some work, and wait for all other parts.

    The main process reports the phase.

    Args:
        phase: its total counts the work of all processes.
        work: does this process's part.

    Returns:
        the results of all processes, by rank.

    Raises:
        Interrupted: a process was asked to stop. Raised in all processes.
    """
    if _is_alone(world):
        with _undivided(world, events, phase) as bar:
            return [work(bar)]
    with _divided(world, events, phase) as shared:
        parts = shared.run(world, lambda bar: [work(bar)])
        _stop_if_interrupted(events, parts)
        return [part.results[0] for part in parts]


def _is_alone(world: World) -> bool:
    """Whether there are no other processes to share work with."""
    return world.size == 1


@contextmanager
def _undivided(world: World, events: EventStream, phase: PhaseStarted) -> Iterator[RunningPhase]:
    """A phase in which every process does all of the work, and all stop at the same place."""
    stop = Stop(partial(_agree, world, events.stop))
    with EventStream(events.publish, stop=stop).phase(**vars(phase)) as running:
        yield running


def _agree(world: World, stop: Stop) -> bool:
    """Whether any process was asked to stop; all processes get the same answer. Collective."""
    is_agreed = world.any(stop.is_due())
    if is_agreed:
        stop.request()
    return is_agreed  # not `is_due`: the watch may have received a request since


@contextmanager
def _divided(world: World, events: EventStream, phase: PhaseStarted) -> Iterator[SharedPhase]:
    """A phase in which every process does its part."""
    stop = Stop()
    with EventStream(events.publish, stop=stop).phase(**vars(phase)) as running:
        # Only now, since all processes must enter the phase, even if one has just been asked to
        # stop.
        stop.add_source(events.stop.is_due)
        yield SharedPhase(running, world.counters())


def _in_order(parts: Sequence[FinishedPart[Result]]) -> Iterator[Result]:
    """The results in the order of the items, of which the processes took turns.

    Interrupted parts are shorter.
    """
    for position in range(max(len(part.results) for part in parts)):
        for part in parts:
            if position < len(part.results):
                yield part.results[position]


def _stop_if_interrupted(events: EventStream, parts: Sequence[FinishedPart[Result]]) -> None:
    """Stop this process, too, if another one was asked to stop.

    Raises:
        Interrupted: a part is not complete.
    """
    if not all(part.is_complete for part in parts):
        events.stop.request()
        events.stop.check()
