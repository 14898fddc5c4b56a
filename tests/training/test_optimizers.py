"""Every optimizer trains with the configured numbers, and continues exactly after a save."""

from __future__ import annotations

import importlib.util
import inspect
import io
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, get_args

import optimi
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simpletuner.config.optimizers import (
    LARGE_WEIGHT,
    MANY_WEIGHTS,
    OPTIMIZERS,
    check_optimizer,
    optimizer_name,
    optimizer_settings,
    update_kernel,
)
from simpletuner.config.schema import OptimizerConfig, OptimizerName
from simpletuner.errors import ConfigError, NoEffect, Problem
from simpletuner.training import ema, optimizer_state, own_optimizers, update
from simpletuner.training.optimizer_state import load_state
from simpletuner.training.own_optimizers import MuonWithAdamW
from simpletuner.training.release import HostState
from simpletuner.training.update import (
    KERNEL_KEYS,
    build_optimizer,
    has_wide_moment,
    sampling_weights,
)
from tests.tools.peak_memory import Peak
from tests.tools.reports import found_by

NAMES = get_args(OptimizerName)
# torchao compiles its step, and bitsandbytes keeps its 8-bit states on a GPU.
HEAVY = ("ao-", "bnb-")


def is_installed(name: str) -> bool:
    package = OPTIMIZERS[name].package
    return package is None or importlib.util.find_spec(package.module) is not None


RUNNABLE = [name for name in NAMES if is_installed(name) and not name.startswith(HEAVY)]
# Kernels that run everywhere, although they are chosen on GPUs only.
CHOICES = [
    (name, kernel) for name in RUNNABLE for kernel in OPTIMIZERS[name].kernels if kernel != "triton"
]
DTYPES = [torch.float32, torch.bfloat16]


def test_every_optimizer_of_the_schema_has_a_spec() -> None:
    assert set(OPTIMIZERS) == set(NAMES)


def test_checks_need_no_torch() -> None:
    code = "import simpletuner.config.optimizers, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix, a vector and a convolution, and a vector that stays float32 in a bf16 model."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 6), (6,), (4, 3, 2, 2)]
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    return [*params, nn.Parameter(torch.randn(5, generator=generator))]


def build(
    name: str | None, params: list[nn.Parameter], lr: float = 0.01, **keys: object
) -> torch.optim.Optimizer:
    config = OptimizerConfig(optimizer=name, **keys)
    return build_optimizer(params, config, mixed_precision="bf16", learning_rate=lr)


def with_kernel(
    name: str,
    kernel: str,
    params: list[nn.Parameter],
    modules: Mapping[str, nn.Module] = MappingProxyType({}),
    settings: str = "",
) -> torch.optim.Optimizer:
    """An optimizer as on a machine where this kernel is chosen."""
    config = OptimizerConfig(optimizer=name, optimizer_config=settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "update_kernel", lambda *size, **where: kernel)
        optimizer = build_optimizer(params, config, "bf16", 0.01, modules)
    enabled = [key for key in KERNEL_KEYS if optimizer.param_groups[0].get(key)]
    assert enabled == ([] if kernel == "loop" else [kernel])
    return optimizer


