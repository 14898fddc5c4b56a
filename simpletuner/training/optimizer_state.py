"""Restores the saved state of an optimizer exactly."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from simpletuner.config.optimizers import BETAS, OptimizerSpec
from simpletuner.training.own_optimizers import DecayingSquares
from simpletuner.training.release import HostState, State
from simpletuner.training.update import OWNER, has_wide_moment, kernel_options, runs_triton

logger = logging.getLogger(__name__)


def load_state(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    spec: OptimizerSpec,
    host: HostState | None = None,
) -> None:
    """Restore the state of an optimizer exactly, and keep the saved kernels if they run here.

    Settings, such as weight decay, are those that the optimizer was built with, not the saved ones.
    The group of a module that was not saved starts now; a saved group whose module is gone is
    dropped.

    Args:
        host: receives the state of all weights except those of techniques' modules.

    Raises:
        ValueError: the state belongs to other parameters, or to another value of a lasting setting.
    """
    # This machine's kernels, before the saved groups overwrite them.
    chosen = [kernel_options(group) for group in optimizer.param_groups]
    groups = _saved_groups(optimizer, state["param_groups"], spec)
    # Without the state, which torch would round to the weights' dtypes and move to the device as a
    # whole.
    optimizer.load_state_dict({"param_groups": groups, "state": {}})
    for group, numbered in zip(optimizer.param_groups, groups, strict=True):
        for weight, number in zip(group["params"], numbered["params"], strict=True):
            saved = state["state"].get(number)
            if not saved:
                continue
            saved = _with_current_settings(saved, optimizer, group, weight, spec)
            if host is not None and OWNER not in group:
                host.load(weight, _placed(saved, group, weight, on_host=True))
            else:
                optimizer.state[weight] = _placed(saved, group, weight, on_host=False)
    _replace_missing_kernels(optimizer, chosen)


def _with_current_settings(
    state: State,
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    weight: Tensor,
    spec: OptimizerSpec,
) -> State:
    """The saved state of a weight, in which copies of the group's settings are replaced."""
    repeated = {name: group[name] for name in spec.settings if name in state}
    current = {**state, **repeated}
    if isinstance(optimizer, DecayingSquares):
        dtype = torch.float32 if optimizer.is_wide(group, weight) else weight.dtype
        current["exp_avg_sq"] = state["exp_avg_sq"].to(dtype)
    if "eps_sq" in state:  # of StableAdamW
        current["eps_sq"] = torch.full_like(state["eps_sq"], group["eps"] ** 2)
    return current


def _placed(
    state: State, group: Mapping[str, Any], weight: Tensor, *, on_host: bool
) -> dict[str, Any]:
    """The saved state of a weight, from the CPU to the device where its update reads it."""
    placed = {}
    for key, value in state.items():
        stays_on_cpu = on_host
        if key == "step":
            # torch's fused kernels keep step counts on the device, all other kernels on the CPU.
            stays_on_cpu = not group.get("fused")
        if not stays_on_cpu:
            # A moment may be quantised, or nested.
            value = tree_map_only(Tensor, lambda tensor: tensor.to(weight.device), value)
        placed[key] = value
    return placed


def _replace_missing_kernels(
    optimizer: torch.optim.Optimizer, chosen: Sequence[Mapping[str, object]]
) -> None:
    """Replace saved kernels that cannot run by this machine's choice, with a warning."""
    missing = False
    for group, kernel in zip(optimizer.param_groups, chosen, strict=True):
        if not group.get("triton"):
            continue
        if not runs_triton(group["params"]):
            group.update(kernel)
            missing = True
        elif not kernel.get("triton") and has_wide_moment(optimizer, group):
            group.update(kernel)
    if missing:
        logger.warning(
            "The checkpoint's weights were updated by Triton kernels, which need a GPU with bf16, "
            "triton, a C compiler and unsharded weights. Other kernels continue; they round "
            "differently."
        )


def _saved_groups(
    optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]], spec: OptimizerSpec
) -> list[dict[str, Any]]:
    """The optimizer's groups, in its order, as saved or new, with the settings of the optimizer.

    Raises:
        ValueError: another number of groups was saved, or a lasting setting differs.
    """
    groups = [group for group in saved if OWNER not in group]
    by_owner = {group[OWNER]: group for group in saved if OWNER in group}
    built = optimizer.state_dict()["param_groups"]
    for group in built:
        if OWNER in group:
            # State dicts number parameters from 0, so negative numbers match no saved state.
            new = {**group, "params": [-1 - number for number in group["params"]]}
            groups.append(by_owner.get(group[OWNER], new))
    if len(groups) != len(built):
        raise ValueError(f"it has {len(groups)} groups of parameters, not {len(built)}")
    return [_with_settings(group, new, spec) for group, new in zip(groups, built, strict=True)]


def _with_settings(
    saved: dict[str, Any], new: Mapping[str, Any], spec: OptimizerSpec
) -> dict[str, Any]:
    """A saved group with the settings of a new one; only what training has counted stays as saved.

    Raises:
        ValueError: a lasting setting differs.
    """
    for name in spec.lasting:
        before = _setting(saved, name)
        now = _setting(new, name)
        if before != now:
            raise ValueError(f"its {name} was {before}, not {now}")
    settings = {key: new[key] for key in ("betas", *spec.settings) if key in new}
    return {**saved, **settings}


def _setting(group: Mapping[str, Any], name: str) -> Any:
    """A setting in a parameter group, where most libraries keep the betas in one tuple."""
    if name in BETAS and "betas" in group:
        return group["betas"][BETAS.index(name)]
    return group[name]
