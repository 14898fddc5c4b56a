"""Processes exchange values and fail together; a single process does not communicate."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.annexes.processes.group import refuse_shared_gpus
from simpletuner.annexes.processes.joining import (
    NotJoinedError,
    connect,
    first_host,
    open_store,
    set_rendezvous,
    take_device,
)
from simpletuner.annexes.processes.watch import GONE, EndReporter
from simpletuner.distributed.world import World, world_from_launcher
from simpletuner.errors import UserError
from tests.tools.forks import fork
from tests.tools.processes import finish
from tests.tools.reports import found_by


def in_two_processes(work: Callable[..., None], *arguments: object) -> list[int | None]:
    """`work(rank, *arguments)` in each of two; returns their exit codes."""
    return finish([fork(work, rank, *arguments) for rank in range(2)])


def agree(rank: int, folder: Path) -> None:
    with connect(World(rank, 2), f"file://{folder}/meeting") as world:
        world.barrier()
        values = {
            "any": [world.any(rank == 1), world.any(False)],
            "mean": world.mean([float(rank), 0.1]),
            "broadcast": world.broadcast({"seed": 5 + rank}),
            "gather": world.gather("ab"[rank]),
            "slots": list(world.slots(3)),
            "main": world.main_only(lambda: "here"),
            "on main": world.on_main(lambda: f"from {rank}"),
            "leaders": world.place_among_leaders(),
            "names": [world.unique_name("step-3"), world.label],
        }
        (folder / f"{rank}.json").write_text(json.dumps(values))
        if rank == 0:
            (folder / "written").touch()
        world.barrier()
        assert (folder / "written").exists()


@pytest.mark.slow
def test_two_processes_exchange_values(tmp_path: Path) -> None:
    assert in_two_processes(agree, tmp_path) == [0, 0]

    values = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    common = {
        "any": [True, False],
        "mean": [0.5, 0.1],
        "broadcast": {"seed": 5},
        "gather": ["a", "b"],
    }
    assert values == [
        {
            **common,
            "on main": "from 0",
            "slots": [0, 1, 2],
            "main": "here",
            "leaders": [0, 2],
            "names": ["step-3", "[0] "],
        },
        {
            **common,
            "on main": "from 0",
            "slots": [3, 4, 5],
            "main": None,
            "leaders": [1, 2],
            "names": ["step-3-process-1", "[1] "],
        },
    ]


class WorldOfFour(World):
    """The first of four processes, of which the others use known GPUs."""

    def gather(self, value: Any) -> list[Any]:
        return [value, "GPU-b", value, ""]


def test_two_processes_do_not_share_a_gpu() -> None:
    with pytest.raises(UserError, match="Processes 0, 2 share GPUs; each needs its own"):
        refuse_shared_gpus(WorldOfFour(0, 4), "GPU-a")
    refuse_shared_gpus(WorldOfFour(0, 4), "")  # on the CPU


@dataclass
class FileReporter(EndReporter):
    """Writes why this process ends into a file."""

    file: Path

    def on_ended(self, message: str, code: int) -> None:
        self.file.write_text(f"{message} {code}")


class KilledReporter(EndReporter):
    """Kills this process as soon as it has joined."""

    def on_joined(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def die_early(rank: int, folder: Path) -> None:
    reporter = KilledReporter() if rank == 1 else FileReporter(folder / f"{rank}.txt")
    with connect(World(rank, 2), f"file://{folder}/meeting", reporter=reporter):
        pass


def test_a_process_killed_while_connecting_is_reported(tmp_path: Path) -> None:
    assert in_two_processes(die_early, tmp_path) == [1, -signal.SIGKILL]
    assert (tmp_path / "0.txt").read_text() == f"Process 1 on {socket.gethostname()} {GONE}. 1"


def fail_early(rank: int, folder: Path) -> None:
    def busy() -> bool:
        raise RuntimeError(
            "CUDA error: all CUDA-capable devices are busy or unavailable\nCompile with ..."
        )

    if rank == 1:
        torch.cuda.is_available = busy
    with connect(
        World(rank, 2), f"file://{folder}/meeting", reporter=FileReporter(folder / f"{rank}.txt")
    ):
        pass


@pytest.mark.slow(4)
def test_a_process_failing_while_connecting_is_reported(tmp_path: Path) -> None:
    assert in_two_processes(fail_early, tmp_path) == [1, 1]

    reason = "cannot join the others: CUDA error: all CUDA-capable devices are busy or unavailable"
    assert (tmp_path / "0.txt").read_text() == f"Process 1 on {socket.gethostname()} {reason} 1"


def hang(rank: int, folder: Path, where: str) -> None:
    reporter = FileReporter(folder / f"{rank}.txt")
    with connect(World(rank, 2), f"file://{folder}/meeting", reporter=reporter) as world:
        world.barrier()
        world.watch.limit = 1.0
        if rank == 1:
            while where == "a loop":
                pass
            time.sleep(3600)
        with world.exchanging("Step 3") if where == "a loop" else nullcontext():
            world.barrier()


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("a loop", "Step 3 has waited 1 s for process 1 on {host}. 1"),
        (
            "sleep",
            "Process 1 on {host} has made no progress for 1 s in code that is not simpletuner's. 1",
        ),
    ],
)
def test_a_hanging_process_ends_the_run(tmp_path: Path, where: str, message: str) -> None:
    assert in_two_processes(hang, tmp_path, where) == [1, 1]

    messages = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert messages == [message.format(host=socket.gethostname())] * 2


def test_a_single_process_does_not_communicate() -> None:
    world = World()
    assert (world.is_main, world.any(True), world.any(False), world.mean([1.5, 2.0])) == (
        True,
        True,
        False,
        [1.5, 2.0],
    )
    assert world.broadcast("x") == "x"
    assert (world.main_only(lambda: 1), world.place_among_leaders()) == (1, (0, 1))
    assert (world.unique_name("step-3"), world.label) == ("step-3", "")

    world.barrier()
    with pytest.raises(RuntimeError, match="not connected"):
        World(1, 2).barrier()


@pytest.mark.parametrize(("visible", "device"), [(1, 0), (8, 3)])
def test_processes_use_the_gpu_that_is_visible_to_them(
    monkeypatch: pytest.MonkeyPatch, visible: int, device: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    monkeypatch.setenv("LOCAL_RANK", "3")

    assert take_device(World(3, 8, 3, 8)) == "nccl"
    assert (chosen, os.environ["LOCAL_RANK"]) == ([device], str(device))


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "20021",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"WORLD_SIZE": "1", "PMI_SIZE": "", "RANK": "3"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script, not started by srun
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            World(1, 2, 1, 2),
        ),
        ({"RANK": "1", "WORLD_SIZE": "2"}, World(1, 2, 0, 1)),  # a Kubernetes job
        (SLURM, World(5, 8, 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, World(1, 2, 0, 1)),
    ],
)
def test_rank_and_size_come_from_the_launcher(
    environment: dict[str, str], place: World | None
) -> None:
    assert world_from_launcher(environment) == place


@pytest.mark.parametrize("rank", [None, "x", "2"])
def test_a_size_without_a_rank_is_an_error(rank: str | None) -> None:
    environment = {"WORLD_SIZE": "2"} | ({} if rank is None else {"RANK": rank})
    with pytest.raises(UserError, match=f"RANK is {rank or 'not set'}"):
        world_from_launcher(environment)


def test_the_rendezvous_comes_from_the_launcher() -> None:
    slurm = dict(SLURM)
    assert found_by(set_rendezvous, World(5, 8, 1, 4), slurm) == []
    assert (
        slurm["MASTER_ADDR"],
        slurm["MASTER_PORT"],
        slurm["RANK"],
        slurm["LOCAL_WORLD_SIZE"],
    ) == (
        "gpu07",
        "20021",
        "5",
        "4",
    )

    alone: dict[str, str] = {}
    assert found_by(set_rendezvous, World(0, 2, 0, 2), alone) == []
    assert (alone["MASTER_ADDR"], alone["WORLD_SIZE"]) == ("127.0.0.1", "2")

    problems = found_by(set_rendezvous, World(1, 2, 0, 1), {})
    assert [problem.where for problem in problems] == ["MASTER_ADDR", "MASTER_PORT"]


def test_a_wrong_port_does_not_hide_a_missing_address() -> None:
    problems = found_by(set_rendezvous, World(1, 2, 0, 1), {"MASTER_PORT": "70000"})

    assert [problem.where for problem in problems] == ["MASTER_ADDR", "MASTER_PORT"]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[03-07,9],b", "gpu03"), ("n[1,2].lab", "n1.lab"), ("", "")],
)
def test_the_rendezvous_is_the_first_slurm_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_connecting_to_a_silent_port_ends_at_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        started = time.monotonic()
        with pytest.raises(
            NotJoinedError,
            match=f"127.0.0.1:{port} is held by a program that does not answer process 1",
        ):
            open_store(World(1, 2, 1, 2), "env://", started + 0.1)
        assert time.monotonic() - started < 9
