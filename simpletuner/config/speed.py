"""Resolves `speed` and the individual speed switches."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass

from simpletuner.config.launch import LaunchConfig
from simpletuner.config.option import Package, check_installed, is_installed
from simpletuner.config.schema import PrecisionConfig, SpeedConfig
from simpletuner.errors import Problems, not_one_of

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # modes with CUDA graphs
# Keys that affect only our implementation of blocks.
BLOCK_KEYS = ("speed_keep_attention", "attention_mechanism")
# Keys that have an effect only if blocks are compiled.
COMPILE_KEYS = ("dynamo_mode", "dynamo_fullgraph", "dynamo_dynamic", "validation_torch_compile")


@dataclass(frozen=True)
class AttentionPackage:
    """A package with an attention kernel that can train.

    Attributes:
        function: the kernel as `module:function`, called by our blocks.
        torch_name: without a function, torch's name of a flash attention that it can run in place
            of its own.
        capabilities: the compute capabilities, by their first number, for which torch runs it.
        is_released: whether the package index has it; otherwise it is built from source.
    """

    package: Package
    function: str = ""
    torch_name: str = ""
    capabilities: tuple[int, ...] = ()
    is_released: bool = True


ATTENTION_PACKAGES = {
    "flash-attn-2": AttentionPackage(
        Package("flash_attn", "flash-attn"), "flash_attn:flash_attn_func"
    ),
    "flash-attn-3": AttentionPackage(
        Package("flash_attn_interface", "flash-attn-3"),
        torch_name="FA3",
        capabilities=(9,),
        is_released=False,
    ),
    "flash-attn-4": AttentionPackage(
        Package("flash_attn.cute", "flash-attn-4>=4.0.0b36,<5"),
        torch_name="FA4",
        capabilities=(9, 10),
    ),
    "xformers": AttentionPackage(
        Package("xformers", "xformers"), "xformers.ops:memory_efficient_attention"
    ),
}


def uses_own_arithmetic(config: SpeedConfig) -> bool:
    """Whether blocks run our arithmetic instead of diffusers' code."""
    return config.speed == "auto"


def keeps_attention(config: SpeedConfig) -> bool:
    """Whether activation checkpointing keeps the outputs of self-attention."""
    return uses_own_arithmetic(config) and config.speed_keep_attention is not False


def stores_modulation_in_bf16(config: SpeedConfig) -> bool:
    """Whether frozen modulation weights are stored as bf16 if that is lossless."""
    return config.speed == "auto"


def checkpointed_blocks(blocks: int, interval: int | None, kept: int) -> list[bool]:
    """Whether each block is recomputed: every `interval`-th, except `kept` evenly spaced ones.

    Args:
        interval: None recomputes no block.
    """
    if interval is None:
        return [False] * blocks
    recomputed = []
    for index in range(blocks):
        # A block is kept where floor(kept · index / blocks) rises, which it does `kept` times.
        is_kept = (index + 1) * kept // blocks > index * kept // blocks
        recomputed.append(index % interval == 0 and not is_kept)
    return recomputed


def compile_backend(
    config: SpeedConfig, launch: LaunchConfig, device: str, *, elsewhere: bool = False
) -> str | None:
    """The torch.compile backend, or None.

    The default is inductor on CUDA if a C compiler and triton are installed, which its GPU kernels
    need.

    Args:
        elsewhere: the device is in another machine, which is assumed to have both.
    """
    if launch.dynamo_backend is not None:
        return None if launch.dynamo_backend == "no" else launch.dynamo_backend
    if config.speed != "auto" or device != "cuda":
        return None
    if elsewhere or (has_compiler() and importlib.util.find_spec("triton") is not None):
        return "inductor"
    return None


def graph_key(launch: LaunchConfig) -> str | None:
    """The key that enables CUDA graphs, or None.

    A graph replays fixed addresses, so its tensors must not move.
    """
    for key in graph_keys(launch):
        return key
    return None


def graph_keys(launch: LaunchConfig) -> dict[str, str]:
    """The keys that enable CUDA graphs, and what to set instead."""
    if launch.dynamo_backend == "no":
        return {}
    keys = {}
    if launch.dynamo_backend == "cudagraphs":
        keys["dynamo_backend"] = "use inductor"
    if launch.dynamo_mode in GRAPH_MODES:
        keys["dynamo_mode"] = "use max-autotune-no-cudagraphs, or leave it out"
    return keys


def has_compiler() -> bool:
    """Whether a C compiler is installed.

    Inductor needs one on a CPU, and for the launchers of GPU kernels.
    """
    chosen = (os.environ.get("CC", ""), os.environ.get("CXX", ""))
    return any(name and shutil.which(name) for name in (*chosen, "cc", "gcc", "clang", "g++"))


def check_speed(
    config: SpeedConfig, precision: PrecisionConfig, launch: LaunchConfig, report: Problems
) -> None:
    """Report contradicting switches and missing packages."""
    if not uses_own_arithmetic(config):
        message = "has no effect with speed reference, which runs diffusers' own blocks."
        report.no_effect("speed_keep_attention", message)
    if launch.sequence_parallel_size > 1 and not uses_own_arithmetic(config):
        message = (
            f"{launch.sequence_parallel_size} needs speed auto: diffusers' own blocks need "
            "all tokens."
        )
        report.error("sequence_parallel_size", message)
    check_mechanism(config, precision.attention_mechanism, report)
    check_compile(config, launch, report)


def check_mechanism(config: SpeedConfig, mechanism: str, report: Problems) -> None:
    """Check that the attention kernel is installed, can train and is used."""
    kernel = ATTENTION_PACKAGES.get(mechanism)
    if kernel is not None:
        if kernel.is_released:
            check_installed(kernel.package, "attention_mechanism", mechanism, report)
        elif not is_installed(kernel.package.module):
            message = (
                f"{mechanism!r} is not installed, and has to be built from source "
                "(docs/INSTALL.md says how)."
            )
            report.error("attention_mechanism", message)
        if not uses_own_arithmetic(config):
            message = f"{mechanism!r} needs speed auto: diffusers' own blocks use torch's."
            report.error("attention_mechanism", message)
    if mechanism == "xformers" and config.deterministic:
        message = "'xformers' sums in any order: not deterministic; use diffusers."
        report.error("attention_mechanism", message)


def check_compile(config: SpeedConfig, launch: LaunchConfig, report: Problems) -> None:
    """Check the keys of torch.compile."""
    backend = launch.dynamo_backend
    mode = launch.dynamo_mode
    reason = ""
    if backend == "no":
        reason = "dynamo_backend is 'no'"
    elif backend is None and config.speed == "reference":
        reason = "speed is 'reference' and dynamo_backend is not set"
    if reason:
        for key in COMPILE_KEYS:
            report.no_effect(key, f"has no effect: {reason}.")
    if backend == "inductor" and not has_compiler():
        message = "'inductor' needs a C compiler, and none was found (cc, gcc, clang or CC)."
        report.error("dynamo_backend", message)
    if mode is not None and mode not in COMPILE_MODES:
        report.error("dynamo_mode", not_one_of(mode, COMPILE_MODES))
    elif mode is not None and backend in ("aot_eager", "cudagraphs"):
        message = f"{mode!r} is a mode of inductor; dynamo_backend is {backend!r}."
        report.error("dynamo_mode", message)
