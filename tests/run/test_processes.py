"""Runs of several processes: they train like one process, and have one record and one end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from simpletuner.annexes.processes import group
from simpletuner.annexes.processes.agreement import agreed_values, differences
from simpletuner.annexes.processes.group import process_group
from simpletuner.config.sources import parse_arguments
from simpletuner.distributed.world import World
from simpletuner.errors import Interrupted
from simpletuner.planning.build import plan_training
from tests.tools.cases import first_of
from tests.tools.commands import forked_commands
from tests.tools.processes import (
    finish,
    free_port,
    printed,
    run_as,
    run_into,
    run_together,
    start,
    train,
    wait_for,
    wait_for_step,
)
from tests.tools.runs import LORA, SANA_RUN, assert_equal, training_state
from tests.tools.tolerances import ROTATION, distance
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow(3)

# Relative difference of losses and weights whose sums are taken in another order.
LOSS = 1e-6
# Kandinsky rounds rotated queries to bf16, so a last bit in a batch of another size may become a
# larger difference.
KANDINSKY_LOSS = ROTATION / 16
# Steps that are proportional to the gradient: Adam would divide rounding by rounding where a
# gradient is nearly 0.
SGD_RUN: dict[str, Any] = {
    "max_train_steps": 3,
    "optimizer": "torch-sgd",
    "learning_rate": 0.1,
    "lr_scheduler": "constant",
}
SGD_SANA_RUN: dict[str, Any] = {
    **SGD_RUN,
    **SANA_RUN,
    "flow_schedule_shift": None,
    "train_batch_size": None,
    "max_train_steps": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "norm, accumulation, average": {
        "grad_clip_method": "norm",
        "max_grad_norm": 1e-3,
        "gradient_accumulation_steps": 2,
        "use_ema": True,
    },
    "value, caption dropout": {"max_grad_norm": 1e-4, "caption_dropout_probability": 0.3},
    "full": {"model_type": "full", "learning_rate": 1e-3},
}
PRESERVATION: dict[str, Any] = {
    "preservation_weight": 1.0,
    "preservation_probability": 0.5,
    "preservation_prompt": "a picture",
}
# More steps than a test waits for: it stops the run.
ENDLESS = "max_train_steps=5000"
HOST = socket.gethostname()

# Workspaces with caches, by the number of processes that have filled them.
Filled = dict[int, Workspace]


@pytest.fixture(scope="module")
def sana(tmp_path_factory: pytest.TempPathFactory, sana_checkpoint: Path) -> Filled:
    """Folders with the caches of a run of Sana Video. Encoding takes a third of a tiny run."""
    folder = tmp_path_factory.mktemp("sana-runs")
    filled = {}
    for size in (1, 2):
        workspace = Workspace.create(folder / str(size), sana_checkpoint, **SGD_SANA_RUN)
        codes = train(workspace, size, "output_dir=first", "cache_dir=output/cache")
        assert codes == [0] * size, printed(workspace)
        filled[size] = workspace
    return filled


@pytest.fixture
def t2i(filled: Workspace) -> Filled:
    return {1: filled, 2: filled}


@pytest.fixture
def workspace(filled: Workspace) -> Workspace:
    """A picture of each process in every step."""
    filled.write_config(**SGD_RUN, train_batch_size=1)
    return filled


def train_in(folder: Path, filled: Filled, size: int, **settings: Any) -> Workspace:
    """A run in some processes, with four samples of all processes together in each micro-step."""
    settings = {**SGD_RUN, **settings, "train_batch_size": 4 // size}
    workspace = filled[size].copy(folder / str(size), **settings)
    codes = [workspace.train()] if size == 1 else train(workspace, size)
    assert codes == [0] * size, printed(workspace)
    return workspace


def assert_same_losses(actual: Workspace, expected: Workspace, tolerance: float) -> None:
    pairs = list(zip(actual.metrics(), expected.metrics(), strict=True))
    assert len(pairs) > 1
    for row, expected_row in pairs:
        assert row.keys() == expected_row.keys()
        assert row["timesteps"] == expected_row["timesteps"]
        for name in ("train_loss", "optimization_loss"):
            expected_loss = pytest.approx(expected_row[name], rel=tolerance)
            assert row[name] == expected_loss, (name, row["step"])


def assert_close_files(actual: Workspace, expected: Workspace, path: str, limit: float) -> None:
    weights = load_file(actual.path(path))
    assert distance(weights, load_file(expected.path(path))) < limit, path


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_two_processes_train_like_one_with_the_same_global_batch(
    tmp_path: Path, sana: Filled, kind: str
) -> None:
    one_process = train_in(tmp_path, sana, 1, **KINDS[kind])
    two_processes = train_in(tmp_path, sana, 2, **KINDS[kind])

    assert_same_losses(two_processes, one_process, LOSS)
    for path in one_process.folder.glob("output/checkpoint-3/**/*.safetensors"):
        name = str(path.relative_to(one_process.folder))
        assert_close_files(two_processes, one_process, name, LOSS)


@pytest.mark.thorough
def test_preservation_in_two_processes_equals_one_process(tmp_path: Path, t2i: Filled) -> None:
    one_process = train_in(tmp_path, t2i, 1, **PRESERVATION)
    two_processes = train_in(tmp_path, t2i, 2, **PRESERVATION)

    assert_same_losses(two_processes, one_process, KANDINSKY_LOSS)
    assert_close_files(two_processes, one_process, LORA, ROTATION)


def test_sequence_parallel_training_equals_one_process(tmp_path: Path, t2i: Filled) -> None:
    one_process = train_in(tmp_path, t2i, 1)
    settings = {**SGD_RUN, "train_batch_size": 4, "sequence_parallel_size": 2}
    parallel = t2i[2].copy(tmp_path / "parallel", **settings)

    assert train(parallel, 2) == [0, 0], printed(parallel)

    assert_same_losses(parallel, one_process, KANDINSKY_LOSS)
    assert_close_files(parallel, one_process, LORA, ROTATION)


def test_a_run_continues_on_a_different_number_of_processes(
    tmp_path: Path, sana: Filled, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"max_train_steps": 6, "checkpoint_step_interval": 2, "use_ema": True}
    straight = train_in(tmp_path / "straight", sana, 2, **settings)
    stopped = straight.stopped(tmp_path / "stopped", 2)
    moved = stopped.copy(tmp_path / "moved")

    assert train(stopped, 2) == [0, 0]
    assert stopped.metrics() == straight.metrics()
    assert_equal(training_state(stopped, 6), training_state(straight, 6))

    assert moved.run("plan", "max_train_steps=4") == 2
    assert "train_batch_size 4 continues it" in capsys.readouterr().err
    # Two processes until step 2, then one, then four: always four samples in a step.
    assert moved.train("max_train_steps=4", "train_batch_size=4") == 0
    assert train(moved, 4, "max_train_steps=6", "train_batch_size=1") == [0] * 4, printed(moved)
    assert_same_losses(moved, straight, LOSS)
    assert_close_files(moved, straight, LORA, LOSS)


@pytest.mark.parametrize(
    ("size", "technique"),
    [
        (3, {}),
        pytest.param(4, PRESERVATION, marks=pytest.mark.thorough),
    ],
)
def test_three_or_more_processes_continue_bit_exactly(
    tmp_path: Path, t2i: Filled, size: int, technique: dict[str, Any]
) -> None:
    """Sums of more than two numbers round by their order, which the buckets of DDP decide."""
    settings = {"max_train_steps": 4, "checkpoint_step_interval": 2, "train_batch_size": 1}
    straight = t2i[2].copy(tmp_path / "straight", **settings, **technique)
    assert train(straight, size) == [0] * size, printed(straight)
    stopped = straight.stopped(tmp_path / "stopped", 2)

    assert train(stopped, size) == [0] * size, printed(stopped)

    assert stopped.metrics() == straight.metrics()
    assert_equal(training_state(stopped, 4), training_state(straight, 4))


def test_processes_share_streamed_weights_and_train_bit_identically(
    tmp_path: Path, workspace: Workspace
) -> None:
    settings = ("gradient_checkpointing=true", "seed=3")
    streamed = (*settings, "enable_group_offload=true")
    disk = tmp_path / "disk"

    resident_codes = train(workspace, 2, *settings)
    assert resident_codes == [0, 0], printed(workspace)
    memory_codes = train(workspace, 2, *streamed, "output_dir=memory")
    assert memory_codes == [0, 0], printed(workspace)
    disk_codes = train(
        workspace, 2, *streamed, "output_dir=disk", f"group_offload_to_disk_path={disk}"
    )
    assert disk_codes == [0, 0], printed(workspace)

    resident = load_file(workspace.path(LORA))
    assert_equal(load_file(workspace.path(LORA.replace("output", "memory"))), resident)
    assert_equal(load_file(workspace.path(LORA.replace("output", "disk"))), resident)
    assert list(disk.iterdir()) == [], "files of weights are removed at the end"


def test_processes_with_different_settings_are_refused(
    tmp_path: Path, t2i_checkpoint: Path, workspace: Workspace
) -> None:
    settings = {**SGD_RUN, "train_batch_size": 1}
    second = Workspace.create(tmp_path / "second", t2i_checkpoint, pictures=7, **settings)

    processes = start([workspace, second], "train", extras=[[], ["learning_rate=0.2"]])

    assert finish(processes) == [2, 2]
    output = printed(workspace)
    assert "learning_rate: is 0.1 in the first process, but 0.2 in process 1" in output
    assert "data_backend_config: is a list of samples" in output
    assert "Traceback" not in output
    assert printed(second, 1) == ""
    assert not workspace.path("output/checkpoint-3").exists()


def test_different_captions_and_dataset_settings_are_reported(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.folder)
    first = agreed_values(plan_training(parse_arguments([])))
    workspace.path("datasets/pictures/p0.txt").write_text("another text")
    workspace.write_datasets([{**DATASETS[0], "timestep_sampling_offset": 0.5}, DATASETS[1]])
    second = agreed_values(plan_training(parse_arguments([])))

    captions, offset = differences([("host-1", first), ("host-2", second)])

    assert captions.where == "pictures.captions"
    assert offset.where == "pictures.timestep_sampling_offset"
    assert "is 0.0 in the first process, but 0.5 in process 1 on host-2." in offset.message


def test_mistakes_are_reported_by_one_process(workspace: Workspace) -> None:
    assert train(workspace, 2, "lora_rank=x", "lerning_rate=1") == [2, 2]

    output = printed(workspace)
    assert output.count("error: ") == 2, output
    assert "2 problems to fix; nothing was started." in output
    assert printed(workspace, 1) == ""


def test_a_process_that_cannot_reach_the_first_one_reports_it(workspace: Workspace) -> None:
    """Although only the first process of a machine reports errors otherwise."""
    process = workspace.fork(run_as, 1, 2, free_port(), ["train", "start_timeout=1"])

    assert finish([process]) == [2]

    output = printed(workspace, 1)
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    expected = f"error: MASTER_ADDR: process 1 on {HOST} cannot reach process 0"
    assert error.startswith(expected)
    assert "start_timeout allows more time" in error


def test_an_error_of_one_process_is_reported_by_the_first(
    tmp_path: Path, t2i_checkpoint: Path, workspace: Workspace
) -> None:
    second = Workspace.create(tmp_path / "second", t2i_checkpoint, **SGD_RUN)
    second.path("config/multidatabackend.json").unlink()

    assert finish(start([workspace, second], "train")) == [2, 2]

    assert "Process 1 on " in printed(workspace)
    assert "multidatabackend.json" in printed(workspace)


def test_a_killed_process_ends_the_run_with_its_name(workspace: Workspace) -> None:
    processes = start([workspace] * 2, "train", ENDLESS)
    wait_for_step(workspace, 2, workspace.path("rank0.txt"), processes)

    processes[1].kill()

    assert finish(processes) == [1, -signal.SIGKILL]
    message = f"Process 1 on {HOST} exited without reporting an error"
    assert message in printed(workspace)
    assert "Traceback" not in printed(workspace)
    last_event = json.loads(workspace.path("output/events.jsonl").read_text().splitlines()[-1])
    assert message in last_event["message"]
    assert not workspace.path("output/run.lock").exists()
    assert " [0] DEBUG " in workspace.path("debug.log").read_text()


def test_the_second_process_reports_that_the_first_was_killed(workspace: Workspace) -> None:
    processes = start([workspace] * 2, "train")
    # The lock is written before the processes exchange anything.
    lock = workspace.path("output/run.lock")
    wait_for(lock.exists, workspace.path("rank0.txt"), processes)

    processes[0].kill()

    assert finish(processes) == [-signal.SIGKILL, 1]
    message = f"Process 0 on {HOST} exited without reporting an error"
    assert message in printed(workspace, 1)
    assert train(workspace, 2) == [0, 0], "the run starts again"


def launch_with_one_restart(port: int, arguments: list[str]) -> None:
    """What torchrun does with --max-restarts 1, on processes that are forked instead of started."""
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_backend="static",
        rdzv_configs={"rank": 0, "timeout": 60},
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(launch, run_restarted)(arguments)


def run_restarted(arguments: list[str]) -> None:
    """One of the processes; the second one dies after a checkpoint of the first attempt."""
    rank = os.environ["RANK"]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if rank == "1" and attempt == "0":
        checkpoint = Path("output/checkpoint-2")
        threading.Thread(target=die_after, args=(checkpoint,), daemon=True).start()
    run_into(f"rank{rank}-{attempt}.txt", arguments, leave=False)


def die_after(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_torchrun_restarts_continues(workspace: Workspace) -> None:
    settings = ["max_train_steps=6", "checkpoint_step_interval=1", "checkpoints_total_limit=9"]
    launcher = workspace.fork(launch_with_one_restart, free_port(), ["train", *settings])

    assert finish([launcher]) == [0]

    first_attempt = workspace.path("rank0-0.txt").read_text()
    second_attempt = workspace.path("rank0-1.txt").read_text()
    assert f"Process 1 on {HOST} exited without reporting an error" in first_attempt
    assert "Continuing from checkpoint-" in second_attempt
    assert train(workspace, 2, *settings, "output_dir=straight") == [0, 0]
    straight = load_file(workspace.path(LORA.replace("output", "straight")))
    assert_equal(load_file(workspace.path(LORA)), straight)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_interrupting_one_process_stops_all_after_a_step(workspace: Workspace, rank: int) -> None:
    processes = start([workspace] * 2, "train", ENDLESS)
    wait_for_step(workspace, 2, workspace.path("rank0.txt"), processes)

    os.kill(processes[rank].pid or 0, signal.SIGINT)

    assert finish(processes) == [130, 130]
    step = len(workspace.metrics())
    assert f"Stopped at step {step}" in printed(workspace)
    # Even steps have a regular checkpoint already.
    names = {path.name for path in workspace.path("output").glob("checkpoint-*")}
    assert names & {f"checkpoint-{step}", f"checkpoint-{step}-rolling"}


def stop_together(place: World, port: int) -> None:
    """Both processes are stopped; the first one has work for longer than the other lingers."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group.LINGER_SECONDS = 0.5
    with suppress(Interrupted, typer.Exit), process_group(place) as world:
        try:
            world.barrier()
            raise Interrupted("Stopped")
        finally:
            if place.is_main:
                time.sleep(group.LINGER_SECONDS + 2)
                Path("finished").touch()


