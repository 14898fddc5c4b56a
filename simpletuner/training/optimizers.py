"""Builds the configured optimizer, and computes the learning rate of each step."""

from __future__ import annotations

import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

import optimi
import torch
from optimi.optimizer import OptimiOptimizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from simpletuner.config.optimizers import (
    BETAS,
    OPTIMIZERS,
    OptimizerSpec,
    is_lost_in_bf16,
    optimizer_name,
    optimizer_settings,
    update_kernel,
)
from simpletuner.config.schema import OptimizerConfig, OptimizerName
from simpletuner.config.speed import has_compiler
from simpletuner.errors import ConfigError, Problem
from simpletuner.training.ema import in_bundles
from simpletuner.training.release import HostState, State
from simpletuner.training.sharding import is_part

# Parameter group key: name of the technique whose module the group holds.
OWNER = "owner"
# Parameter group key: factor on the learning rate of this group.
RATE_RATIO = "rate_ratio"
# Parameter group key: seed of the next update, for optimizers with stochastic rounding.
SEED = "seed"
# Parameter group keys that select the library's kernel; without any, it loops over the weights.
KERNEL_KEYS = ("fused", "foreach", "triton")

logger = logging.getLogger(__name__)


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
    name, trained = optimizer_name(config, mixed_precision), list(params)
    spec = OPTIMIZERS[name]
    factory = pkgutil.resolve_name(spec.factory)
    arguments: dict[str, Any] = {**optimizer_settings(config, mixed_precision), **spec.constants}
    if betas := tuple(arguments.pop(name) for name in BETAS if name in arguments):
        arguments["betas"] = betas  # as the libraries expect
    apart = {*faster}
    try:
        optimizer: torch.optim.Optimizer = factory(
            [weight for weight in trained if weight not in apart], lr=learning_rate, **arguments
        )
    except (ValueError, NotImplementedError) as error:
        raise ConfigError([Problem("optimizer_config", f"{name} refuses it: {error}")]) from error
    if faster:
        optimizer.add_param_group({"params": list(faster), RATE_RATIO: ratio})
    for owner, extra in modules.items():
        optimizer.add_param_group({"params": list(extra.parameters()), OWNER: owner})
    _choose_kernel(optimizer, name, trained)
    if spec.schedule_free:
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def _choose_kernel(optimizer: torch.optim.Optimizer, name: OptimizerName, trained: Sequence[nn.Parameter]) -> None:
    """Set the kernel chosen by `update_kernel` in the parameter groups, which checkpoints store."""
    kernel = update_kernel(
        name,
        trained[0].device.type,
        len(trained),
        sum(weight.numel() for weight in trained),
        sharded=any(map(is_part, trained)),
        triton=runs_triton(trained),
        widened=_has_wide_moment(optimizer, optimizer.param_groups[0]),
    )
    if kernel is None:  # the library chooses
        return
    for group in optimizer.param_groups:
        suited = kernel
        if OWNER in group and kernel == "foreach":
            # A technique's module may have no gradients in some steps, for which optimi's foreach fails.
            suited = "loop"
        group.update({key: key == suited for key in _kernel_of(group)})


def runs_triton(params: Sequence[nn.Parameter]) -> bool:
    """Whether optimi's Triton kernels can run; by default, optimi uses them even without a compiler, and fails.

    They need whole parameters, so parameters must not be sharded.
    """
    plain = all(weight.is_cuda and not is_part(weight) for weight in params)
    on_gpu = plain and torch.cuda.is_bf16_supported()
    return on_gpu and has_compiler() and importlib.util.find_spec("triton") is not None


def load_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], spec: OptimizerSpec, host: HostState | None = None
) -> None:
    """Restore the state of an optimizer exactly, and keep the saved kernels if they run here.

    Settings, such as weight decay, are those that the optimizer was built with, not the saved ones. The group of a
    module that was not saved starts now; a saved group whose module is gone is dropped.

    Args:
        host: receives the state of all weights except those of techniques' modules.

    Raises:
        ValueError: the state belongs to other parameters, or to another value of a lasting setting.
    """
    # This machine's kernels, before the saved groups overwrite them.
    chosen = [*map(_kernel_of, optimizer.param_groups)]
    groups = _saved_groups(optimizer, state["param_groups"], spec)
    # Without the state, which torch would round to the weights' dtypes and move to the device as a whole.
    optimizer.load_state_dict({"param_groups": groups, "state": {}})
    numbers = (number for group in groups for number in group["params"])
    weights = ((group, weight) for group in optimizer.param_groups for weight in group["params"])
    for number, (group, weight) in zip(numbers, weights, strict=True):
        if not (saved := state["state"].get(number)):
            continue
        saved = _renewed(optimizer, saved, group, weight, spec)
        if host is not None and OWNER not in group:
            host.load(weight, _placed(saved, group, weight, on_host=True))
        else:
            optimizer.state[weight] = _placed(saved, group, weight, on_host=False)
    _replace_missing_kernels(optimizer, chosen)


