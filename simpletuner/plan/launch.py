"""Rules of several processes, of FSDP2 and of offloading: where weights are, and what moves them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simpletuner.config.launch import LaunchConfig
from simpletuner.config.load import RunConfig
from simpletuner.config.optimizers import OPTIMIZERS, optimizer_name
from simpletuner.config.precision import PLAIN_PRECISIONS
from simpletuner.config.speed import graph_key
from simpletuner.errors import NoEffect, Problem
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
        yield from check_sharding(config)
        yield from _notes(launch)


def may_shard(config: RunConfig) -> bool:
    """Whether this run could use FSDP2."""
    free = not config.offload.enable_group_offload  # its own rule says so
    return free and config.launch.num_processes > 1 and not list(check_sharding(config))


def check_sharding(config: RunConfig) -> Iterator[Problem]:
    """What FSDP2 excludes, besides group offload."""
    base, lora = config.precision.base_model_precision, config.lora.lora_type
    optimizer = optimizer_name(config.optimizer, config.precision.mixed_precision)
    for is_set, other, reason in (
        (base not in PLAIN_PRECISIONS, f"base_model_precision {base!r}", "quantised weights cannot be split."),
        (
            config.offload.enable_model_cpu_offload,
            "enable_model_cpu_offload",
            "it moves the whole transformer, of which each process has a share.",
        ),
        (
            config.model.model_type == "lora" and lora != "standard",
            f"lora_type {lora}",
            "one process checks its result by predictions, which FSDP2 needs all of them for. Use DDP, without "
            "fsdp_enable.",
        ),
        (
            config.model.model_type == "full" and config.precision.mixed_precision == "fp16",
            "mixed_precision fp16",
            "each process would skip steps by the overflows in its own share of the gradient. Use bf16.",
        ),
        (
            config.lora.use_dora and config.lora.lora_format == "comfyui",
            "lora_format comfyui of a DoRA",
            "ComfyUI's magnitudes are computed from the whole base weights. Use lora_format diffusers.",
        ),
        (
            config.model.model_type == "full" and not OPTIMIZERS[optimizer].element_wise,
            f"optimizer {optimizer!r}",
            "it does not update every number by itself, and each process has a share of every weight. Use an AdamW "
            "such as adamw_bf16, or DDP, without fsdp_enable.",
        ),
    ):
        if is_set:
            yield Problem("fsdp_enable", f"and {other} exclude each other: {reason}")


def _notes(launch: LaunchConfig) -> Iterator[Problem]:
    """Values that are understood but not needed."""
    if launch.num_processes == 1:
        yield NoEffect("fsdp_enable", "has no effect with one process: nothing can be shared.")
    if launch.fsdp_version == "1":
        yield Problem("fsdp_version", "1 is deprecated and treated as 2.", fatal=False)
    if launch.fsdp_auto_wrap_policy != "TRANSFORMER_BASED_WRAP":
        message = f"{launch.fsdp_auto_wrap_policy!r} is treated as TRANSFORMER_BASED_WRAP: results are the same, and"
        yield Problem("fsdp_auto_wrap_policy", f"{message} blocks are gathered one at a time.", fatal=False)


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
