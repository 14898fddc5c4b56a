"""The table of optimizers, and the checks of the chosen one.

The table has each optimizer's class, settings and defaults; the functions below read it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from simpletuner.config.option import Package, check_installed
from simpletuner.config.precision import BITSANDBYTES, TORCHAO, PrecisionConfig, transformer_dtype
from simpletuner.config.schema import (
    CHOSEN,
    LEARNING_RATES,
    OptimizerConfig,
    OptimizerName,
    RunConfig,
    all_options,
)
from simpletuner.config.speed import has_compiler
from simpletuner.config.types import parse_flag, parse_number
from simpletuner.errors import Problems, did_you_mean

PRODIGY = Package("prodigyopt", "prodigyopt>=1.1,<2")
SCHEDULE_FREE = Package("schedulefree", "schedulefree>=1.4,<2")
# The type of the default determines how the user's text is parsed.
OptimizerValue = bool | int | float
# loop: weight by weight; foreach: one operation at a time on all weights; fused: all weights in one
# kernel; triton: one kernel per weight.
UpdateKernel = Literal["loop", "foreach", "fused", "triton"]
# `triton` launches once per weight, `foreach` some hundred times in all but with four times the
# memory traffic. From this size on, the extra traffic takes a GPU (1 TB/s) longer than a launch
# takes the host (20 µs).
LARGE_WEIGHT = 1 << 18
MANY_WEIGHTS = 64  # below this, one launch per weight is fewer than `foreach` needs


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer.

    Attributes:
        factory: `module:Class`.
        settings: numbers that `optimizer_config` may set, with our defaults; `beta1`, `beta2`,
            `beta3` become `betas`.
        is_adam: uses the `adam_*` keys if they are set.
        keeps_bf16: trains bf16 weights without losing small updates (bf16 has 8 significant bits,
            so a plain update of less than about 1/500 of a weight is rounded away): by Kahan
            summation, or by stochastic rounding if `rounds_randomly`.
        constants: arguments that users cannot set.
        schedule_free: replaces the learning rate schedule after the warm-up.
        package: required optional package, if any.
        moments: number of state tensors as large as the trained weights, without the Kahan
            compensation.
        moment_bytes: bytes per number in the moments; None: as in the weight.
        element_wise: updates every number independently with torch operations, so that the
            processes of a sharded run can update their shards.
        per_weight: updates every weight independently of the gradients of other weights.
        lasting: settings that the saved state is built on, so that a resumed run cannot change
            them.
        kernels: implementations for `update_kernel` besides the loop; if empty, the library
            chooses.
        temporaries: tensors as large as all trained weights that a `foreach` update allocates.
    """

    factory: str
    settings: Mapping[str, OptimizerValue] = field(default_factory=dict)
    is_adam: bool = False
    keeps_bf16: bool = False
    constants: Mapping[str, OptimizerValue] = field(default_factory=dict)
    schedule_free: bool = False
    package: Package | None = None
    moments: int = 2
    moment_bytes: float | None = None
    element_wise: bool = True
    per_weight: bool = True
    rounds_randomly: bool = False
    lasting: tuple[str, ...] = ()
    kernels: tuple[UpdateKernel, ...] = ()
    temporaries: int = 0


Settings = dict[str, OptimizerValue]
ADAM: Settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
ADAMW: Settings = ADAM | {"weight_decay": 0.01}
AMSGRAD: Settings = ADAMW | {"amsgrad": False}
NADAM: Settings = ADAM | {"momentum_decay": 0.004, "decoupled_weight_decay": False}
ADAGRAD: Settings = {"lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10}
RMSPROP: Settings = {
    "alpha": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "momentum": 0.0,
    "centered": False,
}
SGD: Settings = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
LION: Settings = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
# optimi's default betas and eps: a second moment over about 100 steps, which suits short runs.
OPTIMI: Settings = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.0}
COUPLED: Settings = OPTIMI | {"decouple_wd": False}
RANGER: Settings = OPTIMI | {"decouple_wd": True, "k": 6, "alpha": 0.5}
# Three moving averages: of the gradient, of its difference, and of the square.
ADAN: Settings = OPTIMI | {"beta1": 0.98, "beta2": 0.92, "beta3": 0.99}
# r weights late steps in the average, weight_lr_power steps with a high rate.
AVERAGED: Settings = ADAMW | {"r": 0.0, "weight_lr_power": 2.0}
MUON: Settings = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, **ADAMW}
ESTIMATING: Settings = {
    "d0": 1e-6,
    "d_coef": 1.0,
    "use_bias_correction": False,
    "safeguard_warmup": False,
}