def _renewed(
    optimizer: torch.optim.Optimizer, state: State, group: Mapping[str, Any], weight: Tensor, spec: OptimizerSpec
) -> State:
    """The saved state of a weight, with what it repeats of the group's settings as they are now."""
    repeated = {name: group[name] for name in spec.settings if name in state}
    renewed = {**state, **repeated}
    if isinstance(optimizer, DecayingSquares):
        dtype = torch.float32 if optimizer.is_wide(group, weight) else weight.dtype
        renewed["exp_avg_sq"] = state["exp_avg_sq"].to(dtype)
    if "eps_sq" in state:  # of StableAdamW
        renewed["eps_sq"] = torch.full_like(state["eps_sq"], group["eps"] ** 2)
    return renewed


def _placed(state: State, group: Mapping[str, Any], weight: Tensor, *, on_host: bool) -> dict[str, Any]:
    """The saved state of a weight, on the device where its update reads it."""

    def placed(key: str, value: Any) -> Any:
        # torch's fused kernels keep step counts on the device, all other kernels on the CPU.
        stays = not group.get("fused") if key == "step" else on_host
        return value if stays else tree_map_only(Tensor, lambda each: each.to(weight.device), value)

    return {key: placed(key, value) for key, value in state.items()}


def _kernel_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in KERNEL_KEYS if key in group}


def _replace_missing_kernels(optimizer: torch.optim.Optimizer, chosen: Sequence[Mapping[str, object]]) -> None:
    """Replace saved kernels that cannot run by this machine's choice, with a warning."""
    missing = False
    for group, kernel in zip(optimizer.param_groups, chosen, strict=True):
        if not group.get("triton"):
            continue
        if not runs_triton(group["params"]):
            group.update(kernel)
            missing = True
        elif not kernel.get("triton") and _has_wide_moment(optimizer, group):
            group.update(kernel)
    if missing:
        logger.warning(
            "The checkpoint's weights were updated by Triton kernels, which need a GPU with bf16, triton, a C compiler "
            "and unsharded weights. Other kernels continue; they round differently."
        )


