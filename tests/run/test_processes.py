"""Runs of several processes: the mathematics of one, one record, one end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
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
from tests.tools.runs import assert_equal, training_state
from tests.tools.tolerances import ROTATION, distance
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow(3)

LOSS = 1e-6  # relative; what sums in another order may change
RESULT = "output/pytorch_lora_weights.safetensors"
# Steps that are proportional to the gradient: Adam would divide rounding by rounding where a
# gradient is nearly 0.
PLAIN: dict[str, Any] = {
    "max_train_steps": 3,
    "optimizer": "torch-sgd",
    "learning_rate": 0.1,
    "lr_scheduler": "constant",
}
SANA: dict[str, Any] = {
    "model_family": "sanavideo",
    "model_flavour": "2b-480p",
    "flow_schedule_shift": None,
    "train_batch_size": None,
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
# Kandinsky rounds rotated queries to bf16, so a last bit in a batch of another size may become a
# larger difference.
KANDINSKY = ROTATION / 16
PRESERVATION: dict[str, Any] = {
    "preservation_weight": 1.0,
    "preservation_probability": 0.5,
    "preservation_prompt": "a picture",
}


Filled = dict[int, Workspace]  # by the number of processes that have filled its caches


@pytest.fixture(scope="module")
def sana(tmp_path_factory: pytest.TempPathFactory, sana_checkpoint: Path) -> Filled:
    """Folders with the caches of a run of Sana Video. Encoding takes a third of a tiny run."""
    folder = tmp_path_factory.mktemp("sana-runs")
    settings = {**PLAIN, **SANA, "max_train_steps": 1}
    filled = {
        size: Workspace.create(folder / str(size), sana_checkpoint, **settings) for size in (1, 2)
    }
    for size, workspace in filled.items():
        assert train(workspace, size, "output_dir=first", "cache_dir=output/cache") == [0] * size, (
            printed(workspace)
        )
    return filled


@pytest.fixture
def t2i(filled: Workspace) -> Filled:
    return {1: filled, 2: filled}


def runs(folder: Path, filled: Filled, sizes: tuple[int, ...], **settings: Any) -> list[Workspace]:
    """The same run in different numbers of processes, with four samples in each micro-step."""
    found = []
    for size in sizes:
        settings = {**PLAIN, **settings, "train_batch_size": 4 // size}
        workspace = filled[min(size, 2)].copy(folder / str(size), **settings)
        assert (train(workspace, size) if size > 1 else [workspace.train()]) == [0] * size, printed(
            workspace
        )
        found.append(workspace)
    return found


def assert_same_losses(one: Workspace, other: Workspace, tolerance: float) -> None:
    pairs = list(zip(one.metrics(), other.metrics(), strict=True))
    assert len(pairs) > 1
    for left, right in pairs:
        assert left.keys() == right.keys()
        assert left["timesteps"] == right["timesteps"]
        for name in ("train_loss", "optimization_loss"):
            assert left[name] == pytest.approx(right[name], rel=tolerance), (name, left["step"])


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_two_processes_train_like_one_with_the_same_global_batch(
    tmp_path: Path, sana: Filled, kind: str
) -> None:
    one, two = runs(tmp_path, sana, (1, 2), **KINDS[kind])
    assert_same_losses(one, two, LOSS)
    for path in (
        each.relative_to(one.folder)
        for each in one.folder.glob("output/checkpoint-3/**/*.safetensors")
    ):
        assert distance(load_file(two.path(str(path))), load_file(one.path(str(path)))) < LOSS, path


def test_preservation_in_two_processes_equals_one_process(tmp_path: Path, t2i: Filled) -> None:
    one, two = runs(tmp_path, t2i, (1, 2), **PRESERVATION)
    assert_same_losses(one, two, KANDINSKY)
    assert distance(load_file(two.path(RESULT)), load_file(one.path(RESULT))) < ROTATION


def test_sequence_parallel_training_equals_one_process(tmp_path: Path, t2i: Filled) -> None:
    (one,) = runs(tmp_path, t2i, (1,))
    settings = {**PLAIN, "train_batch_size": 4, "sequence_parallel_size": 2}
    shared = t2i[2].copy(tmp_path / "shared", **settings)
    assert train(shared, 2) == [0, 0], printed(shared)
    assert_same_losses(one, shared, KANDINSKY)
    assert distance(load_file(shared.path(RESULT)), load_file(one.path(RESULT))) < ROTATION


def test_a_run_continues_on_a_different_number_of_processes(
    tmp_path: Path, sana: Filled, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"max_train_steps": 6, "checkpoint_step_interval": 2, "use_ema": True}
    (straight,) = runs(tmp_path / "straight", sana, (2,), **settings)
    stopped = straight.stopped(tmp_path / "stopped", 2)
    moved = Workspace(shutil.copytree(stopped.folder, tmp_path / "moved"))
    assert stopped.path("output/checkpoint-2").is_dir()
    assert train(stopped, 2) == [0, 0]
    assert stopped.metrics() == straight.metrics()
    assert_equal(training_state(stopped, 6), training_state(straight, 6))

    assert moved.run("plan", "max_train_steps=4") == 2
    assert "train_batch_size 4 continues it" in capsys.readouterr().err
    assert moved.train("max_train_steps=4", "train_batch_size=4") == 0
    assert train(moved, 4, "max_train_steps=6", "train_batch_size=1") == [0] * 4, printed(moved)
    assert_same_losses(straight, moved, LOSS)
    assert distance(load_file(moved.path(RESULT)), load_file(straight.path(RESULT))) < LOSS


@pytest.mark.parametrize(
    ("size", "technique"), [(3, {}), pytest.param(4, PRESERVATION, marks=pytest.mark.thorough)]
)
def test_three_or_more_processes_continue_bit_exactly(
    tmp_path: Path, t2i: Filled, size: int, technique: dict[str, Any]
) -> None:
    """Sums of more than two numbers round by their order, and that follows the places in the
    buckets of DDP.
    """
    settings = {"max_train_steps": 4, "checkpoint_step_interval": 2, "train_batch_size": 1}
    straight = t2i[2].copy(tmp_path / "straight", **settings, **technique)
    assert train(straight, size) == [0] * size, printed(straight)
    stopped = straight.stopped(tmp_path / "stopped", 2)
    assert train(stopped, size) == [0] * size, printed(stopped)
    assert stopped.metrics() == straight.metrics()
    assert_equal(training_state(stopped, 4), training_state(straight, 4))


@pytest.fixture
def workspace(filled: Workspace) -> Workspace:
    filled.write_config(**{**PLAIN, "train_batch_size": 1})
    return filled


def test_processes_share_streamed_weights_and_train_bit_identically(
    tmp_path: Path, workspace: Workspace
) -> None:
    settings = ("gradient_checkpointing=true", "seed=3")
    assert train(workspace, 2, *settings) == [0, 0], printed(workspace)
    resident = load_file(workspace.path(RESULT))
    for name, where in {
        "memory": (),
        "disk": (f"group_offload_to_disk_path={tmp_path}/disk",),
    }.items():
        streamed = (*settings, "enable_group_offload=true", f"output_dir={name}", *where)
        assert train(workspace, 2, *streamed) == [0, 0], printed(workspace)
        assert_equal(load_file(workspace.path(RESULT.replace("output", name))), resident)
    assert list((tmp_path / "disk").iterdir()) == []


def test_processes_with_different_settings_are_refused(
    tmp_path: Path, t2i_checkpoint: Path, workspace: Workspace
) -> None:
    other = Workspace.create(
        tmp_path / "other", t2i_checkpoint, pictures=7, **{**PLAIN, "train_batch_size": 1}
    )
    codes = finish(start([workspace, other], "train", extras=[[], ["learning_rate=0.2"]]))
    assert codes == [2, 2]
    told = printed(workspace)
    assert "learning_rate: is 0.1 in the first process, but 0.2 in process 1" in told
    assert "data_backend_config: is a list of samples" in told
    assert "Traceback" not in told
    assert printed(other, 1) == ""
    assert not workspace.path("output/checkpoint-3").exists()


def test_different_captions_and_dataset_settings_are_reported(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.folder)
    first = agreed_values(plan_training(parse_arguments([])))
    workspace.path("datasets/pictures/p0.txt").write_text("another text")
    workspace.write_datasets([{**DATASETS[0], "timestep_sampling_offset": 0.5}, DATASETS[1]])
    told = differences([("one", first), ("two", agreed_values(plan_training(parse_arguments([]))))])
    assert [each.where for each in told] == [
        "pictures.captions",
        "pictures.timestep_sampling_offset",
    ]
    assert "is 0.0 in the first process, but 0.5 in process 1 on two." in told[1].message


def test_mistakes_are_reported_by_one_process(workspace: Workspace) -> None:
    assert train(workspace, 2, "lora_rank=x", "lerning_rate=1") == [2, 2]
    told = printed(workspace)
    assert told.count("error: ") == 2, told
    assert "2 problems to fix; nothing was started." in told
    assert printed(workspace, 1) == ""


def test_a_process_that_cannot_reach_the_first_one_reports_it(
    workspace: Workspace,
) -> None:
    process = workspace.fork(run_as, 1, 2, free_port(), ["train", "start_timeout=1"])
    assert finish([process]) == [2]
    (told,) = [line for line in printed(workspace, 1).splitlines() if line.startswith("error: ")]
    assert told.startswith(
        f"error: MASTER_ADDR: process 1 on {socket.gethostname()} cannot reach process 0"
    )
    assert "start_timeout allows more time" in told


def test_an_error_of_one_process_is_reported_by_the_first(
    tmp_path: Path, t2i_checkpoint: Path, workspace: Workspace
) -> None:
    other = Workspace.create(tmp_path / "other", t2i_checkpoint, **PLAIN)
    other.path("config/multidatabackend.json").unlink()
    assert finish(start([workspace, other], "train")) == [2, 2]
    assert "Process 1 on " in printed(workspace)
    assert "multidatabackend.json" in printed(workspace)


def test_a_killed_process_ends_the_run_with_its_name(workspace: Workspace) -> None:
    processes = start([workspace] * 2, "train", "max_train_steps=5000")
    wait_for_step(workspace, 2, workspace.path("rank0.txt"), processes)
    processes[1].kill()
    assert finish(processes) == [1, -signal.SIGKILL]
    message = f"Process 1 on {socket.gethostname()} exited without reporting an error"
    assert message in printed(workspace)
    assert "Traceback" not in printed(workspace)
    last = json.loads(workspace.path("output/events.jsonl").read_text().splitlines()[-1])
    assert message in last["message"]
    assert not workspace.path("output/run.lock").exists()
    assert " [0] DEBUG " in workspace.path("debug.log").read_text()


def test_the_second_process_reports_that_the_first_was_killed(workspace: Workspace) -> None:
    processes = start([workspace] * 2, "train")
    lock = workspace.path("output/run.lock")  # written before any exchange
    wait_for(lock.exists, workspace.path("rank0.txt"), processes)
    processes[0].kill()
    assert finish(processes) == [-signal.SIGKILL, 1]
    assert f"Process 0 on {socket.gethostname()} exited without reporting an error" in printed(
        workspace, 1
    )
    assert train(workspace, 2) == [0, 0], "and the run starts again"


def restart(port: int, arguments: list[str]) -> None:
    """What torchrun does with --max-restarts 1, on processes that are forked instead of started."""
    launch = LaunchConfig(
        1,
        1,
        2,
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_backend="static",
        rdzv_configs={"rank": 0, "timeout": 60},
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(launch, restarted)(arguments)


def restarted(arguments: list[str]) -> None:
    """One of the processes; the second one dies after a checkpoint of the first attempt."""
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        threading.Thread(target=die_after, args=(Path("output/checkpoint-2"),), daemon=True).start()
    run_into(
        f"rank{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}.txt",
        arguments,
        leave=False,
    )


def die_after(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_torchrun_restarts_continues(workspace: Workspace) -> None:
    settings = [
        "train",
        "max_train_steps=6",
        "checkpoint_step_interval=1",
        "checkpoints_total_limit=9",
    ]
    assert finish([workspace.fork(restart, free_port(), settings)]) == [0]
    first, second = (workspace.path(f"rank0-{attempt}.txt").read_text() for attempt in range(2))
    assert f"Process 1 on {socket.gethostname()} exited without reporting an error" in first
    assert "Continuing from checkpoint-" in second
    result = load_file(workspace.path(RESULT))
    assert train(workspace, 2, *settings[1:], "output_dir=straight") == [0, 0]
    assert_equal(load_file(workspace.path(RESULT.replace("output", "straight"))), result)


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupting_one_process_stops_all_after_a_step(workspace: Workspace, rank: int) -> None:
    processes = start([workspace] * 2, "train", "max_train_steps=5000")
    wait_for_step(workspace, 2, workspace.path("rank0.txt"), processes)
    os.kill(processes[rank].pid or 0, signal.SIGINT)
    assert finish(processes) == [130, 130]
    step = len(workspace.metrics())
    assert (
        workspace.path(f"output/checkpoint-{step}-rolling").is_dir()
        or workspace.path(f"output/checkpoint-{step}").is_dir()
    )
    assert f"Stopped at step {step}" in printed(workspace)


def stop_together(place: World, port: int) -> None:
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


def test_num_processes_starts_all_processes_with_one_command(
    tmp_path_factory: pytest.TempPathFactory, workspace: Workspace
) -> None:
    """`simpletuner train` with num_processes: one terminal, one record, one exit code, one
    Ctrl-C.
    """
    log = workspace.path("log.txt")
    folder = tmp_path_factory.mktemp("commands")
    python = (
        folder / "python"
    )  # torchrun's, of which it asks this one thing; importing takes longer than training
    with forked_commands(folder) as program:
        skip = '[ "$1 $2 $3" = "-u -m simpletuner" ] && shift 3'
        python.write_text(f'#!/bin/sh\n{skip}\nexec {shlex.join(program)} "$@"\n')
        python.chmod(0o700)
        arguments = ["train", "num_processes=2", "max_train_steps=5000"]
        launcher = workspace.fork(launch_with, str(python), log.name, arguments)
        wait_for_step(workspace, 2, log, [launcher])
        os.kill(launcher.pid or 0, signal.SIGINT)
        assert finish([launcher]) == [130]
    told = log.read_text()
    step = len(workspace.metrics())
    assert told.count("Loading the transformer") == 1, told
    assert told.count(f"Stopped at step {step}") == 1, told
    assert "Traceback" not in told
