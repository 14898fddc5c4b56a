"""Every optimizer that a config can name: where its class is, which numbers it takes, and with what defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .schema import OptimizerName

# True or false, a whole number, or a number; the default's type decides how the text of the user is read.
Setting = bool | int | float


@dataclass(frozen=True)
class Package:
    """An optional dependency: the module to look for, its name for pip, and our extra that installs it."""

    module: str
    name: str
    extra: str


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer.

    Attributes:
        factory: `module:Class`.
        settings: numbers that `optimizer_config` may set, with our defaults; `beta1`, `beta2`, `beta3` become `betas`.
        is_adam: takes the `adam_*` keys where they are set.
        keeps_bf16: trains bf16 weights without losing small updates (compensated sums).
        constants: further arguments that nobody may set.
        schedule_free: replaces the learning rate schedule after the warm-up.
        package: what must be installed for it, if anything.
        moments: tensors as large as the trained weights that it keeps, a compensated sum not counted.
        moment_bytes: of one number in them; None is as many as the weight has.
    """

    factory: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    is_adam: bool = False
    keeps_bf16: bool = False
    constants: Mapping[str, Setting] = field(default_factory=dict)
    schedule_free: bool = False
    package: Package | None = None
    moments: int = 2
    moment_bytes: float | None = None


BITSANDBYTES = Package("bitsandbytes", "bitsandbytes", "cuda")
TORCHAO = Package("torchao", "torchao", "torchao")
PRODIGY = Package("prodigyopt", "prodigyopt", "optimizers")
SCHEDULE_FREE = Package("schedulefree", "schedulefree", "optimizers")
PYTORCH_OPTIMIZER = Package("pytorch_optimizer", "pytorch-optimizer", "optimizers")

ADAM: dict[str, Setting] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
ADAMW: dict[str, Setting] = ADAM | {"weight_decay": 0.01}
LION: dict[str, Setting] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
SGD: dict[str, Setting] = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
# optimi's own betas and eps: a second moment over about 100 steps, which suits short runs.
OPTIMI: dict[str, Setting] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.0}


def _torch(name: str, settings: Mapping[str, Setting], *, is_adam: bool = False, moments: int = 2) -> OptimizerSpec:
    return OptimizerSpec(f"torch.optim:{name}", settings, is_adam=is_adam, moments=moments)


def _optimi(name: str, settings: Mapping[str, Setting], *, is_adam: bool = True, moments: int = 2) -> OptimizerSpec:
    return OptimizerSpec(f"optimi:{name}", settings, is_adam=is_adam, keeps_bf16=True, moments=moments)


def _bitsandbytes(
    name: str, settings: Mapping[str, Setting], *, is_adam: bool = False, moments: int = 1
) -> OptimizerSpec:
    size = 1.0 if name.endswith("8bit") else None
    factory = f"bitsandbytes.optim:{name}"
    return OptimizerSpec(factory, settings, is_adam=is_adam, package=BITSANDBYTES, moments=moments, moment_bytes=size)


def _schedule_free(settings: Mapping[str, Setting]) -> OptimizerSpec:
    factory = "schedulefree:AdamWScheduleFree"
    # r weighs late steps in the average, weight_lr_power steps of a high rate.
    settings = {**settings, "r": 0.0, "weight_lr_power": 2.0}
    return OptimizerSpec(factory, settings, is_adam=True, schedule_free=True, package=SCHEDULE_FREE)


