"""Rules of offloading: what it excludes, what it requires, and what a setting costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from simpletuner.config.load import RunConfig
from simpletuner.config.speed import graph_key
from simpletuner.errors import Problem
from simpletuner.plan.environment import why_not_writable


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
