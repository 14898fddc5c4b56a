"""Which optimizer a config means, with which numbers, and what is wrong with the choice. No torch here."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator

from simpletuner.errors import Problem, did_you_mean

from .optimizer_table import OPTIMIZERS, OptimizerSpec, Setting
from .option import parse_flag
from .precision import transformer_dtype
from .schema import DEFAULT_LEARNING_RATES, OptimizerConfig, OptimizerName, PrecisionConfig

BETAS = ("beta1", "beta2", "beta3")
ADAM_KEYS = {
    "adam_beta1": "beta1", "adam_beta2": "beta2", "adam_weight_decay": "weight_decay", "adam_epsilon": "eps",
}  # fmt: skip

PRODIGY_LOWEST_RATE = 0.1


def optimizer_name(config: OptimizerConfig, mixed_precision: str) -> OptimizerName:
    """The optimizer that is meant: adamw_bf16 under mixed_precision bf16 and adamw else, unless one is named."""
    if config.optimizer is not None:
        return config.optimizer
    return "adamw_bf16" if mixed_precision == "bf16" else "adamw"


def keeps_bf16_weights(name: OptimizerName) -> bool:
    """Whether trained weights may be bf16; with any other optimizer they must be float32.

    A bf16 number has 8 significant bits, so that a plain update of less than about 1/500 of a weight is rounded away.
    """
    return OPTIMIZERS[name].keeps_bf16


def learning_rate(config: OptimizerConfig, model_type: str) -> float:
    """The peak rate: the configured one, or the usual one for a LoRA or a whole model."""
    return config.learning_rate or DEFAULT_LEARNING_RATES[model_type]


def trained_precision(config: OptimizerConfig, precision: PrecisionConfig) -> str:
    """What trained weights are stored in: bf16 where the optimizer compensates for its rounding, else fp32."""
    name = optimizer_name(config, precision.mixed_precision)
    return "bf16" if transformer_dtype(precision) == "bf16" and keeps_bf16_weights(name) else "fp32"


def is_schedule_free(name: OptimizerName | None) -> bool:
    """Whether the optimizer takes the place of the learning rate schedule."""
    return name is not None and OPTIMIZERS[name].schedule_free


def optimizer_settings(config: OptimizerConfig, mixed_precision: str) -> dict[str, Setting]:
    """The numbers of the optimizer: its defaults, then adam_* keys, then the pair of betas, then optimizer_config.

    What is wrong in the config is left out; `check_optimizer` reports it.
    """
    spec = OPTIMIZERS[optimizer_name(config, mixed_precision)]
    settings = dict(spec.settings)
    if spec.is_adam:
        settings |= _given(config, ADAM_KEYS)
    if "beta1" in settings:
        settings |= _given(config, {"optimizer_beta1": "beta1", "optimizer_beta2": "beta2"})
    return settings | _parse_overrides(config, spec, [])


def check_optimizer(config: OptimizerConfig, mixed_precision: str) -> list[Problem]:
    """Everything that is wrong with the optimizer keys, a package that is not installed included."""
    name = optimizer_name(config, mixed_precision)
    spec = OPTIMIZERS[name]
    problems: list[Problem] = []
    if name == "adamw_bf16" and mixed_precision != "bf16":
        message = f"'adamw_bf16' needs mixed_precision bf16, which is {mixed_precision!r}; use adamw or optimi-adamw."
        problems.append(Problem("optimizer", message))
    _parse_overrides(config, spec, problems)
    problems += _check_numbers(config, name, spec)
    package = spec.package
    if package is not None and importlib.util.find_spec(package.module) is None:
        install = f"pip install 'simpletuner[{package.extra}]'"
        message = f"{name!r} needs the package {package.name}, which is not installed: {install}"
        problems.append(Problem("optimizer", message))
    return problems


def _check_numbers(config: OptimizerConfig, name: str, spec: OptimizerSpec) -> Iterator[Problem]:
    """Betas only as a pair; keys that the optimizer does not have, and schedules that it replaces, are noted."""
    if (config.optimizer_beta1 is None) != (config.optimizer_beta2 is None):
        yield Problem("optimizer_beta1", "and optimizer_beta2 must be given together.")
    keys = list(_given(config, {key: key for key in ADAM_KEYS})) if not spec.is_adam else []
    if config.optimizer_beta1 is not None and "beta1" not in spec.settings:
        keys.append("optimizer_beta1")
    for key in keys:
        yield Problem(key, f"has no effect on the optimizer {name!r}.", fatal=False)
    if name == "prodigy" and (config.learning_rate or 0) < PRODIGY_LOWEST_RATE:
        message = "prodigy finds the rate by itself and multiplies it by this one, which should be 1."
        yield Problem("learning_rate", message, fatal=False)
    if spec.schedule_free and not config.lr_scheduler.startswith("constant"):
        message = f"{config.lr_scheduler!r} is ignored: {name} keeps the rate constant after the warm-up."
        yield Problem("lr_scheduler", message, fatal=False)


def _given(config: OptimizerConfig, keys: dict[str, str]) -> dict[str, Setting]:
    """Values of the keys that are set, under the optimizer's names for them."""
    values = config.model_dump(include=set(keys))
    return {setting: values[key] for key, setting in keys.items() if values[key] is not None}


def _parse_overrides(config: OptimizerConfig, spec: OptimizerSpec, problems: list[Problem]) -> dict[str, Setting]:
    """`optimizer_config` as settings; what cannot be used becomes a problem."""
    overrides: dict[str, Setting] = {}
    for part in (config.optimizer_config or "").split(","):
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not key and not equals:
            continue
        if key not in spec.settings:
            allowed = ", ".join(spec.settings)
            message = f"unknown setting {key!r}; this optimizer has {allowed}.{did_you_mean(key, spec.settings)}"
            problems.append(Problem("optimizer_config", message))
            continue
        try:
            overrides[key] = _parse_setting(key, text, spec.settings[key])
        except ValueError as error:
            problems.append(Problem("optimizer_config", f"{key}={text!r} {error}."))
    return overrides


def _parse_setting(key: str, text: str, default: Setting) -> Setting:
    """The text as a value of the default's type.

    Raises:
        ValueError: with what is wrong, ready to follow the value.
    """
    if isinstance(default, bool):
        return bool(parse_flag(text))
    number = _parse_number(text)
    if key in BETAS and not 0 <= number < 1:
        raise ValueError("must be at least 0 and below 1")
    if number < 0:
        raise ValueError("must not be negative")
    if isinstance(default, int):
        if not number.is_integer():
            raise ValueError("is not a whole number")
        return int(number)
    return number


def _parse_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not math.isfinite(number):
        raise ValueError("is not a number")
    return number