# Common arguments by library. torch's other fused updates lose momentum that some weights do not
# have yet, or do not exist for every GPU.
_torch_adam = partial(
    OptimizerSpec, is_adam=True, kernels=("fused",), temporaries=1, lasting=("amsgrad",)
)
_torch = partial(OptimizerSpec, kernels=("foreach",), temporaries=1)
_optimi = partial(OptimizerSpec, keeps_bf16=True, kernels=("triton", "foreach"))
_optimi_adam = partial(_optimi, is_adam=True)
_random = partial(
    OptimizerSpec, keeps_bf16=True, rounds_randomly=True, constants={"bf16_stochastic_round": True}
)
# State is quantised in blocks, which would differ in a shard of a weight.
_torchao = partial(_random, settings=ADAMW, is_adam=True, package=TORCHAO, element_wise=False)
# The trained weights lie between two sequences, at a place given by beta1.
_averaging = partial(
    OptimizerSpec,
    is_adam=True,
    schedule_free=True,
    per_weight=False,
    temporaries=1,
    lasting=("beta1",),
)
_schedule_free = partial(_averaging, "schedulefree:AdamWScheduleFree", package=SCHEDULE_FREE)
_whole_weights = partial(OptimizerSpec, element_wise=False, per_weight=False)
_bitsandbytes = partial(_whole_weights, package=BITSANDBYTES, moments=1)

