"""Rules about the machine and the launcher: environment, processes, CUDA graphs, folders."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpletuner.atomic import why_no_folder, why_not_writable
from simpletuner.config.optimizers import OPTIMIZERS, optimizer_name, trained_precision
from simpletuner.config.schema import PLAIN_PRECISIONS, RunConfig, all_options
from simpletuner.config.speed import graph_keys
from simpletuner.config.types import TRUE_WORDS, parse_flag
from simpletuner.distributed.world import number_in, world_from_launcher
from simpletuner.errors import Problems, UserError, did_you_mean
from simpletuner.rounding import ceil_div

LEVELS = {
    logging.getLevelName(level): level for level in range(logging.DEBUG, logging.CRITICAL + 1, 10)
}
ALLOW_OTHER_BATCH_SIZE = "SIMPLETUNER_ALLOW_MODIFYING_BSZ"
# Set by `accelerate launch` from its config, which would contradict ours.
REPLACED = {
    "ACCELERATE_USE_FSDP": "fsdp_enable is the key of the config that shards a run.",
    "ACCELERATE_USE_DEEPSPEED": (
        "DeepSpeed is not supported; fsdp_enable is the key of the config that shards a run."
    ),
}


def driver() -> str | None:
    """The path of nvidia-smi; None if no NVIDIA GPU is visible to this process."""
    # An approximation, since a plan does not import torch.
    hides_all = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return None if hides_all else shutil.which("nvidia-smi")


def check_environment(report: Problems) -> None:
    """Report variables with an invalid value."""
    if allows_other_batch_size() is None:
        report.error(
            ALLOW_OTHER_BATCH_SIZE, f"{os.environ[ALLOW_OTHER_BATCH_SIZE]!r} is not 0 or 1."
        )
    log_level(report)
    for name, instead in REPLACED.items():
        if os.environ.get(name, "").strip().lower() in TRUE_WORDS:
            report.error(name, f"is set, by an accelerate config or by hand; unset it. {instead}")


def log_level(report: Problems) -> int:
    """The level in SIMPLETUNER_LOG_LEVEL, else INFO."""
    word = os.environ.get("SIMPLETUNER_LOG_LEVEL") or "INFO"
    level = LEVELS.get(word.strip().upper())
    if level is None:
        guess = did_you_mean(word.upper(), LEVELS)
        report.error(
            "SIMPLETUNER_LOG_LEVEL", f"{word!r} is not one of: {', '.join(LEVELS)}.{guess}"
        )
    return level or logging.INFO


def as_launched(config: RunConfig, report: Problems) -> RunConfig:
    """The settings with the number of processes started by a launcher, if any."""
    try:
        place = world_from_launcher(os.environ)
    except UserError as error:
        report.error("", str(error))
        return config
    if place is None:
        return config
    # The launcher has already decided; the key could only contradict it.
    if config.is_explicit("num_processes") and config.launch.num_processes != place.size:
        message = (
            f"{config.launch.num_processes}, but the launcher started {place.size} processes; "
            "leave it out."
        )
        report.error("num_processes", message)
    # Rounded up: the last machine may have fewer processes.
    machines = ceil_div(place.size, place.local_size)
    values: dict[str, Any] = {"num_processes": place.size, "num_machines": machines}
    if number_in(os.environ, "TORCHELASTIC_RESTART_COUNT"):
        # A restart after a failure continues; its command might start a branch again.
        values["resume_from_checkpoint"] = "latest"
    return config.with_values(values, "the launcher")


def as_rendered(config: RunConfig, folder: str) -> RunConfig:
    """The settings of a run for sampling to a folder, in one process.

    The dtype in which a full fine-tune was trained becomes that of the base model.
    """
    values: dict[str, Any] = {
        "output_dir": folder,
        "validation_disable": False,
        "num_processes": 1,
        "num_machines": 1,
        "sequence_parallel_size": 1,
        "fsdp_enable": False,
    }
    if config.model.model_type == "full":
        values["model_type"] = "lora"
        if config.precision.base_model_precision in PLAIN_PRECISIONS:
            values["base_model_precision"] = trained_precision(config.optimizer, config.precision)
    return config.with_values(values, "sampling")


def allows_other_batch_size() -> object | None:
    """Whether a run may be resumed with another batch size; None if the variable is not a flag."""
    try:
        return parse_flag(os.environ.get(ALLOW_OTHER_BATCH_SIZE) or "0")
    except ValueError:
        return None


def check_folders(folders: Mapping[str, str | None], report: Problems) -> None:
    """Report paths that are files instead of folders.

    Read-only folders are allowed, such as complete caches.
    """
    for key, folder in folders.items():
        reason = why_no_folder(Path(folder).expanduser(), folder) if folder else None
        if reason:
            report.error(key, reason)


def check_launch(config: RunConfig, report: Problems) -> None:
    """Report an invalid number of processes per machine, and conflicts with FSDP2."""
    launch = config.launch
    if launch.num_processes % launch.num_machines != 0:
        below = launch.num_processes // launch.num_machines * launch.num_machines
        above = below + launch.num_machines
        allowed = f"{below} or {above}" if below > 0 else str(above)
        report.error(
            "num_processes",
            f"{launch.num_processes} processes cannot be shared equally by num_machines "
            f"{launch.num_machines}; it counts those of all machines: {allowed}.",
        )
    if launch.fsdp_enable:
        _check_shards(config, report)


def may_shard(config: RunConfig) -> bool:
    """Whether this run could use FSDP2."""
    settings = config.flat
    if config.launch.num_processes == 1 or settings["enable_group_offload"]:
        return False
    # From the rules, so that advice never contradicts them.
    if any(rule.holds(settings) for rule in all_options()["fsdp_enable"].excludes):
        return False
    report = Problems()
    _check_shards(config, report)
    return not report


def _check_shards(config: RunConfig, report: Problems) -> None:
    """Report optimizers whose update needs unsharded weights."""
    optimizer = optimizer_name(config.optimizer, config.precision.mixed_precision)
    if config.model.model_type == "full" and not OPTIMIZERS[optimizer].element_wise:
        report.error(
            "fsdp_enable",
            f"cannot be combined with optimizer {optimizer!r}: its update needs whole weights. Use "
            "an AdamW such as adamw_bf16, or DDP, without fsdp_enable.",
        )


def check_offload(config: RunConfig, report: Problems) -> None:
    """Report CUDA graphs with offloading, and the cost of offloading to disk."""
    settings = config.flat
    moving = [key for key in ("enable_group_offload", "offload_block_inputs") if settings[key]]
    if moving:
        for key, advice in graph_keys(config.launch).items():
            report.error(
                key,
                f"{settings[key]!r} cannot be combined with {moving[0]}: CUDA graphs work at fixed "
                f"addresses, and offloaded tensors move; {advice}.",
            )
    disk = "group_offload_to_disk_path"
    folder = settings[disk]
    if folder is None or not all_options()[disk].has_effect(settings):
        return
    reason = why_not_writable(Path(folder).expanduser())
    if reason:
        report.error(disk, reason)
        return
    report.warn(
        disk,
        "every step reads the offloaded weights twice from this disk, unless spare memory keeps "
        "them; it waits whenever reading takes longer than computing.",
    )
