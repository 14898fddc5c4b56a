"""A test whose processes hang fails soon, and says where each of them stands."""

from __future__ import annotations

import time

import pytest

from simpletuner.distributed.world import World
from tests.tools.processes import run_together


def wait_for_the_other(world: World) -> None:
    if world.rank == 0:
        wait_in_vain()


def wait_in_vain() -> None:
    time.sleep(600)


def compute(world: World) -> None:
    end = time.process_time() + 0.7
    while time.process_time() < end:
        pass


def test_processes_that_hang_fail_with_the_place_where_each_stands() -> None:
    with pytest.raises(AssertionError) as raised:
        run_together(2, wait_for_the_other, stall_seconds=0.2)

    message = str(raised.value)
    assert "The processes have used next to no CPU time for" in message
    assert "Rank 0 stands here:" in message
    assert "in wait_in_vain" in message
    assert "Rank 1 has ended with exit code 0." in message


def test_processes_that_compute_may_take_their_time() -> None:
    run_together(2, compute, stall_seconds=0.5)
