"""Processes agree, and a process alone asks nobody."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from simpletuner.world import World, launched_sizes

RANK = """
import json, sys
from simpletuner.world import connect
rank, folder = int(sys.argv[1]), sys.argv[2]
with connect(rank, 2, f"file://{folder}/meeting") as world:
    world.barrier()
    print(json.dumps({
        "any": [world.any(rank == 1), world.any(False)],
        "mean": world.mean([float(rank), 0.1]),
        "broadcast": world.broadcast({"seed": 5 + rank}),
        "gather": world.gather("ab"[rank]),
        "slots": list(world.slots(3)),
        "main": world.is_main,
    }))
    if rank == 0:
        open(f"{folder}/written", "w").close()
    world.barrier()
    assert open(f"{folder}/written").read() == ""
"""


def test_two_processes_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(RANK)]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    outputs = [each.communicate(timeout=60)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0]
    common = '{"any": [true, false], "mean": [0.5, 0.1], "broadcast": {"seed": 5}, "gather": ["a", "b"], '
    assert outputs[0] == common + '"slots": [0, 1, 2], "main": true}\n'
    assert outputs[1] == common + '"slots": [3, 4, 5], "main": false}\n'


def test_one_process_asks_nobody() -> None:
    world = World()
    assert (world.is_main, world.any(True), world.any(False), world.mean([1.5, 2.0])) == (True, True, False, [1.5, 2.0])
    assert world.broadcast("x") == "x"
    world.barrier()
    with pytest.raises(RuntimeError, match="not connected"):
        World(1, 2).barrier()


def test_what_launchers_say() -> None:
    assert launched_sizes({"WORLD_SIZE": "1", "PMI_SIZE": "", "RANK": "3"}) == {}
    assert launched_sizes({"WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "x"}) == {
        "WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "x",
    }  # fmt: skip
