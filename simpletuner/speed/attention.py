"""Kernels of dense self-attention from packages (`attention_mechanism`).

Without one, torch takes the first of its own kernels that supports a call, in a fixed order: flash
attention (16 bits, no mask, compute capability 8.0), memory-efficient attention, plain products.
`prepare_machine` disables cuDNN.
"""

from __future__ import annotations

import pkgutil
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
    """Give torch the flash attention that `attention_mechanism` names, before weights are loaded.

    FlashAttention 3 and 4 replace torch's own in the whole process, under the names of torch's
    operations. Therefore activation checkpointing keeps their results like torch's.

    Raises:
        ConfigError: the package does not support the device or the dtype, or does not work.
    """
    if current_flash_attention_impl() is not None:  # of an earlier run in this process
        restore_flash_attention_impl()
    mechanism = config.attention_mechanism
    package = ATTENTION_PACKAGES.get(mechanism)
    if package is None:
        return
    reason = _unsupported(package, transformer_dtype(config), device)
    if not reason:
        reason = _load(mechanism, package)
    if reason:
        message = f"{mechanism!r} {reason} Use diffusers."
        raise ConfigError([Problem("attention_mechanism", message)])


def _unsupported(package: AttentionPackage, dtype: str, device: torch.device) -> str:
    """Why a package cannot be used for a device and a dtype; empty if it can."""
    if device.type != "cuda" or dtype == "fp32":
        return "needs a CUDA GPU and mixed_precision bf16."
    if not package.capabilities:
        return ""
    needed = " or ".join(f"{number}.x" for number in package.capabilities)
    # As compute capabilities, ROCm reports its own numbers.
    if torch.version.hip:
        return f"needs an NVIDIA GPU of compute capability {needed}, not an AMD GPU."
    major, minor = torch.cuda.get_device_capability(device)
    if major not in package.capabilities:
        return f"needs an NVIDIA GPU of compute capability {needed}, not {major}.{minor}."
    return ""


def _load(mechanism: str, package: AttentionPackage) -> str:
    """Import a package and register its kernel; returns why that failed, empty if it worked."""
    try:
        if package.torch_name:
            activate_flash_attention_impl(package.torch_name)
        else:
            attention_kernel(mechanism)
    # Built for another torch or CUDA, or another version than expected.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"is installed, but cannot be used ({error})."
    return ""


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
