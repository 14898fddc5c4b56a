"""Kernels of dense self-attention from packages (`attention_mechanism`).

Without one, torch takes the first of its own kernels that supports a call, in a fixed order: flash attention (16 bits,
no mask, compute capability 8.0), memory-efficient attention, plain products. `prepare_machine` disables cuDNN.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from simpletuner.config.precision import transformer_dtype
from simpletuner.config.schema import PrecisionConfig
from simpletuner.config.speed import ATTENTION_PACKAGES, AttentionPackage
from simpletuner.errors import ConfigError, Problem
from simpletuner.models.blocks import AttentionKernel, torch_attention


def activate_attention(config: PrecisionConfig, device: torch.device) -> None:
    """Check that `attention_mechanism` runs on a device, and give torch the flash attention that it names.

    FlashAttention 3 and 4 replace torch's own in the whole process, under the names of torch's operations. Therefore
    activation checkpointing keeps their results like torch's.

    Raises:
        ConfigError: the device or dtype is not supported, or the package does not work.
    """
    if current_flash_attention_impl() is not None:  # of an earlier run in this process
        restore_flash_attention_impl()
    mechanism = config.attention_mechanism
    package = ATTENTION_PACKAGES.get(mechanism)
    if package is None:
        return
    problems = [
        Problem("attention_mechanism", f"{mechanism!r} {message} Use diffusers.")
        for message in _unsupported(package, transformer_dtype(config), device)
    ]
    if problems:
        raise ConfigError(problems)
    try:
        if package.torch_name:
            activate_flash_attention_impl(package.torch_name)
        else:
            attention_kernel(mechanism)
    # Built for another torch or CUDA, or another version than expected.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        message = f"{mechanism!r} is installed, but cannot be used ({error}). Use diffusers."
        raise ConfigError([Problem("attention_mechanism", message)]) from error


def _unsupported(package: AttentionPackage, dtype: str, device: torch.device) -> Iterator[str]:
    """What a package lacks for a device and a dtype."""
    if device.type != "cuda" or dtype == "fp32":
        yield "needs a CUDA GPU and mixed_precision bf16."
        return
    if not package.capabilities:
        return
    major, minor = torch.cuda.get_device_capability(device)
    # ROCm reports numbers of its own under the same name.
    if torch.version.hip or major not in package.capabilities:
        name = "an AMD GPU" if torch.version.hip else f"{major}.{minor}"
        needed = " or ".join(f"{number}.x" for number in package.capabilities)
        yield f"needs an NVIDIA GPU of compute capability {needed}, not {name}."


def attention_kernel(mechanism: str) -> AttentionKernel:
    """The attention function of an `attention_mechanism`, `B S H D` in and out.

    Raises:
        ImportError, AttributeError: the package lacks the function.
    """
    package = ATTENTION_PACKAGES.get(mechanism)
    if package is None or not package.function:
        return torch_attention
    function: Any = pkgutil.resolve_name(package.function)
    if torch.are_deterministic_algorithms_enabled():
        function = partial(function, deterministic=True)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Some releases also return the log-sum-exp.
        result = function(query, key, value)
        return result[0] if isinstance(result, tuple) else result

    return kernel
