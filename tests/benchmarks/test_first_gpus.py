"""Scaling over several processes, tried on a CPU: traffic is counted, and failures are reported."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import first_gpus
from benchmarks.first_gpu import cause
from benchmarks.scaling import CASES, Sent
from simpletuner.distributed.world import World
from tests.tools.processes import free_port, run_together

SHARDED = "Lite full, FSDP2"


@pytest.mark.slow
def test_first_gpus_measures_two_processes_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without torchrun and the time in which two new processes would import torch."""

    def run(words: list[str], limit: float) -> tuple[int, str, str]:
        assert words[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        run_together(2, work, words[words.index("benchmarks.first_gpus") :], tmp_path, free_port())
        return 0, (tmp_path / "0.txt").read_text(), ""

    monkeypatch.setattr(first_gpus, "run_process", run)
    options = argparse.Namespace(
        device="cpu",
        size="tiny",
        processes=[2],
        only=[SHARDED],
        json=tmp_path / "results" / "2xcpu.json",
        minutes=30.0,
    )

    assert first_gpus.run_all(options) == 0, capsys.readouterr().out
    group = json.loads(options.json.read_text())["groups"][f"{SHARDED}, 2 processes"]
    assert group["state"] == "done"

    lines = {line["name"]: line for line in group["lines"]}
    sent = lines["tensors sent in a step by a process / ring limit"]
    assert sent["unit"] == "bar 1.05: ok", sent
    assert lines["agreements in a step"]["value"] == 3
    assert all(line["value"] > 0 for line in lines.values())

    output = capsys.readouterr().out
    assert all(name in output for name in lines)


def work(place: World, words: list[str], folder: Path, port: int) -> None:
    """One process of several; what it prints is in a file."""
    environment = {
        "RANK": place.rank,
        "WORLD_SIZE": place.size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in environment.items()}
    sys.argv = words
    with (folder / f"{place.rank}.txt").open("w") as out, redirect_stdout(out):
        first_gpus.main()


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    distributed.destroy_process_group()


def test_what_ddp_sends_is_counted(group_of_one: None) -> None:
    """As the rings of four processes send it."""
    model = DistributedDataParallel(nn.Linear(8, 4, bias=False))

    with Sent(4) as sent:
        model(torch.zeros(1, 8)).sum().backward()
        sent.kind = "control"
        distributed.all_gather([torch.zeros(3)], torch.zeros(3))

    assert sent.total("tensors") == 2 * 3 / 4 * 8 * 4 * 4
    assert sent.total("control") == 3 / 4 * 3 * 4
    assert set(sent.bytes) == {("tensors", "allreduce_"), ("control", "allgather_")}


def test_speed_ups_are_relative_to_one_process() -> None:
    single = {
        "lines": [
            {"name": first_gpus.WEAK, "value": 2.0},
            {"name": first_gpus.STRONG, "value": 8.0},
        ]
    }
    four = {
        "lines": [
            {"name": first_gpus.WEAK, "value": 2.5},
            {"name": first_gpus.STRONG, "value": 2.5},
        ]
    }

    assert [line["value"] for line in first_gpus.speed_ups(four, single, 4)] == [3.2, 3.2]
    assert first_gpus.speed_ups(four, {"lines": []}, 4) == []
    assert first_gpus.speed_ups(single, single, 1) == []
    assert first_gpus.in_order([4, 1, 8, 2]) == [1, 8, 4, 2]


def test_incomparable_process_counts_give_no_speed_up() -> None:
    assert first_gpus.refuse([1, 2, 4], 4, "H200") == ""
    assert first_gpus.refuse([8], 4, "H200").startswith(
        "8 processes need as many GPUs; there are 4 (H200)."
    )
    assert (
        first_gpus.refuse([1, 2, 3], 3, "H200") == "2 does not divide 3 samples, the global batch."
    )
    assert first_gpus.refuse_cases(["x"], CASES).startswith(
        "No such case: x; there are Lite LoRA, DDP; "
    )


FAILED = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "step.py", line 3, in step
[rank1]: torch.OutOfMemoryError: CUDA out of memory.
[rank0]: torch.distributed.DistBackendError: NCCL error
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""


def test_first_failed_process_is_reported() -> None:
    assert cause(FAILED) == "OutOfMemoryError: CUDA out of memory."
    assert cause(FAILED.replace("[rank1]: ", "")) == "OutOfMemoryError: CUDA out of memory."
    assert cause("Traceback\nKeyError: 'x'\n") == "KeyError: 'x'"
    assert cause("Traceback\nerror: gone\n") == "error: gone"
    assert cause("") == ""


def test_processes_end_when_their_launcher_is_killed() -> None:
    """It starts them in sessions of their own, which the time limit of a group does not reach."""
    read, write = os.pipe()
    launcher = os.fork()
    if not launcher:
        from benchmarks.scaling import end_with_parent

        if not os.fork():
            end_with_parent()
            os.setsid()
            os.write(write, b".")
            time.sleep(3600)
            os._exit(0)
        time.sleep(3600)
        os._exit(0)

    os.close(write)
    assert os.read(read, 1) == b"."

    os.kill(launcher, 9)
    os.waitpid(launcher, 0)
    assert os.read(read, 1) == b"", (
        "the pipe is closed when the last process that could write has ended"
    )


def test_advice_after_an_error_is_not_its_cause() -> None:
    errors = (
        "Traceback (most recent call last):\n"
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call.\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )

    assert cause(errors) == "AcceleratorError: CUDA error: an illegal memory access was encountered"