# The module of optimi's classes with a second moment that decays in bf16 too.
DECAYING = "simpletuner.training.own_optimizers"
OPTIMIZERS: Mapping[OptimizerName, OptimizerSpec] = {
    "adamw_bf16": _optimi_adam(f"{DECAYING}:AdamW", ADAMW),
    "adamw": _torch_adam("torch.optim:AdamW", AMSGRAD),
    "torch-adamw": _torch_adam("torch.optim:AdamW", AMSGRAD),
    "torch-adam": _torch_adam("torch.optim:Adam", ADAM | {"amsgrad": False}),
    "torch-nadam": _torch("torch.optim:NAdam", NADAM, is_adam=True, temporaries=2),
    "torch-radam": _torch(
        "torch.optim:RAdam", ADAM | {"decoupled_weight_decay": False}, is_adam=True
    ),
    "torch-adagrad": _torch(
        "torch.optim:Adagrad",
        ADAGRAD | {"initial_accumulator_value": 0.0},
        moments=1,
        temporaries=2,
        lasting=("initial_accumulator_value",),
    ),
    "torch-rmsprop": _torch(
        "torch.optim:RMSprop", RMSPROP, moments=1, temporaries=2, lasting=("momentum", "centered")
    ),
    "torch-sgd": _torch("torch.optim:SGD", SGD, moments=0),
    "optimi-adamw": _optimi_adam(f"{DECAYING}:AdamW", OPTIMI),
    # Limits an update by the mean square of the whole weight, so every kernel but Triton's
    # synchronises per weight.
    "optimi-stableadamw": _optimi_adam(
        f"{DECAYING}:StableAdamW", OPTIMI, element_wise=False, kernels=("triton",)
    ),
    "optimi-lion": _optimi("optimi:Lion", LION, moments=1, temporaries=1),
    "optimi-radam": _optimi_adam(f"{DECAYING}:RAdam", COUPLED),
    # Slow weights are averaged without Kahan summation and replace the fast weights, so bf16 would
    # lose updates.
    "optimi-ranger": _optimi_adam(f"{DECAYING}:Ranger", RANGER, moments=3, keeps_bf16=False),
    # The only optimi optimizer with Kahan summation off by default.
    "optimi-adan": _optimi_adam(f"{DECAYING}:Adan", ADAN, moments=4, constants={"kahan_sum": True}),
    "optimi-adam": _optimi_adam(f"{DECAYING}:Adam", COUPLED),
    "optimi-sgd": _optimi(
        "optimi:SGD",
        {"momentum": 0.0, "weight_decay": 0.0, "decouple_wd": False},
        moments=0,
        lasting=("momentum",),
    ),
    # One byte per number and a float32 scale per 256, or half a byte and a scale per 128.
    "ao-adamw8bit": _torchao("simpletuner.training.low_bit:AdamW8bit", moment_bytes=1 + 4 / 256),
    "ao-adamw4bit": _torchao("simpletuner.training.low_bit:AdamW4bit", moment_bytes=0.5 + 4 / 128),
    "adamw_schedulefree": _schedule_free(AVERAGED),
    "adamw_schedulefree+aggressive": _schedule_free(AVERAGED | {"weight_decay": 1e-3, "eps": 1e-6}),
    # Always trains float32 weights, where Kahan summation has no effect.
    "adamw_schedulefree+no_kahan": _schedule_free(AVERAGED),
    # Newton-Schulz orthogonalises whole matrices; vectors and convolutions are updated by AdamW.
    "muon": OptimizerSpec(f"{DECAYING}:MuonWithAdamW", MUON, is_adam=True, element_wise=False),
    # Besides Adam's moments, Prodigy keeps the initial weights and a weighted sum of gradients.
    "prodigy": _whole_weights(
        "prodigyopt:Prodigy",
        ADAM | ESTIMATING,
        is_adam=True,
        package=PRODIGY,
        moments=4,
        lasting=("beta1", "d0"),
    ),
    "bnb-adamw8bit": _bitsandbytes(
        "bitsandbytes.optim:AdamW8bit", ADAMW, is_adam=True, moments=2, moment_bytes=1.0
    ),
    "bnb-adamw": _bitsandbytes("bitsandbytes.optim:AdamW", ADAMW, is_adam=True, moments=2),
    "bnb-lion8bit": _bitsandbytes("bitsandbytes.optim:Lion8bit", LION, moment_bytes=1.0),
    "bnb-lion": _bitsandbytes("bitsandbytes.optim:Lion", LION),
    "bnb-adagrad8bit": _bitsandbytes("bitsandbytes.optim:Adagrad8bit", ADAGRAD, moment_bytes=1.0),
    # Without momentum, SGD8bit has no state to quantise and raises an error.
    "bnb-sgd8bit": _bitsandbytes(
        "bitsandbytes.optim:SGD8bit", SGD | {"momentum": 0.9}, moment_bytes=1.0
    ),
}

BETAS = ("beta1", "beta2", "beta3")
ADAM_KEYS = {
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_weight_decay": "weight_decay",
    "adam_epsilon": "eps",
}
PAIR = {"optimizer_beta1": "beta1", "optimizer_beta2": "beta2"}

# bf16 has 8 significant bits: a relative change below half the spacing of its numbers, 2**-9 to
# 2**-8, is rounded away.
LOST_IN_BF16 = 2**-8

# Prodigy multiplies its estimate by the learning rate; a usual rate such as 1e-4 would stop
# learning.
PRODIGY_LOWEST_RATE = 0.1

# Muon's rate for the pace of AdamW, as a multiple of AdamW's: measured on the demo (EVIDENCE.md).
MUON_PACE = 3


def optimizer_name(config: OptimizerConfig, mixed_precision: str) -> OptimizerName:
    """The chosen optimizer; the default is adamw_bf16 with mixed_precision bf16, else adamw."""
    if config.optimizer is not None:
        return config.optimizer
    return "adamw_bf16" if mixed_precision == "bf16" else "adamw"


