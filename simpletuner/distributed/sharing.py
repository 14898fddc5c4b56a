"""Work between the steps that the processes divide among themselves: filling caches, evaluation, previews.

No process waits in a collective, which would time out before the slowest one is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from simpletuner.data.entries import ProgressBar
from simpletuner.distributed.requests import Stop
from simpletuner.distributed.world import World
from simpletuner.errors import Interrupted
from simpletuner.reporting.events import EventStream, PhaseStarted, RunningPhase

Value = TypeVar("Value")
# Results with their indices, which order those of all processes.
Results = Generator[tuple[Any, Value]]
Work = Callable[[ProgressBar], Iterable[tuple[Any, Value]]]
POLL_SECONDS = 0.1


@dataclass
class SharedPhase:
    """A phase that shows what all processes have done.

    Attributes:
        count: see `World.counters`.
    """

    phase: RunningPhase
    count: Callable[[str, int], int]

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more units are done here."""
        self.phase.advance(self.count("done", count) - self.phase.done, note)

    def wait(self, size: int) -> None:
        """Show what the others do until all have finished; a request to stop reaches them as it reached this one."""
        finished = self.count("finished", 1)
        while True:
            with suppress(Interrupted):
                self.advance(0)  # also when this process is the last: others have advanced since it last looked
            if finished >= size:
                return
            time.sleep(POLL_SECONDS)
            finished = self.count("finished", 0)


def share_work(
    world: World, events: EventStream, phase: PhaseStarted, work: Work[Value], *, in_lockstep: bool = False
) -> Results[Value]:
    """Do this process's part of some work, and wait for the others'; the main process shows the whole as a phase.

    Args:
        phase: its total is that of all processes.
        work: does this process's part.
        in_lockstep: the processes do all of the work together, step by step, instead of a part each.

    Yields:
        the results of all processes, on each of them in order; those of a process alone at once.

    Raises:
        Interrupted: a process was asked to stop. Raised on all of them, after the results so far.
    """
    undivided = in_lockstep or world.size == 1
    stop = Stop(partial(_agree, world, events.stop)) if undivided else Stop()
    shown = EventStream(events.publish, stop=stop)
    with shown.phase(**vars(phase)) as running:  # on all of them, whatever one is asked for now
        if undivided:
            yield from work(running)
            return
        # The parts may be cut short at different moments: `_divide` waits for all of them at its end.
        stop.look_at(events.stop.is_due)
        yield from _divide(world, SharedPhase(running, world.counters()), events, work)


def _agree(world: World, stop: Stop) -> bool:
    """Whether a process was asked to stop; they ask each other at the same moment."""
    is_agreed = world.any(stop.is_due())
    if is_agreed:
        stop.request()
    return is_agreed  # not what the watch may meanwhile have heard of


def _divide(world: World, phase: SharedPhase, events: EventStream, work: Work[Value]) -> Results[Value]:
    results: list[tuple[Any, Value]] = []
    finished = False
    with suppress(Interrupted):
        for result in work(phase):  # one by one: those before an interruption count
            results.append(result)
        finished = True
    phase.wait(world.size)
    shares = world.gather((finished, results))
    yield from sorted((each for _, found in shares for each in found), key=itemgetter(0))
    if not all(finished for finished, _ in shares):
        events.stop.request()
        events.stop.check()
