"""Chooses the kernel for the dense self-attention of fast blocks."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletuner.config.speed import ATTENTION_PACKAGES, is_installed
from simpletuner.errors import ConfigError, Problem
from simpletuner.models.blocks import DEVICE_FAILURES, AttentionKernel, torch_attention
from simpletuner.speed.recomputation import outside_checkpoints

# Torch's own order of preference, unless a measurement reverses it.
FLASH_FIRST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
REST = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# Kernels round differently, so one after the first must be clearly faster to be chosen.
MARGIN = 0.97

# Packages that can take the place of torch's flash attention, by torch's name for them.
NEWER_FLASH = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}

logger = logging.getLogger(__name__)

Choose = Callable[[Tensor, Tensor, Tensor], AttentionKernel]


def kernel_chooser(mechanism: str, device: torch.device, dtype: torch.dtype) -> Choose | None:
    """How to choose the kernel of a call; None leaves the choice to torch, as on a CPU.

    Raises:
        ConfigError: the mechanism needs a CUDA GPU and 16-bit numbers.
    """
    if mechanism in ATTENTION_PACKAGES:
        if device.type != "cuda" or dtype == torch.float32:
            message = f"{mechanism!r} needs a CUDA GPU and mixed_precision bf16; use diffusers."
            raise ConfigError([Problem("attention_mechanism", message)])
        kernel = load_kernel(mechanism)
        return lambda query, key, value: kernel
    # Neither flash nor cuDNN supports float32.
    return MeasuredChoice() if device.type == "cuda" and dtype != torch.float32 else None


def load_kernel(mechanism: str) -> AttentionKernel:
    """The attention function of an installed package, `B S H D` in and out."""
    package = ATTENTION_PACKAGES[mechanism]
    function: Any = getattr(importlib.import_module(package.module), package.function)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = function(query, key, value)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    return kernel


class MeasuredChoice:
    """The fastest kernel in forward plus backward at the largest number of tokens so far: torch's flash, cuDNN's, or an
    installed FlashAttention 3 or 4, which then takes the place of torch's flash in the whole process."""

    def __init__(self) -> None:
        self.tokens = 0
        self.order = FLASH_FIRST

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionKernel:
        if query.shape[1] > self.tokens and torch.is_grad_enabled():
            self.tokens = query.shape[1]
            best = self._choose_flash(query, key, value)
            cudnn = measure(SDPBackend.CUDNN_ATTENTION, query, key, value)
            self.order = FLASH_FIRST[::-1] if cudnn < MARGIN * best else FLASH_FIRST
        return self._run

    def _choose_flash(self, query: Tensor, key: Tensor, value: Tensor) -> float:
        """Let the fastest flash attention serve the process; its milliseconds."""
        packages, chosen = installed_flash(), ""
        if packages:
            serve("")
        best = measure(SDPBackend.FLASH_ATTENTION, query, key, value)
        for name in packages:
            taken = measure(SDPBackend.FLASH_ATTENTION, query, key, value) if serve(name) else math.inf
            if taken < MARGIN * best:
                best, chosen = taken, name
        if packages:
            serve(chosen)
            logger.info("Attention of %d tokens: %s.", query.shape[1], chosen or "torch's own flash or cuDNN")
        return best

    def _run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel([*self.order, *REST], set_priority=True):
            return torch_attention(query, key, value)


def installed_flash() -> list[str]:
    """The newer flash attentions, by torch's names, that are installed; none for a torch that cannot run them."""
    known = hasattr(torch.nn.attention, "activate_flash_attention_impl")
    return [name for name, module in NEWER_FLASH.items() if known and is_installed(module)]


def serve(name: str) -> bool:
    """Let an installed flash attention, or torch's own (""), serve all flash attention of the process.

    torch then runs it under the names of its own operations, so its results are kept by checkpointing like theirs.

    Returns:
        Whether it works.
    """
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    try:
        if name:
            torch.nn.attention.activate_flash_attention_impl(name)
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        logger.warning("%s is installed but cannot be used: %s", name, error)
        return False
    return True


def measure(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, rounds: int = 3) -> float:
    """Milliseconds of a forward and backward pass on a CUDA device; infinite if the kernel does not support it."""
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    times = []
    with sdpa_kernel(backend), outside_checkpoints():
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            try:
                out = torch_attention(*inputs)
                torch.autograd.grad(out, inputs, out.detach())
            except DEVICE_FAILURES:
                raise
            except RuntimeError:  # no enabled kernel supports these shapes, or cuDNN fails in either direction
                return math.inf
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    return min(times)