def update_kernel(
    name: OptimizerName,
    device: str,
    weights: int,
    numbers: int,
    *,
    sharded: bool,
    triton: bool,
    widened: bool = False,
) -> UpdateKernel | None:
    """The update implementation of a new run; None leaves the choice to the library.

    Implementations round differently, so a resumed run keeps the one it started with.

    Args:
        device: device type of the weights.
        weights, numbers: number of trained tensors, and of their elements.
        sharded: every process holds only a shard of each weight.
        triton: whether Triton kernels can run.
        widened: the second moment is wider than the weights; Triton kernels would round it to their
            dtype.
    """
    kernels = OPTIMIZERS[name].kernels
    if not kernels:
        return None
    if device != "cuda":
        return "loop"
    if "fused" in kernels:
        return "fused"
    suits_foreach = widened or (weights >= MANY_WEIGHTS and numbers < weights * LARGE_WEIGHT)
    if "foreach" in kernels and not sharded and suits_foreach:
        return "foreach"
    if "triton" in kernels and triton and not widened:
        return "triton"
    return "loop"


def is_lost_in_bf16(beta: float) -> bool:
    """Whether a bf16 number times beta may round to itself.

    A moving average with this decay would then only grow.
    """
    return 1 - beta < LOST_IN_BF16


def widens_second_moment(config: OptimizerConfig, mixed_precision: str) -> bool:
    """Whether the second moment of bf16 weights is kept in float32, see `DecayingSquares`."""
    spec = OPTIMIZERS[optimizer_name(config, mixed_precision)]
    if not spec.is_adam or not spec.keeps_bf16 or spec.rounds_randomly:
        return False
    settings = optimizer_settings(config, mixed_precision)
    betas = [float(settings[beta]) for beta in BETAS if beta in settings]
    return is_lost_in_bf16(betas[-1])  # the last is that of the squares, also for Adan's three


def learning_rate(config: OptimizerConfig, model_type: str) -> float:
    """The configured peak learning rate, or the default for a LoRA or a full fine-tune."""
    return config.learning_rate or LEARNING_RATES[model_type]


def peak_learning_rate(config: RunConfig) -> float:
    """The peak rate, scaled by the samples of a step if `lr_scale` or `lr_scale_sqrt` is set."""
    rate = learning_rate(config.optimizer, config.model.model_type)
    schedule = config.schedule
    samples = (
        config.launch.data_processes
        * schedule.gradient_accumulation_steps
        * schedule.train_batch_size
    )
    if config.optimizer.lr_scale:
        return rate * samples
    if config.optimizer.lr_scale_sqrt:
        return rate * math.sqrt(samples)
    return rate


def trained_precision(config: OptimizerConfig, precision: PrecisionConfig) -> str:
    """The dtype of trained weights: bf16 if the optimizer compensates for rounding, else fp32."""
    spec = OPTIMIZERS[optimizer_name(config, precision.mixed_precision)]
    if spec.keeps_bf16 and transformer_dtype(precision) == "bf16":
        return "bf16"
    return "fp32"


def optimizer_settings(config: OptimizerConfig, mixed_precision: str) -> dict[str, OptimizerValue]:
    """The optimizer's settings: its defaults, overridden by the keys that are set."""
    spec = OPTIMIZERS[optimizer_name(config, mixed_precision)]
    return {**spec.settings, **chosen_settings(config, spec)}


def chosen_settings(config: OptimizerConfig, spec: OptimizerSpec) -> dict[str, OptimizerValue]:
    """The settings of an optimizer that the keys set."""
    settings: dict[str, OptimizerValue] = {}
    # The most specific key comes last.
    if spec.is_adam:
        settings |= _set_values(config, ADAM_KEYS)
    if "beta1" in spec.settings:  # not momentum, as in SGD and RMSprop
        settings |= _set_values(config, PAIR)
    return settings | _overrides(config, spec, Problems())


def check_optimizer(config: OptimizerConfig, mixed_precision: str, report: Problems) -> None:
    """Report all errors in the optimizer keys, including a missing package."""
    name = optimizer_name(config, mixed_precision)
    spec = OPTIMIZERS[name]
    if name == "adamw_bf16" and mixed_precision != "bf16":
        message = f"'adamw_bf16' needs mixed_precision bf16, not {mixed_precision!r}; use adamw."
        report.error("optimizer", message)
    _overrides(config, spec, report)
    _check_numbers(config, name, spec, report)
    if spec.package is not None:
        check_installed(spec.package, "optimizer", name, report)
    if config.optimizer_release_gradients and not spec.per_weight:
        message = (
            f"cannot be combined with optimizer {name!r}: it may not update each weight "
            "independently. Use an AdamW such as adamw_bf16."
        )
        report.error("optimizer_release_gradients", message)
    if spec.rounds_randomly and not has_compiler():
        message = f"{name!r} needs a C compiler such as gcc: torchao compiles its update."
        report.error("optimizer", message)


