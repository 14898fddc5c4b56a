"""Chooses the kernel for the dense self-attention of fast blocks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletuner.config.speed import ATTENTION_PACKAGES
from simpletuner.errors import ConfigError, Problem
from simpletuner.models.blocks import AttentionKernel, torch_attention
from simpletuner.speed.recomputation import outside_checkpoints

# Torch's own order of preference, unless a measurement reverses it.
FLASH_FIRST = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
REST = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
# cuDNN rounds differently from flash, so it must be clearly faster to be chosen.
MARGIN = 0.97

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
    """cuDNN or flash, whichever was faster in forward plus backward at the largest number of tokens so far."""

    def __init__(self) -> None:
        self.tokens = 0
        self.order = FLASH_FIRST

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionKernel:
        if query.shape[1] > self.tokens and torch.is_grad_enabled():
            self.tokens = query.shape[1]
            flash, cudnn = (measure(backend, query, key, value) for backend in FLASH_FIRST)
            self.order = FLASH_FIRST[::-1] if cudnn < MARGIN * flash else FLASH_FIRST
        return self._run

    def _run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel([*self.order, *REST], set_priority=True):
            return torch_attention(query, key, value)


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
            except RuntimeError:  # no enabled kernel supports these shapes, or cuDNN fails in either direction
                return float("inf")
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    return min(times)