def _has_wide_moment(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether the second moment of a weight in the group is wider than the weight."""
    if not isinstance(optimizer, DecayingSquares):
        return False
    return any(optimizer.is_wide(group, weight) for weight in group["params"])


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


def _with_settings(saved: dict[str, Any], new: Mapping[str, Any], spec: OptimizerSpec) -> dict[str, Any]:
    """A saved group with the settings of a new one; only what training has counted stays as saved.

    Raises:
        ValueError: a lasting setting differs.
    """
    for name in spec.lasting:
        before, now = _setting(saved, name), _setting(new, name)
        if before != now:
            raise ValueError(f"its {name} was {before}, not {now}")
    settings = {key: new[key] for key in ("betas", *spec.settings) if key in new}
    return {**saved, **settings}


def _setting(group: Mapping[str, Any], name: str) -> Any:
    """A setting in a parameter group, where most libraries keep the betas in one tuple."""
    if name in BETAS and "betas" in group:
        return group["betas"][BETAS.index(name)]
    return group[name]


@contextmanager
def sampling_weights(optimizer: Any) -> Iterator[None]:
    """A context with the weights for sampling and publishing in the parameters; restores the training weights on exit.

    They differ only for schedule-free optimizers, which compute gradients at one point while the result is the average
    of another sequence (Defazio et al., arXiv 2405.15682). Switching back and forth would round the last bit, so a copy
    of the training weights is restored instead.
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


# A key that only Muon's parameter groups have.
MUON_MARK = "ns_steps"


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (orthogonalised momentum) for matrices, AdamW for vectors and convolutions.

    Muon's updates are scaled to the size of AdamW's (Liu et al., arXiv 2502.16982, section 2.2), so that one learning
    rate and one weight decay suit both. Both parts share one list of parameter groups and one state.

    Args:
        params: trained parameters.
        lr: learning rate of both.
        betas, eps: parameters of AdamW.
        weight_decay: decoupled weight decay of both.
        momentum, nesterov: parameters of Muon.
        ns_steps: iterations of Muon's Newton-Schulz method.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        weights = list(params)
        muon = partial(torch.optim.Muon, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
        self._adamw = partial(torch.optim.AdamW, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._parts: list[torch.optim.Optimizer] = []
        if matrices := [weight for weight in weights if weight.ndim == 2]:
            # Scales updates by .2 sqrt(max(out, in)), the usual size of AdamW's updates.
            self._parts.append(muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"))
        if rest := [weight for weight in weights if weight.ndim != 2]:
            self._parts.append(self._adamw(rest))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that AdamW updates, whatever their shape."""
        if "lr" not in param_group:  # groups from the base class's `__init__` have lr
            part = self._adamw(param_group["params"])
            param_group = {**part.param_groups[0], **param_group}
            if not any(isinstance(each, torch.optim.AdamW) for each in self._parts):
                self._parts.append(part)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters with a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for part in self._parts:
            # `load_state_dict` replaces groups and state, so pass the current ones to the parts every time.
            is_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [group for group in self.param_groups if (MUON_MARK in group) == is_muon]
            part.state = self.state
            part.step()
        return loss


class DecayingSquares(OptimiOptimizer):
    """An optimizer of optimi's Adam family whose second moment is float32 if it could not decay in bf16.

    The second moment v is a moving average of squared gradients, of which a step keeps beta2 * v. optimi stores v in
    the weight's dtype. bf16 has 8 significant bits: a relative change below half the spacing of its numbers, 2**-9 to
    2**-8, is rounded away. With 1 - beta2 below 2**-8 (such as beta2 .999), beta2 * v may round back to v, so v only
    grows, and updates become too small. In this case, v is float32.
    """

    def step(self, closure: Callable[[], Any] | None = None, param: Tensor | None = None) -> Any:
        """Update all weights."""
        with ExitStack() as self._updating:
            return super().step(closure, param)

    def _init_group(self, group: dict[str, Any], *lists: Any, **named: Any) -> None:
        self._updating.close()  # it would slow down the loop over the next group's weights
        super()._init_group(group, *lists, **named)
        if group["foreach"]:
            self._updating.enter_context(WideSquares())

    def is_wide(self, group: Mapping[str, Any], weight: Tensor) -> bool:
        """Whether a weight's second moment is wider than the weight; optimi's Triton kernels would round it."""
        return weight.dtype == torch.bfloat16 and is_lost_in_bf16(group.get("beta3", group["beta2"]))

    def _init_state(self, group: dict[str, Any], state: dict[str, Any], param: Tensor) -> None:
        super()._init_state(group, state, param)
        if self.is_wide(group, param):
            state["exp_avg_sq"] = state["exp_avg_sq"].float()


class WideSquares(TorchFunctionMode):
    """Adds the squares of narrow gradients to wide averages in a few launches.

    torch's foreach operations launch once per weight if dtypes are mixed, so gradients are first widened, one bundle at
    a time.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is not torch._foreach_addcmul_ or args[0][0].dtype == args[1][0].dtype:
            return func(*args, **named)
        gradients = iter(args[1])  # both factors
        for means in in_bundles(args[0]):
            factors = [*islice(gradients, len(means))]
            if len(means) > 1:  # a single large weight would need its memory twice
                narrow, factors = factors, [torch.empty_like(each) for each in means]
                torch._foreach_copy_(factors, narrow)
            func(means, factors, factors, **named)
        return None


class AdamW(DecayingSquares, optimi.AdamW):
    """optimi's AdamW with a second moment that decays."""


class Adam(DecayingSquares, optimi.Adam):
    """optimi's Adam with a second moment that decays."""


class Ranger(DecayingSquares, optimi.Ranger):
    """optimi's Ranger with a second moment that decays."""


class RAdam(DecayingSquares, optimi.RAdam):
    """optimi's RAdam with a second moment that decays."""


class StableAdamW(DecayingSquares, optimi.StableAdamW):
    """optimi's StableAdamW with a second moment that decays."""


class Adan(DecayingSquares, optimi.Adan):
    """optimi's Adan with a second moment that decays."""