def run(
    optimizer: torch.optim.Optimizer,
    params: list[nn.Parameter],
    first: int,
    last: int,
    peak: float = 0.01,
) -> None:
    """Train the steps from `first` up to `last`.

    Gradients depend on the step and the weights, the rate on the step. In most steps, one weight
    has no gradient.
    """
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for index, param in enumerate(params):
            noise = torch.randn(param.shape, generator=generator).to(param)
            param.grad = None
            if index != step % 5:
                param.grad = 0.1 * noise + param.detach()
        for group in optimizer.param_groups:
            group["lr"] = peak * (step + 1) / 10
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", RUNNABLE)
def test_shards_of_a_weight_are_updated_like_the_whole_weight(name: str) -> None:
    """Bit for bit if the optimizer is declared element-wise (FSDP2), and only then."""
    whole, *_ = weights()
    before, *_ = weights()
    shares = [nn.Parameter(part.detach().clone()) for part in before.chunk(3)]
    of_whole = build(name, [whole])
    of_shares = build(name, shares)
    for step in range(8):
        gradient = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))
        whole.grad = gradient
        for share, part in zip(shares, gradient.chunk(3), strict=True):
            share.grad = part.clone()
        of_whole.step()
        of_shares.step()

    assert torch.equal(whole, torch.cat(shares)) is OPTIMIZERS[name].element_wise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_saved_and_loaded_optimizer_continues_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    whole = weights(dtype)
    halves = weights(dtype)
    run(build(name, whole), whole, 0, 13)

    before = build(name, halves)
    run(before, halves, 0, 7)
    buffer = io.BytesIO()
    torch.save(
        {"optimizer": before.state_dict(), "weights": [param.detach() for param in halves]}, buffer
    )
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    again = [nn.Parameter(weight.clone()) for weight in saved["weights"]]
    after = build(name, again)
    load_state(after, saved["optimizer"], OPTIMIZERS[name])
    run(after, again, 7, 13)

    for expected, actual in zip(whole, again, strict=True):
        assert torch.equal(actual, expected)


# What a session starts with, so that every setting has an effect, and another value of each.
STARTING = {"weight_decay": 0.1, "momentum": 0.9, "d0": 1e-2}
CHANGED: dict[str, object] = {
    "beta1": 0.5,
    "beta2": 0.7,
    "beta3": 0.7,
    "eps": 0.1,
    "weight_decay": 0.5,
    "momentum": 0.5,
    "dampening": 0.5,
    "alpha": 0.2,
    "k": 3,
    "ns_steps": 2,
    "r": 2.0,
    "weight_lr_power": 0.0,
    "d0": 1e-3,
    "d_coef": 3.0,
    "momentum_decay": 0.1,
    "lr_decay": 0.5,
    "initial_accumulator_value": 1.0,
}
SETTINGS = [(name, setting) for name in RUNNABLE for setting in OPTIMIZERS[name].settings]


def with_settings(
    name: str, params: list[nn.Parameter], **changed: object
) -> torch.optim.Optimizer:
    known = OPTIMIZERS[name].settings
    values = {key: value for key, value in STARTING.items() if key in known} | changed
    text = ",".join(f"{key}={value}" for key, value in values.items())
    return build(name, params, optimizer_config=text)


def changed_value(name: str, setting: str) -> object:
    default = OPTIMIZERS[name].settings[setting]
    return not default if isinstance(default, bool) else CHANGED[setting]


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_a_setting_changed_on_resume_takes_effect_or_is_refused_by_name(
    name: str, setting: str
) -> None:
    """Bit for bit as if the running optimizer had got the new value."""
    params = weights()
    spec = OPTIMIZERS[name]
    peak = 1.0 if name == "prodigy" else 0.01
    before = with_settings(name, params)
    run(before, params, 0, 7, peak)
    saved = deepcopy(before.state_dict())
    value = changed_value(name, setting)
    after: dict[str, list[nn.Parameter]] = {}
    for case, changed in (("same", {}), ("changed", {setting: value})):
        after[case] = [nn.Parameter(param.detach().clone()) for param in params]
        optimizer = with_settings(name, after[case], **changed)
        if changed and setting in spec.lasting:
            with pytest.raises(ValueError, match=setting):
                load_state(optimizer, deepcopy(saved), spec)
            return
        load_state(optimizer, deepcopy(saved), spec)
        run(optimizer, after[case], 7, 13, peak)

    assert not all(map(torch.equal, after["same"], after["changed"])), "the new value acts"

    for group in before.param_groups:
        if setting.startswith("beta") and "betas" in group:
            betas = list(group["betas"])
            betas[int(setting[-1]) - 1] = value
            group["betas"] = tuple(betas)
        elif setting in group:
            is_of_muon = own_optimizers.MUON_MARK in group
            if setting != "eps" or not is_of_muon:  # Muon's eps is fixed
                group[setting] = value
    for state in before.state.values():
        if setting in state:
            state[setting] = value
        if setting == "eps" and "eps_sq" in state:
            state["eps_sq"].fill_(0.1**2)
    run(before, params, 7, 13, peak)

    assert all(map(torch.equal, params, after["changed"]))


