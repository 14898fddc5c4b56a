"""Work between steps that is split among the processes: filling caches, evaluation, previews.

No process waits in a collective, which would time out before the slowest process is done.
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
# (index, result); indices order the results of all processes.
Results = Generator[tuple[Any, Value]]
Work = Callable[[ProgressBar], Iterable[tuple[Any, Value]]]
POLL_SECONDS = 0.1


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
        self.phase.advance(self.count("done", count) - self.phase.done, note)

    def wait(self, size: int) -> None:
        """Report the progress of other processes until all have finished; forwards stop requests to them."""
        finished = self.count("finished", 1)
        while True:
            with suppress(Interrupted):
                self.advance(0)  # even if this process is the last: the shared counter has advanced since
            if finished >= size:
                return
            time.sleep(POLL_SECONDS)
            finished = self.count("finished", 0)


def share_work(
    world: World, events: EventStream, phase: PhaseStarted, work: Work[Value], *, in_lockstep: bool = False
) -> Results[Value]:
    """Do this process's part of some work, and wait for all other parts; the main process reports the phase.

    Args:
        phase: its total counts the work of all processes.
        work: does this process's part.
        in_lockstep: all processes do all of the work together, step by step, instead of splitting it.

    Yields:
        the results of all processes, in order, on every process; with a single process, as soon as they are ready.

    Raises:
        Interrupted: a process was asked to stop. Raised in all processes, after the results so far.
    """
    undivided = in_lockstep or world.size == 1
    stop = Stop(partial(_agree, world, events.stop)) if undivided else Stop()
    shown = EventStream(events.publish, stop=stop)
    with shown.phase(**vars(phase)) as running:  # entered by all processes, even if one has just been asked to stop
        if undivided:
            yield from work(running)
            return
        # Parts may be interrupted at different times: `_divide` waits for all of them at its end.
        stop.look_at(events.stop.is_due)
        yield from _divide(world, SharedPhase(running, world.counters()), events, work)


def _agree(world: World, stop: Stop) -> bool:
    """Whether any process was asked to stop; all processes get the same answer. Collective."""
    is_agreed = world.any(stop.is_due())
    if is_agreed:
        stop.request()
    return is_agreed  # not `is_due`: the watch may have received a request since


def _divide(world: World, phase: SharedPhase, events: EventStream, work: Work[Value]) -> Results[Value]:
    results: list[tuple[Any, Value]] = []
    finished = False
    with suppress(Interrupted):
        for result in work(phase):  # one by one, to keep the results before an interruption
            results.append(result)
        finished = True
    phase.wait(world.size)
    shares = world.gather((finished, results))
    yield from sorted((result for _, results in shares for result in results), key=itemgetter(0))
    if not all(finished for finished, _ in shares):
        events.stop.request()
        events.stop.check()