OPTIMIZERS: Mapping[OptimizerName, OptimizerSpec] = {
    "adamw_bf16": _optimi("AdamW", ADAMW | {"eps": 1e-6}),
    "adamw": _torch("AdamW", ADAMW | {"amsgrad": False}, is_adam=True),
    "torch-adamw": _torch("AdamW", ADAMW | {"amsgrad": False}, is_adam=True),
    "torch-adam": _torch("Adam", ADAM | {"amsgrad": False}, is_adam=True),
    "torch-nadam": _torch("NAdam", ADAM | {"momentum_decay": 0.004, "decoupled_weight_decay": False}, is_adam=True),
    "torch-radam": _torch("RAdam", ADAM | {"decoupled_weight_decay": False}, is_adam=True),
    "torch-adagrad": _torch(
        "Adagrad", {"lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}, moments=1
    ),
    "torch-rmsprop": _torch(
        "RMSprop", {"alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False}, moments=1
    ),
    "torch-sgd": _torch("SGD", SGD, moments=0),
    "optimi-adamw": _optimi("AdamW", OPTIMI),
    "optimi-stableadamw": _optimi("StableAdamW", OPTIMI),
    "optimi-lion": _optimi("Lion", LION, is_adam=False, moments=1),
    "optimi-radam": _optimi("RAdam", OPTIMI | {"decouple_wd": False}),
    # Its slow weights are averaged without compensation and replace the fast ones, so bf16 would lose updates.
    "optimi-ranger": OptimizerSpec(
        "optimi:Ranger", OPTIMI | {"decouple_wd": True, "k": 6, "alpha": 0.5}, is_adam=True, moments=3
    ),
    # Three averages (gradient, its change, its square) have three betas. The only optimi one that does not
    # compensate unless told to.
    "optimi-adan": OptimizerSpec(
        "optimi:Adan",
        OPTIMI | {"beta1": 0.98, "beta2": 0.92, "beta3": 0.99},
        is_adam=True,
        keeps_bf16=True,
        constants={"kahan_sum": True},
        moments=4,
    ),
    "optimi-adam": _optimi("Adam", OPTIMI | {"decouple_wd": False}),
    "optimi-sgd": _optimi(
        "SGD", {"momentum": 0.0, "weight_decay": 0.0, "decouple_wd": False}, is_adam=False, moments=0
    ),
    "ao-adamw8bit": OptimizerSpec("torchao.optim:AdamW8bit", ADAMW, is_adam=True, package=TORCHAO, moment_bytes=1.0),
    "ao-adamw4bit": OptimizerSpec("torchao.optim:AdamW4bit", ADAMW, is_adam=True, package=TORCHAO, moment_bytes=0.5),
    "adamw_schedulefree": _schedule_free(ADAMW),
    "adamw_schedulefree+aggressive": _schedule_free(ADAMW | {"weight_decay": 1e-3, "eps": 1e-6}),
    # The weights it trains are float32 in any case, where compensated sums change nothing.
    "adamw_schedulefree+no_kahan": _schedule_free(ADAMW),
    "soap": OptimizerSpec(
        "pytorch_optimizer:SOAP",
        {"beta1": 0.95, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "precondition_frequency": 10},
        is_adam=True,
        package=PYTORCH_OPTIMIZER,
        moments=4,
    ),
    "muon": OptimizerSpec(
        "simpletuner.training.muon:MuonWithAdamW",
        {"momentum": 0.95, "nesterov": True, "ns_steps": 5, **ADAMW},
        is_adam=True,
    ),
    "prodigy": OptimizerSpec(
        "prodigyopt:Prodigy",
        ADAM | {"d0": 1e-6, "d_coef": 1.0, "use_bias_correction": False, "safeguard_warmup": False},
        is_adam=True,
        package=PRODIGY,
        moments=4,
    ),
    "bnb-adamw8bit": _bitsandbytes("AdamW8bit", ADAMW, is_adam=True, moments=2),
    "bnb-adamw": _bitsandbytes("AdamW", ADAMW, is_adam=True, moments=2),
    "bnb-lion8bit": _bitsandbytes("Lion8bit", LION),
    "bnb-lion": _bitsandbytes("Lion", LION),
    "bnb-adagrad8bit": _bitsandbytes("Adagrad8bit", {"lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10}),
    # Without momentum it has no state to keep in 8 bits, and refuses.
    "bnb-sgd8bit": _bitsandbytes("SGD8bit", SGD | {"momentum": 0.9}),
}