def test_the_first_process_can_finish_its_work_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    run_together(2, stop_together, free_port())

    assert Path("finished").exists()


def launch_with(python: str, file: str, arguments: list[str]) -> None:
    os.environ["PYTHON_EXEC"] = python
    run_into(file, arguments)


def write_python(path: Path, program: list[str]) -> None:
    """Write a `python` that runs `simpletuner` as a process forked with everything imported.

    torchrun only calls it with `-u -m simpletuner`. Importing would take longer than training.
    """
    skip = '[ "$1 $2 $3" = "-u -m simpletuner" ] && shift 3'
    path.write_text(f'#!/bin/sh\n{skip}\nexec {shlex.join(program)} "$@"\n')
    path.chmod(0o700)


def test_num_processes_starts_all_processes_with_one_command(
    tmp_path_factory: pytest.TempPathFactory, workspace: Workspace
) -> None:
    """One terminal, one record, one exit code and one Ctrl-C."""
    log = workspace.path("log.txt")
    folder = tmp_path_factory.mktemp("commands")
    python = folder / "python"
    arguments = ["train", "num_processes=2", ENDLESS]

    with forked_commands(folder) as program:
        write_python(python, program)
        launcher = workspace.fork(launch_with, str(python), log.name, arguments)
        wait_for_step(workspace, 2, log, [launcher])
        os.kill(launcher.pid or 0, signal.SIGINT)
        assert finish([launcher]) == [130]

    output = log.read_text()
    step = len(workspace.metrics())
    assert output.count("Loading the transformer") == 1, output
    assert output.count(f"Stopped at step {step}") == 1, output
    assert "Traceback" not in output
