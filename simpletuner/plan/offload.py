"""Rules of offloading: what it excludes, what it requires, and what a setting costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simpletuner.config.load import RunConfig
from simpletuner.config.schema import OffloadConfig
from simpletuner.config.speed import graph_key
from simpletuner.errors import Problem
from simpletuner.plan.environment import why_not_writable


def check_offload(config: RunConfig) -> Iterator[Problem]:
    """All of them."""
    offload = config.offload
    if offload.enable_group_offload:
        yield from _exclusions(config)
    yield from _graphs(config)
    streams = offload.enable_group_offload or offload.group_offload_text_encoder or offload.group_offload_vae
    yield from _idle(offload, streams)
    if streams and offload.group_offload_type == "leaf_level":
        message = "'leaf_level' is treated as block_level: a whole block copies faster than its layers one by one."
        yield Problem("group_offload_type", message, fatal=False)
    if offload.group_offload_vae and offload.enable_model_cpu_offload:
        message = "and enable_model_cpu_offload exclude each other: one moves parts of the VAE, the other all of it."
        yield Problem("group_offload_vae", message)
    if offload.offload_block_inputs and not config.precision.gradient_checkpointing:
        message = "has no effect without gradient_checkpointing: only the inputs that it keeps can go to host memory."
        yield Problem("offload_block_inputs", message, fatal=False)
    if streams and offload.group_offload_to_disk_path is not None:
        yield from _disk(Path(offload.group_offload_to_disk_path).expanduser())


def _idle(offload: OffloadConfig, streams: bool) -> Iterator[Problem]:
    """Details of an offload that is switched off."""
    details = {
        "group_offload_type": offload.group_offload_type != "block_level",
        "group_offload_blocks_per_group": offload.group_offload_blocks_per_group > 1,
        "group_offload_use_stream": offload.group_offload_use_stream,
        "group_offload_to_disk_path": offload.group_offload_to_disk_path is not None,
    }
    idle = [key for key, is_set in details.items() if is_set and not streams]
    if offload.group_offload_resident_blocks and not offload.enable_group_offload:
        idle.append("group_offload_resident_blocks")
    for key in idle:
        yield Problem(key, "has no effect without enable_group_offload.", fatal=False)


def _exclusions(config: RunConfig) -> Iterator[Problem]:
    """Settings that exclude group offload."""
    moves_all, is_full = config.offload.enable_model_cpu_offload, config.model.model_type == "full"
    needs_frozen = "only frozen weights can stream, and a full fine-tune has none; use model_type lora."
    for is_set, other, reason in (
        (moves_all, "enable_model_cpu_offload", "one streams the blocks, the other moves them all."),
        (config.launch.fsdp_enable, "fsdp_enable", "FSDP shards the weights that group offload would stream."),
        (is_full, "model_type full", needs_frozen),
    ):
        if is_set:
            yield Problem("enable_group_offload", f"and {other} exclude each other: {reason}")


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
