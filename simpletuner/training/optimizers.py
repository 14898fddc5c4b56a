"""Building the optimizer that a config names."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from simpletuner.config.optimizer_table import OPTIMIZERS, Setting
from simpletuner.config.optimizers import BETAS, check_optimizer, optimizer_name, optimizer_settings
from simpletuner.config.schema import OptimizerConfig
from simpletuner.config.speed import has_compiler
from simpletuner.errors import ConfigError, Problem


def build_optimizer(
    params: Iterable[nn.Parameter], config: OptimizerConfig, *, mixed_precision: str, learning_rate: float
) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters, ready for its first step.

    Args:
        params: bf16 only where `keeps_bf16_weights` says so, else float32.
        learning_rate: what the first step would use; the loop sets `lr` of every group before each step.

    Raises:
        ConfigError: the keys are wrong or a package is missing (see `check_optimizer`), or the library refuses a value.
    """
    problems = [problem for problem in check_optimizer(config, mixed_precision) if problem.fatal]
    if problems:
        raise ConfigError(problems)
    name = optimizer_name(config, mixed_precision)
    spec = OPTIMIZERS[name]
    module, _, class_name = spec.factory.partition(":")
    factory = getattr(importlib.import_module(module), class_name)
    trained = list(params)
    arguments = {**_arguments(optimizer_settings(config, mixed_precision)), **spec.constants}
    if module == "optimi":
        arguments["triton"] = runs_triton(trained)
    try:
        optimizer: torch.optim.Optimizer = factory(trained, lr=learning_rate, **arguments)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError([Problem("optimizer_config", f"{name} refuses it: {error}")]) from error
    if spec.schedule_free:
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def runs_triton(params: Sequence[nn.Parameter]) -> bool:
    """Whether optimi updates these with its Triton kernels: it would also where they cannot be compiled."""
    on_gpu = all(each.is_cuda for each in params) and torch.cuda.is_bf16_supported()
    return on_gpu and has_compiler() and importlib.util.find_spec("triton") is not None


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take up the state of an optimizer, with this machine's way to compute instead of the saved one's.

    Raises:
        ValueError: it belongs to other parameters.
    """
    ways = [group.get("triton") for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, way in zip(optimizer.param_groups, ways, strict=True):
        if "triton" in group:
            group["triton"] = way


@contextmanager
def sampling_weights(optimizer: torch.optim.Optimizer, config: OptimizerConfig, mixed_precision: str) -> Iterator[None]:
    """The weights as they should be sampled with and published; afterwards those that training continues from.

    Only schedule-free optimizers tell the two apart: gradients are taken at one point and the average of another
    sequence is the result (Defazio et al., arXiv 2405.15682). The switch and back rounds in the last bit, so the
    weights are kept and put back.
    """
    if not OPTIMIZERS[optimizer_name(config, mixed_precision)].schedule_free:
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.train()  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter, weights in zip(parameters, kept, strict=True):
                parameter.copy_(weights)


def _arguments(settings: dict[str, Setting]) -> dict[str, Any]:
    """Settings as the libraries take them: the betas as one tuple."""
    betas = tuple(settings[name] for name in BETAS if name in settings)
    others = {name: value for name, value in settings.items() if name not in BETAS}
    return {**others, "betas": betas} if betas else others
