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
    if not launch.fsdp_enable:
        return
    yield from _check_shards(config)
    if launch.fsdp_version == "1":
        yield Problem("fsdp_version", "1 is deprecated and treated as 2.", fatal=False)
    if launch.fsdp_auto_wrap_policy != "TRANSFORMER_BASED_WRAP":
        message = f"{launch.fsdp_auto_wrap_policy!r} is treated as TRANSFORMER_BASED_WRAP: results are the same, and"
        yield Problem("fsdp_auto_wrap_policy", f"{message} blocks are gathered one at a time.", fatal=False)


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
    """All of them."""
    offload = config.offload
    yield from _graphs(config)
    streams = offload.enable_group_offload or offload.group_offload_text_encoder or offload.group_offload_vae
    if streams and offload.group_offload_type == "leaf_level":
        message = "'leaf_level' is treated as block_level: a whole block copies faster than its layers one by one."
        yield Problem("group_offload_type", message, fatal=False)
    if streams and offload.group_offload_to_disk_path is not None:
        yield from _disk(Path(offload.group_offload_to_disk_path).expanduser())


def _graphs(config: RunConfig) -> Iterator[Problem]:
    """CUDA graphs replay their kernels at the recorded addresses, so no tensor may move."""
    values, key = config.flat(), graph_key(config.launch)
    moving = [each for each in ("enable_group_offload", "offload_block_inputs") if values[each]]
    if key is not None and moving:
        message = (
            f"{values[key]!r} and {moving[0]} exclude each other: CUDA graphs repeat their work at fixed addresses, "
            "and offloaded tensors return at different ones; use dynamo_mode max-autotune-no-cudagraphs or none."
        )
        yield Problem(key, message)


def _disk(folder: Path) -> Iterator[Problem]:
    """The folder must be writable; a warning says what the disk costs."""
    key = "group_offload_to_disk_path"
    problem = why_not_writable(key, folder)
    if problem is not None:
        yield problem
    else:
        message = (
            "every training step reads the offloaded weights twice from this disk unless the system keeps them in "
            "spare memory; a step waits whenever reading takes longer than computing."
        )
        yield Problem(key, message, fatal=False)
