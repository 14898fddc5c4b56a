"""Rules of several processes, of FSDP2 and of offloading: where weights are, and what moves them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simpletuner.config.load import RunConfig
from simpletuner.config.optimizers import OPTIMIZERS, optimizer_name
from simpletuner.config.schema import all_options
from simpletuner.config.speed import graph_key
from simpletuner.errors import Problem
from simpletuner.plan.environment import why_not_writable


def check_launch(config: RunConfig) -> Iterator[Problem]:
    """All of them."""
    launch = config.launch
    if launch.num_processes % launch.num_machines:
        fewer = launch.num_processes // launch.num_machines
        allowed = " or ".join(str(each * launch.num_machines) for each in (fewer, fewer + 1) if each)
        message = f"{launch.num_processes} processes cannot be shared equally by num_machines {launch.num_machines}"
        yield Problem("num_processes", f"{message}; it counts those of all machines: {allowed}.")
    if launch.fsdp_enable:
        yield from _check_shards(config)


def may_shard(config: RunConfig) -> bool:
    """Whether this run could use FSDP2."""
    settings = config.flat()
    excluded = any(rule.holds(settings) for rule in all_options()["fsdp_enable"].excludes)
    free = not excluded and not settings["enable_group_offload"]  # whose own rule says so
    return free and config.launch.num_processes > 1 and not list(_check_shards(config))


def _check_shards(config: RunConfig) -> Iterator[Problem]:
    """Optimizers that take a share of a weight for all of it."""
    optimizer = optimizer_name(config.optimizer, config.precision.mixed_precision)
    if config.model.model_type == "full" and not OPTIMIZERS[optimizer].element_wise:
        message = f"and optimizer {optimizer!r} exclude each other: it does not update every number by itself, and each"
        advice = "process has a share of every weight. Use an AdamW such as adamw_bf16, or DDP, without fsdp_enable."
        yield Problem("fsdp_enable", f"{message} {advice}")


def check_offload(config: RunConfig) -> Iterator[Problem]:
    """CUDA graphs replay their kernels at the recorded addresses, so no tensor may move; and what a disk costs."""
    settings, graphs, disk = config.flat(), graph_key(config.launch), "group_offload_to_disk_path"
    moving = [key for key in ("enable_group_offload", "offload_block_inputs") if settings[key]]
    if graphs is not None and moving:
        message = (
            f"{settings[graphs]!r} and {moving[0]} exclude each other: CUDA graphs repeat their work at fixed "
            "addresses, and offloaded tensors return at different ones; use dynamo_mode max-autotune-no-cudagraphs or "
            "none."
        )
        yield Problem(graphs, message)
    folder = settings[disk]
    if folder is None or not all(rule.holds(settings) for rule in all_options()[disk].requires):
        return
    if problem := why_not_writable(disk, Path(folder).expanduser()):
        yield problem
    else:
        message = (
            "every training step reads the offloaded weights twice from this disk unless the system keeps them in "
            "spare memory; a step waits whenever reading takes longer than computing."
        )
        yield Problem(disk, message, fatal=False)