def may_change(config: RunConfig, values: Mapping[str, object]) -> bool:
    """Whether a full fine-tune could use these optimizer settings instead."""
    if config.model.model_type != "full":
        return False
    changed = config.with_values(values, CHOSEN)
    if changed.optimizer == config.optimizer and changed.offload == config.offload:
        return False
    problems = Problems()
    all_options()["optimizer_release_gradients"].conflicts(changed.flat, problems)
    check_optimizer(changed.optimizer, changed.precision.mixed_precision, problems)
    return not problems.are_fatal


def _check_numbers(
    config: OptimizerConfig, name: str, spec: OptimizerSpec, report: Problems
) -> None:
    """Report a beta without its pair, keys that the optimizer lacks, and unsuitable schedules."""
    if (config.optimizer_beta1 is None) != (config.optimizer_beta2 is None):
        report.error("optimizer_beta1", "must be given together with optimizer_beta2.")
    unused: list[str] = []
    if not spec.is_adam:
        unused += ADAM_KEYS
    if "beta1" not in spec.settings:
        unused += PAIR
    for key in unused:
        report.no_effect(key, f"has no effect on the optimizer {name!r}.")
    # An unset rate counts too: its default of 1e-4 is just as wrong.
    if name == "prodigy" and (config.learning_rate or 0) < PRODIGY_LOWEST_RATE:
        message = "prodigy finds the rate and multiplies it by this one, which should be 1."
        report.warn("learning_rate", message)
    usual = LEARNING_RATES["lora"]
    if name == "muon" and (config.learning_rate or usual) <= usual:
        message = (
            f"muon needs about {MUON_PACE} times the rate of AdamW to learn as fast: "
            f"{MUON_PACE * usual:g} where AdamW has {usual:g}."
        )
        report.warn("learning_rate", message)
    if spec.schedule_free and not config.lr_scheduler.startswith("constant"):
        message = f"{config.lr_scheduler!r} is ignored: {name} keeps the rate after the warm-up."
        report.warn("lr_scheduler", message)


def _set_values(config: OptimizerConfig, keys: dict[str, str]) -> dict[str, OptimizerValue]:
    """Values of the keys that are set, by the optimizer's names."""
    values = config.model_dump(include=set(keys))
    return {setting: values[key] for key, setting in keys.items() if values[key] is not None}


def _overrides(
    config: OptimizerConfig, spec: OptimizerSpec, report: Problems
) -> dict[str, OptimizerValue]:
    """The valid settings in `optimizer_config`; reports the others."""
    values: dict[str, OptimizerValue] = {}
    for part in (config.optimizer_config or "").split(","):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if key in spec.settings:
            try:
                values[key] = _parse_setting(key, text, spec.settings[key])
            except ValueError as error:
                report.error("optimizer_config", f"{key}={text!r} {error}.")
        elif key or equals:  # not after a trailing comma
            allowed = ", ".join(spec.settings)
            message = f"unknown setting {key!r}; this optimizer takes {allowed}."
            report.error("optimizer_config", f"{message}{did_you_mean(key, spec.settings)}")
    return values


def _parse_setting(key: str, text: str, default: OptimizerValue) -> OptimizerValue:
    """The text as a value of the default's type.

    Raises:
        ValueError: its message continues the value.
    """
    if isinstance(default, bool):  # before numbers, since True is an int
        return bool(parse_flag(text))
    number = parse_number(text)
    if key in BETAS and not 0 <= number < 1:
        raise ValueError("must be at least 0 and below 1")
    if number < 0:
        raise ValueError("must not be negative")
    if not isinstance(default, int):
        return number
    if not number.is_integer():
        raise ValueError("is not a whole number")
    return int(number)