@pytest.mark.parametrize(("name", "beta"), [("adamw_bf16", "beta2"), ("optimi-adan", "beta3")])
def test_a_resumed_second_moment_has_the_dtype_that_the_new_beta_needs(
    name: str, beta: str
) -> None:
    params = weights(torch.bfloat16)
    spec = OPTIMIZERS[name]
    narrow = build(name, params, optimizer_config=f"{beta}=.9")
    run(narrow, params, 1, 3)
    wide = build(name, params, optimizer_config=f"{beta}=.999")
    load_state(wide, deepcopy(narrow.state_dict()), spec)

    assert wide.state[params[0]]["exp_avg_sq"].dtype == torch.float32

    load_state(narrow, deepcopy(wide.state_dict()), spec)
    assert narrow.state[params[0]]["exp_avg_sq"].dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kernel"), [*((name, None) for name in RUNNABLE), *CHOICES])
def test_optimizers_train_and_resume_on_a_gpu(
    name: str, kernel: str | None, dtype: torch.dtype
) -> None:
    """With Triton kernels, about the same as on a CPU, and bit-equal after a resume."""
    make = build if kernel is None else partial(with_kernel, kernel=kernel)
    on_cpu = weights(dtype)
    whole = weights(dtype)
    halves = weights(dtype)
    for params in (whole, halves):
        for param in params:
            param.data = param.data.cuda()
    run(build(name, on_cpu), on_cpu, 0, 6)
    run(make(name, params=whole), whole, 0, 6)
    before = make(name, params=halves)
    run(before, halves, 0, 3)
    again = [nn.Parameter(param.detach().clone()) for param in halves]
    after = make(name, params=again)
    load_state(after, before.state_dict(), OPTIMIZERS[name])
    run(after, again, 3, 6)
    for expected, actual, slow in zip(whole, again, on_cpu, strict=True):
        assert torch.equal(actual, expected)
        if name == "adamw_bf16" or name.startswith("optimi-"):
            torch.testing.assert_close(actual.detach().cpu(), slow.detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_optimizer_lowers_a_loss(name: str) -> None:
    target = torch.randn(6, 4)
    param = nn.Parameter(torch.zeros(6, 4))
    # Prodigy finds its own rate, AdaGrad and SGD need a large one.
    rate = {"prodigy": 1.0, "torch-adagrad": 0.5, "torch-sgd": 5.0, "optimi-sgd": 5.0}.get(
        name, 0.05
    )
    optimizer = build(name, [param], rate)
    for _ in range(300):
        loss = (param - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with sampling_weights(optimizer):
        assert float((param.detach() - target).square().mean()) < 0.1 * float(
            target.square().mean()
        )


@pytest.mark.parametrize("name", [name for name in NAMES if is_installed(name)])
def test_libraries_accept_every_setting_of_the_table(name: str) -> None:
    module, _, class_name = OPTIMIZERS[name].factory.partition(":")
    known = set(inspect.signature(getattr(importlib.import_module(module), class_name)).parameters)
    settings = set(OPTIMIZERS[name].settings)
    if "beta1" in settings:
        settings = settings - {"beta1", "beta2", "beta3"} | {"betas"}

    assert settings <= known


@pytest.mark.parametrize("name", [name for name in RUNNABLE if OPTIMIZERS[name].keeps_bf16])
def test_optimizers_that_keep_bf16_weights_do_not_lose_small_updates(name: str) -> None:
    """200 steps whose updates are far below the spacing of bf16 numbers near 1 (0.0039 below,
    0.0078 above).
    """
    moved = []
    for dtype in DTYPES:
        param = nn.Parameter(torch.ones(4, 4, dtype=dtype))
        optimizer = build(name, [param], 1e-4)
        for _ in range(200):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved.append(1 - float(param.detach().float().mean()))

    assert moved[0] > 0.005
    assert moved[1] == pytest.approx(moved[0], abs=0.004)


def test_a_plain_optimizer_loses_small_updates_of_bf16_weights() -> None:
    """Why other optimizers must train float32 weights."""
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = build("adamw", [param], 1e-4)
    for _ in range(200):
        param.grad = torch.ones_like(param)
        optimizer.step()

    assert not OPTIMIZERS["adamw"].keeps_bf16
    assert torch.equal(param, torch.ones_like(param))


def test_optimi_uses_triton_only_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu: list[Any] = [SimpleNamespace(is_cuda=True)]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(update.importlib.util, "find_spec", lambda name: name)
    for able in (True, False):
        monkeypatch.setattr(update, "has_compiler", lambda able=able: able)
        assert update.runs_triton(on_gpu) is able
        assert not update.runs_triton(weights())


# The setting of the second moment's decay, and all kernels but Triton's, for which v would have the
# weights' dtype.
SQUARED = [
    ("adamw_bf16", "beta2"),
    ("optimi-adam", "beta2"),
    ("optimi-radam", "beta2"),
    ("optimi-stableadamw", "beta2"),
    ("optimi-adan", "beta3"),
]
FOLLOWING = [
    (*case, kernel)
    for case in SQUARED
    for kernel in ("loop", *OPTIMIZERS[case[0]].kernels)
    if kernel != "triton"
]


def with_squares(
    name: str, settings: str, kernel: str, weight: nn.Parameter
) -> torch.optim.Optimizer:
    """An optimizer as after many steps with gradients of 1, by a state that is loaded."""
    weight.grad = torch.zeros_like(weight)
    before = with_kernel(name, kernel, [weight], settings=settings)
    before.step()
    state = before.state_dict()
    state["param_groups"][0]["step"].fill_(2000)
    state["state"][0]["exp_avg_sq"].fill_(1)
    after = with_kernel(name, kernel, [weight], settings=settings)
    load_state(after, state, OPTIMIZERS[name])
    return after


@pytest.mark.parametrize(("name", "beta", "kernel"), FOLLOWING)
def test_second_moments_of_bf16_and_float32_weights_decay_alike(
    name: str, beta: str, kernel: str
) -> None:
    """While gradients shrink to .3. In bf16, where .999 times a number is the number again, it
    would stay at 1.
    """
    results = []
    for dtype in DTYPES:
        weight = nn.Parameter(torch.zeros(64, dtype=dtype))
        generator = torch.Generator().manual_seed(0)
        optimizer = with_squares(name, f"{beta}=.999", kernel, weight)
        for _ in range(500):
            weight.grad = (0.3 * torch.randn(64, generator=generator)).to(dtype)
            optimizer.step()
        results.append(float(optimizer.state[weight]["exp_avg_sq"].mean(dtype=torch.float32)))

    assert results[0] < 0.8
    assert results[1] == pytest.approx(results[0], rel=0.01)


@pytest.mark.parametrize("beta2", [0.99, 0.996, 0.9962, 0.999])
def test_the_second_moment_is_float32_where_bf16_loses_its_decay(beta2: float) -> None:
    """All numbers from 1 to 2, the same for every power of two, show it."""
    numbers = 1 + torch.arange(128, dtype=torch.bfloat16) / 128
    is_lost = bool((numbers * beta2 == numbers).any())
    for dtype in DTYPES:
        (weight,) = params = [nn.Parameter(torch.ones(2, 2, dtype=dtype))]
        optimizer = build("adamw_bf16", params, optimizer_config=f"{beta2=}")
        run(optimizer, params, 1, 2)
        is_wide = optimizer.state[weight]["exp_avg_sq"].dtype == torch.float32
        assert is_wide == (is_lost or dtype == torch.float32)


@pytest.mark.parametrize(
    ("name", "beta2", "dtype", "is_wide"),
    [
        ("adamw_bf16", 0.999, torch.bfloat16, True),
        ("adamw_bf16", 0.99, torch.bfloat16, False),
        ("adamw_bf16", 0.999, torch.float32, False),
        ("adamw", 0.999, torch.bfloat16, False),
    ],
)
def test_only_a_moment_that_is_wider_than_its_weight_needs_another_kernel(
    name: Any, beta2: float, dtype: torch.dtype, is_wide: bool
) -> None:
    optimizer = build(
        name, [nn.Parameter(torch.ones(2, 2, dtype=dtype))], optimizer_config=f"{beta2=}"
    )

    assert has_wide_moment(optimizer, optimizer.param_groups[0]) == is_wide


# weights, and numbers in them
LORA = (1200, 30_000_000)
FULL = (700, 2_000_000_000)


@pytest.mark.parametrize(
    ("name", "size", "where", "kernel"),
    [
        ("adamw_bf16", LORA, {}, "foreach"),
        ("adamw_bf16", FULL, {}, "triton"),
        ("adamw_bf16", FULL, {"triton": False}, "loop"),
        ("adamw_bf16", FULL, {"triton": False, "sharded": True}, "loop"),
        ("adamw_bf16", (MANY_WEIGHTS - 1, 10_000), {}, "triton"),
        ("adamw_bf16", (MANY_WEIGHTS, MANY_WEIGHTS * LARGE_WEIGHT - 1), {}, "foreach"),
        ("adamw_bf16", (MANY_WEIGHTS, MANY_WEIGHTS * LARGE_WEIGHT), {}, "triton"),
        ("adamw_bf16", LORA, {"device": "cpu"}, "loop"),
        ("adamw_bf16", FULL, {"widened": True}, "foreach"),
        ("adamw_bf16", FULL, {"widened": True, "sharded": True}, "loop"),
        ("optimi-stableadamw", LORA, {"widened": True}, "loop"),
        ("adamw", LORA, {}, "fused"),
        ("adamw", FULL, {"sharded": True}, "fused"),
        ("adamw", FULL, {"device": "cpu"}, "loop"),
        ("torch-rmsprop", LORA, {}, "foreach"),
        ("torch-rmsprop", FULL, {}, "loop"),
        ("optimi-stableadamw", LORA, {}, "triton"),
        ("ao-adamw8bit", FULL, {}, None),
        ("muon", FULL, {"device": "cpu"}, None),
    ],
)
def test_the_kernel_depends_on_number_and_size_of_the_weights(
    name: Any, size: tuple[int, int], where: dict[str, Any], kernel: str | None
) -> None:
    place = {"device": "cuda", "sharded": False, "triton": True, **where}
    assert update_kernel(name, weights=size[0], numbers=size[1], **place) == kernel


@pytest.mark.parametrize(("name", "kernel"), CHOICES)
def test_a_resumed_run_keeps_its_kernel(name: str, kernel: str) -> None:
    """Bit for bit as without the interruption, even if a new run would use another kernel."""
    whole = weights()
    halves = weights()
    run(with_kernel(name, kernel, whole), whole, 0, 6)
    before = with_kernel(name, kernel, halves)
    run(before, halves, 0, 3)
    torch.save(before.state_dict(), buffer := io.BytesIO())
    buffer.seek(0)
    after = with_kernel(name, "loop", halves)
    load_state(after, torch.load(buffer, weights_only=True), OPTIMIZERS[name])

    assert after.param_groups[0][kernel]

    run(after, halves, 3, 6)
    assert all(map(torch.equal, whole, halves))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kernel"), CHOICES)
def test_optimizers_skip_a_techniques_module_without_gradients(
    name: str, kernel: str, dtype: torch.dtype
) -> None:
    """For a step or, as in this test, for all; the other weights, of two dtypes, are updated alike
    by all kernels.
    """
    params = weights(dtype)
    others = weights(dtype)
    module = nn.Linear(3, 3)
    before = [parameter.clone() for parameter in module.parameters()]
    run(with_kernel(name, kernel, params, {"crepa": module}), params, 0, 6)
    run(with_kernel(name, "loop", others), others, 0, 6)

    assert all(map(torch.equal, module.parameters(), before))
    for actual, expected in zip(params, others, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=1e-3)


def test_a_run_started_with_triton_continues_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new run with as many small weights would use `foreach`."""
    saved = build("adamw_bf16", weights()).state_dict()
    saved["param_groups"][0]["triton"] = True
    optimizer = with_kernel("adamw_bf16", "foreach", weights())
    monkeypatch.setattr(optimizer_state, "runs_triton", lambda params: True)
    load_state(optimizer, saved, OPTIMIZERS["adamw_bf16"])

    assert {key: optimizer.param_groups[0][key] for key in ("triton", "foreach")} == {
        "triton": True,
        "foreach": False,
    }


class Launches(TorchDispatchMode):
    """Counts operations on tensors that are as large as a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(
            isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in tree_leaves(args)
        )
        return func(*args, **(kwargs or {}))


class Separate(TorchDispatchMode):
    """Counts the weights that foreach operations update one by one, since dtypes differ; copies may
    convert.
    """

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        lists = [value for value in args if isinstance(value, list)]
        if name.startswith("_foreach_") and name != "_foreach_copy_":
            self.count += sum(
                len({tensor.dtype for tensor in weight}) > 1 for weight in zip(*lists, strict=True)
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bundle", [1 << 24, 60, 1], ids=["one", "some", "each"])
@pytest.mark.parametrize(
    ("name", "beta"), [case for case in SQUARED if "foreach" in OPTIMIZERS[case[0]].kernels]
)
def test_wide_second_moments_need_no_launch_per_weight(
    name: str, beta: str, bundle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is updated bit for bit as by torch's mixed operation. Only single large weights are not
    widened.
    """
    monkeypatch.setattr(ema, "BUNDLE", bundle)
    several = weights(torch.bfloat16)
    alone = weights(torch.bfloat16)
    together, one = (
        with_kernel(name, "foreach", params, settings=f"{beta}=.999") for params in (several, alone)
    )
    monkeypatch.setattr(
        one, "_init_group", partial(super(own_optimizers.DecayingSquares, one)._init_group)
    )
    with Separate() as counted:
        run(together, several, 0, 6)

    assert (counted.count == 0) is (bundle > 60)

    with Separate() as plain:
        run(one, alone, 0, 6)
    assert plain.count > counted.count or bundle == 1
    assert all(map(torch.equal, several, alone))


@pytest.mark.parametrize(("name", "kernel"), CHOICES)
def test_launches_and_temporaries_of_an_update_depend_on_its_kernel(name: str, kernel: str) -> None:
    """The plan counts the temporaries of the worst moment."""
    count = 40
    numbers = 1000
    launches = {}
    temporary = {}
    for option in ("loop", kernel):
        params = [nn.Parameter(torch.ones(numbers // 20, 20)) for _ in range(count)]
        # With weight decay, since some optimizers decay a copy of the gradients.
        optimizer = with_kernel(name, option, params, settings="weight_decay=0.1")
        for _ in range(2):  # the first step allocates the state
            for param in params:
                param.grad = torch.ones_like(param)
            gradients = [param.grad for param in params]
            leaves = tree_leaves([params, gradients, [*optimizer.state.values()]])
            known = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            with Launches() as counted, Peak(known) as peak:
                optimizer.step()
        launches[option] = counted.count
        temporary[option] = peak.most / (count * numbers * 4)

    assert launches["loop"] >= 1.9 * count
    assert launches[kernel] <= (1 if kernel == "fused" else 20)
    assert temporary["loop"] <= 4.1 / count, "a few tensors as large as one weight"

    expected = OPTIMIZERS[name].temporaries if kernel == "foreach" else 0
    assert temporary[kernel] == pytest.approx(expected, abs=0.01)


def test_optimizer_state_of_a_gpu_continues_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """The state was saved with Triton kernels, which cannot run here; the log says so."""
    saved = build("adamw_bf16", weights(torch.bfloat16)).state_dict()

    assert not caplog.messages

    saved["param_groups"][0]["triton"] = True
    params = weights(torch.bfloat16)
    optimizer = build("adamw_bf16", params)
    load_state(optimizer, saved, OPTIMIZERS["adamw_bf16"])
    run(optimizer, params, 0, 1)

    assert optimizer.param_groups[0]["triton"] is False

    (message,) = caplog.messages
    assert "updated by Triton kernels, which need a GPU" in message


def test_fused_kernels_keep_step_counts_on_the_device() -> None:
    """Also for weights whose moments stay on the host; the meta device stands in for a GPU."""
    optimizer = with_kernel("adamw", "fused", [nn.Parameter(torch.zeros(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    weight = nn.Parameter(torch.zeros(3, device="meta"))
    after = with_kernel("adamw", "fused", [weight])
    load_state(
        after, optimizer.state_dict(), OPTIMIZERS["adamw"], HostState(after, torch.device("cpu"))
    )

    assert {key: value.device.type for key, value in after.state[weight].items()} == {
        "step": "meta",
        "exp_avg": "cpu",
        "exp_avg_sq": "cpu",
    }


def test_the_default_optimizer_depends_on_the_precision() -> None:
    assert optimizer_name(OptimizerConfig(), "bf16") == "adamw_bf16"
    assert optimizer_name(OptimizerConfig(), "no") == "adamw"
    assert isinstance(build(None, weights()), optimi.AdamW)


def settings(name: str, **keys: object) -> dict[str, object]:
    return dict(optimizer_settings(OptimizerConfig(optimizer=name, **keys), "bf16"))


def test_defaults_are_the_documented_ones() -> None:
    assert settings("adamw_bf16") == {
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    assert settings("optimi-adamw") == {
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-6,
        "weight_decay": 0.0,
    }

    adamw = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
    assert settings("adamw") == settings("torch-adamw") == adamw


@pytest.mark.parametrize("rms", [1e-2, 1e-6, 1e-7])
def test_adamw_bf16_moves_weights_as_adamw_does_however_small_gradients_are(rms: float) -> None:
    """Compared by the mean size of what 20 steps change, from weights of 0 that can show it."""
    changed: dict[str, float] = {}
    for name, dtype in (("adamw", torch.float32), ("adamw_bf16", torch.bfloat16)):
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.zeros(64, 16, dtype=dtype))
        optimizer = build(name, [weight], lr=1e-3)
        for _ in range(20):
            weight.grad = (torch.randn(64, 16, generator=generator) * rms).to(dtype)
            optimizer.step()
        changed[name] = weight.detach().float().norm().item()

    assert changed["adamw_bf16"] == pytest.approx(changed["adamw"], rel=0.02)


def test_explicit_settings_override_defaults_in_the_optimizer() -> None:
    keys: dict[str, Any] = {
        "adam_beta1": 0.8,
        "adam_beta2": 0.7,
        "adam_weight_decay": 0.5,
        "adam_epsilon": 1e-5,
    }

    assert settings("optimi-adamw", **keys) == {
        "beta1": 0.8,
        "beta2": 0.7,
        "eps": 1e-5,
        "weight_decay": 0.5,
    }

    keys |= {
        "optimizer_beta1": 0.6,
        "optimizer_beta2": 0.65,
        "optimizer_config": " weight_decay = 0.4, beta2=0.66 ",
    }
    group = build("adamw", weights(), **keys).param_groups[0]

    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.6, 0.66), 1e-5, 0.4)
    assert build("torch-sgd", weights(), optimizer_config="nesterov=yes,momentum=.9").param_groups[
        0
    ]["nesterov"]


def problems(mixed_precision: str = "bf16", **keys: object) -> list[Problem]:
    """The problems, without warnings about keys that are not set."""
    result = found_by(check_optimizer, OptimizerConfig(**keys), mixed_precision)
    return [
        problem for problem in result if problem.where in keys or not isinstance(problem, NoEffect)
    ]


def test_valid_configs_have_no_problem() -> None:
    assert problems() == []
    assert problems("no", optimizer="optimi-lion", optimizer_config="weight_decay=0.1") == []
    assert problems("fp16") == []


def test_adamw_bf16_needs_bf16() -> None:
    (problem,) = problems("no", optimizer="adamw_bf16")
    assert problem.fatal
    assert "mixed_precision bf16" in problem.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "weight_deca=0.1",
            ["'weight_deca'", "beta1, beta2, eps, weight_decay", "Did you mean 'weight_decay'"],
        ),
        ("lr=1", ["'lr'"]),
        ("eps=tiny", ["eps='tiny'", "not a number"]),
        ("eps=nan", ["not a number"]),
        ("eps", ["eps=''", "not a number"]),
        ("beta1=1", ["below 1"]),
        ("weight_decay=-1", ["negative"]),
    ],
)
def test_invalid_overrides_are_reported_before_the_optimizer_is_built(
    text: str, words: list[str]
) -> None:
    (problem,) = problems(optimizer="optimi-adamw", optimizer_config=text)

    assert problem.fatal
    assert problem.where == "optimizer_config"
    for word in words:
        assert word in problem.message


def test_all_invalid_overrides_are_reported_at_once() -> None:
    assert (
        len(
            problems(
                optimizer="optimi-ranger", optimizer_config="k=1.5,decouple_wd=maybe,x=1,,alpha=.4"
            )
        )
        == 3
    )


@pytest.mark.parametrize(
    ("rate", "warned"),
    [({}, True), ({"learning_rate": 1e-4}, True), ({"learning_rate": 3e-4}, False)],
)
def test_muon_at_the_rate_of_adamw_is_warned_of(rate: dict[str, float], warned: bool) -> None:
    found = problems(optimizer="muon", **rate)

    assert [problem.where for problem in found] == ["learning_rate"] * warned
    assert not any(problem.fatal for problem in found)
    assert all("0.0003 where AdamW has 0.0001" in problem.message for problem in found)
    assert problems(optimizer="adamw", **rate) == []


def test_betas_come_in_pairs() -> None:
    (problem,) = problems(optimizer_beta2=0.9)
    assert problem.fatal
    assert "optimizer_beta2" in problem.message


def test_keys_without_effect_cause_warnings() -> None:
    result = problems(
        optimizer="torch-sgd", adam_beta1=0.8, optimizer_beta1=0.8, optimizer_beta2=0.9
    )

    assert {problem.where for problem in result} == {
        "adam_beta1",
        "optimizer_beta1",
        "optimizer_beta2",
    }
    assert not any(problem.fatal for problem in result)
    assert [problem.where for problem in problems(optimizer="optimi-lion", adam_epsilon=1e-8)] == [
        "adam_epsilon"
    ]


def test_schedule_free_optimizers_warn_that_the_schedule_is_ignored() -> None:
    result = problems(optimizer="adamw_schedulefree", lr_scheduler="cosine")
    assert [problem.where for problem in result if not problem.fatal] == ["lr_scheduler"]
    assert not [p for p in problems(optimizer="adamw_schedulefree") if p.where == "lr_scheduler"]


@pytest.mark.parametrize("name", [name for name in NAMES if OPTIMIZERS[name].package])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    package = OPTIMIZERS[name].package
    assert package is not None
    (problem,) = [problem for problem in problems(optimizer=name) if problem.fatal]

    assert f"pip install '{package.requirement}'" in problem.message


def test_values_refused_by_the_library_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="torch-sgd refuses it"):
        build("torch-sgd", weights(), optimizer_config="nesterov=true")


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    params = weights()
    optimizer = build("muon", params)
    assert isinstance(optimizer, MuonWithAdamW)
    run(optimizer, params, 10, 16)
    states = [set(optimizer.state[param]) for param in params]

    assert states[0] == {"momentum_buffer"}
    assert all("exp_avg_sq" in state for state in states[1:])
    assert {id(param) for group in optimizer.param_groups for param in group["params"]} == {
        id(p) for p in params
    }


def test_muon_moves_a_matrix_by_its_orthogonal_factor() -> None:
    """All singular values of an update are near 0.2 sqrt(larger side) x rate, whatever those of the
    gradient.
    """
    param = nn.Parameter(torch.zeros(16, 8))
    optimizer = build("muon", [param], 0.01)
    param.grad = torch.randn(16, 8) @ torch.diag(torch.logspace(0, -1.5, 8))
    optimizer.step()
    moved = torch.linalg.svdvals(param.detach())

    assert (moved > 0.6 * 0.01 * 0.2 * 4).all()
    assert (moved < 1.3 * 0.01 * 0.2 * 4).all()


@pytest.mark.parametrize("shape", [(4, 4), (4,)])
def test_muon_trains_matrices_or_vectors_alone(shape: tuple[int, ...]) -> None:
    params = [nn.Parameter(torch.ones(shape))]
    run(build("muon", params), params, 1, 4)
    assert float(params[0].detach().mean()) < 1
