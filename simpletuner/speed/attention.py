"""Chooses the kernel for dense self-attention in fast blocks."""

from __future__ import annotations

import logging
import math
import pkgutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from simpletuner.config.speed import ATTENTION_PACKAGES, is_installed
from simpletuner.errors import ConfigError, Problem
from simpletuner.models.blocks import (
    DEVICE_FAILURES,
    KERNELS,
    AttentionKernel,
    KernelChoices,
    milliseconds,
    torch_attention,
)
from simpletuner.speed.recomputation import outside_checkpoints

# In torch's order of preference, unless cuDNN is faster.
REST = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
ORDERS = {
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *REST),
    "cuDNN": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *REST),
}
# Kernels round differently, so a later kernel must be clearly faster to replace the first.
MARGIN = 0.97

# Packages that can replace torch's flash attention, by torch's names.
NEWER_FLASH = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
OWN_FLASH, FLASH_CALL = "torch's", "flash attention"

logger = logging.getLogger(__name__)

Choose = Callable[[Tensor, Tensor, Tensor], AttentionKernel]


def kernel_chooser(mechanism: str, device: torch.device, dtype: torch.dtype) -> Choose | None:
    """The function that chooses the kernel of a call; None leaves the choice to torch, as on a CPU.

    Raises:
        ConfigError: the mechanism needs a CUDA GPU and a 16-bit dtype.
    """
    if mechanism in ATTENTION_PACKAGES:
        if device.type != "cuda" or dtype == torch.float32:
            message = f"{mechanism!r} needs a CUDA GPU and mixed_precision bf16; use diffusers."
            raise ConfigError([Problem("attention_mechanism", message)])
        kernel = load_kernel(mechanism)
        return lambda query, key, value: kernel
    # Neither flash nor cuDNN supports float32. With `deterministic`, no kernel is timed: torch then prefers flash,
    # whose backward pass sums in a fixed order, and never uses cuDNN, which is disabled by default.
    times = device.type == "cuda" and dtype != torch.float32 and not torch.are_deterministic_algorithms_enabled()
    return MeasuredChoice() if times else None


def load_kernel(mechanism: str) -> AttentionKernel:
    """The attention function of an installed package, `B S H D` in and out."""
    _, name = ATTENTION_PACKAGES[mechanism]
    function: Any = pkgutil.resolve_name(name)
    if torch.are_deterministic_algorithms_enabled():
        function = partial(function, deterministic=True)

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Some releases also return the log-sum-exp.
        result = function(query, key, value)
        return result[0] if isinstance(result, tuple) else result

    return kernel


class MeasuredChoice:
    """The fastest kernel per shape: torch's flash or cuDNN's, timed with the backward pass if there is one.

    If FlashAttention 3 or 4 is installed and faster at the first shape with a backward pass, it replaces torch's flash
    in the whole process. Choices are stored.
    """

    def __init__(self, choices: KernelChoices = KERNELS) -> None:
        self.choices = choices
        self._kernels: dict[Any, AttentionKernel] = {}
        self._flash_is_chosen = not installed_flash()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionKernel:
        call = query.shape, query.dtype, torch.is_grad_enabled()
        if call not in self._kernels:
            self._kernels[call] = self._choose(query, key, value)
        return self._kernels[call]

    def _choose(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionKernel:
        inputs, trains = (query, key, value), torch.is_grad_enabled()
        # First choose the flash attention that competes with cuDNN, since it is process-wide.
        if not self._flash_is_chosen and (trains or self.choices.knows(query.device, FLASH_CALL)):
            among = (OWN_FLASH, *installed_flash())
            serve(self.choices.choose(query.device, FLASH_CALL, among, lambda: fastest_flash(among, *inputs)))
            self._flash_is_chosen = True
        batch, tokens, heads, width = query.shape
        directions = "forward and backward" if trains else "forward"
        name = self.choices.choose(
            query.device,
            f"attention {directions}, {batch} x {tokens} tokens, {heads} heads of {width}, {str(query.dtype)[6:]}",
            ORDERS,
            lambda: fastest_kernel(*inputs),
        )
        return partial(attend_in_order, ORDERS[name])


def attend_in_order(backends: Sequence[SDPBackend], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by the first kernel that supports the inputs."""
    with sdpa_kernel([*backends], set_priority=True):
        return torch_attention(query, key, value)


def fastest_kernel(*inputs: Tensor) -> str:
    """cuDNN's kernel if it is clearly faster."""
    flash, cudnn = (measure(each, *inputs) for each in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION))
    return "cuDNN" if cudnn < MARGIN * flash else "flash"


def fastest_flash(among: Sequence[str], *inputs: Tensor) -> str:
    """A package's kernel if it is clearly faster than all previous kernels."""
    best, chosen = math.inf, among[0]
    for name in among:
        taken = measure(SDPBackend.FLASH_ATTENTION, *inputs) if serve(name) else math.inf
        if taken < MARGIN * best:
            best, chosen = taken, name
    logger.info("Flash attention is %s, timed at %d tokens.", chosen, inputs[0].shape[1])
    return chosen


def installed_flash() -> list[str]:
    """Installed newer flash attentions, by torch's names; empty if this torch cannot run them."""
    known = hasattr(torch.nn.attention, "activate_flash_attention_impl")
    return [name for name, module in NEWER_FLASH.items() if known and is_installed(module)]


def serve(name: str) -> bool:
    """Use an installed flash attention, or torch's, for all flash attention of the process.

    torch runs it under the names of its built-in operations, so checkpointing keeps its results too.

    Returns:
        whether it works.
    """
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    try:
        if name != OWN_FLASH:
            torch.nn.attention.activate_flash_attention_impl(name)
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        logger.warning("%s is installed but cannot be used: %s", name, error)
        return False
    return True


def measure(backend: SDPBackend, *call: Tensor) -> float:
    """Milliseconds of a forward pass on a CUDA device, plus a backward pass unless gradients are disabled; infinite if
    the kernel does not support the call."""
    inputs = [tensor.detach().requires_grad_() for tensor in call]

    def run() -> None:
        out = torch_attention(*inputs)
        if torch.is_grad_enabled():
            torch.autograd.grad(out, inputs, out.detach())

    with sdpa_kernel(backend), outside_checkpoints():
        try:
            return milliseconds(run)
        except DEVICE_FAILURES:
            raise
        except RuntimeError:  # no enabled kernel supports these shapes, or cuDNN fails in either direction
            return math.inf
