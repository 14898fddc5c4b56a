"""Builds the configured optimizer, and chooses the kernel of its updates."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from simpletuner.config.optimizers import (
    BETAS,
    OPTIMIZERS,
    optimizer_name,
    optimizer_settings,
    update_kernel,
)
from simpletuner.config.schema import OptimizerConfig, OptimizerName
from simpletuner.config.speed import has_compiler
from simpletuner.errors import ConfigError, Problem
from simpletuner.training.own_optimizers import DecayingSquares
from simpletuner.training.sharding import is_shard

# Parameter group key: name of the technique whose module the group holds.
OWNER = "owner"
# Parameter group key: factor on the learning rate of this group.
RATE_RATIO = "rate_ratio"
# Parameter group key: seed of the next update, for optimizers with stochastic rounding.
SEED = "seed"
# Parameter group keys that select the library's kernel; without any, it loops over the weights.
KERNEL_KEYS = ("fused", "foreach", "triton")


def build_optimizer(
    params: Iterable[nn.Parameter],
    config: OptimizerConfig,
    mixed_precision: str,
    learning_rate: float,
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
    faster: Sequence[nn.Parameter] = (),
    ratio: float | None = None,
) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters, ready for its first step.

    Args:
        params: float32, or bf16 with `OptimizerSpec.keeps_bf16`.
        learning_rate: initial rate; `optimizer_step` sets `lr` of every group before each step.
        modules: modules of techniques, each trained in a separate parameter group.
        faster: parameters with a higher learning rate.
        ratio: factor on their learning rate.

    Raises:
        ConfigError: the library rejects a value.
    """
    name = optimizer_name(config, mixed_precision)
    spec = OPTIMIZERS[name]
    factory = pkgutil.resolve_name(spec.factory)
    arguments: dict[str, Any] = {**optimizer_settings(config, mixed_precision), **spec.constants}
    betas = tuple(arguments.pop(key) for key in BETAS if key in arguments)
    if betas:
        arguments["betas"] = betas  # as the libraries expect

    trained = list(params)
    in_faster_group = {*faster}
    in_first_group = [weight for weight in trained if weight not in in_faster_group]
    try:
        optimizer: torch.optim.Optimizer = factory(in_first_group, lr=learning_rate, **arguments)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError([Problem("optimizer_config", f"{name} refuses it: {error}")]) from error
    if faster:
        optimizer.add_param_group({"params": list(faster), RATE_RATIO: ratio})
    for owner, module in modules.items():
        optimizer.add_param_group({"params": list(module.parameters()), OWNER: owner})
    _choose_kernel(optimizer, name, trained)
    if spec.schedule_free:
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _choose_kernel(
    optimizer: torch.optim.Optimizer, name: OptimizerName, trained: Sequence[nn.Parameter]
) -> None:
    """Set the kernel chosen by `update_kernel` in the parameter groups, which checkpoints store."""
    kernel = update_kernel(
        name,
        device=trained[0].device.type,
        weights=len(trained),
        numbers=sum(weight.numel() for weight in trained),
        sharded=any(is_shard(weight) for weight in trained),
        triton=runs_triton(trained),
        widened=has_wide_moment(optimizer, optimizer.param_groups[0]),
    )
    if kernel is None:  # the library chooses
        return
    for group in optimizer.param_groups:
        group_kernel = kernel
        if OWNER in group and kernel == "foreach":
            # A technique's module may have no gradient in a step, for which optimi's foreach fails.
            group_kernel = "loop"
        for option in kernel_options(group):
            group[option] = option == group_kernel


def runs_triton(params: Sequence[nn.Parameter]) -> bool:
    """Whether optimi's Triton kernels can run for these parameters.

    By default, optimi uses them even without a compiler, and fails. They need whole parameters, so
    parameters must not be sharded.
    """
    if any(not weight.is_cuda or is_shard(weight) for weight in params):
        return False
    if not torch.cuda.is_bf16_supported():
        return False
    return has_compiler() and importlib.util.find_spec("triton") is not None


def kernel_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a parameter group that select a kernel."""
    return {key: group[key] for key in KERNEL_KEYS if key in group}


def has_wide_moment(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the second moment of a weight in the group is wider than the weight."""
    if not isinstance(optimizer, DecayingSquares):
        return False
    return any(optimizer.is_wide(group, weight) for weight in group["params"])


@contextmanager
def sampling_weights(optimizer: Any) -> Iterator[None]:
    """A context with the weights for sampling and publishing; restores the training weights.

    They differ only for schedule-free optimizers, which compute gradients at one point while the
    result is the average of another sequence (Defazio et al., arXiv 2405.15682). Switching back and
    forth would round the last bit, so a copy of the training weights is restored instead.
    """
    if not hasattr(optimizer, "eval"):  # only schedule-free optimizers have it
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, weights in zip(parameters, kept, strict=True):
                parameter.copy_(weights)
