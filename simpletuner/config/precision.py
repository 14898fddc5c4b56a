"""What the precision keys mean: dtypes by name, and ways to store weights in fewer bits.

The dtype and storage of an encoder are part of the identity of what it encodes. No torch here: `memory.precision` does
what these tables say.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from simpletuner.config.option import BITSANDBYTES, TORCHAO, Package
from simpletuner.config.schema import PLAIN_PRECISIONS, CachingConfig, PrecisionConfig
from simpletuner.errors import Problem

Library = Literal["quanto", "torchao", "bnb"]
PRECISION_KEYS = ("base_model_precision", "text_encoder_1_precision", "text_encoder_2_precision")


@dataclass(frozen=True)
class Quantisation:
    """One way to store the weights of linear layers.

    Attributes:
        name: with its library, as it enters cache keys: `int8-quanto`, also where `int8` was written.
        library: whose arithmetic it is.
        kind: what the library calls it.
        bits: of one weight, the scales of its row or group apart.
        shared: bytes of the scales of a group, where a scale is not for a whole row.
        group: weights that share them.
        package: what must be installed for it beside the base install, if anything.
    """

    name: str
    library: Library
    kind: str
    bits: int
    package: Package | None = None
    shared: int = 0
    group: int = 128

    @property
    def bytes_per_weight(self) -> float:
        """With the scales of groups, without those of rows."""
        return self.bits / 8 + self.shared / self.group


QUANTISATIONS = {
    each.name: each
    for each in (
        Quantisation("int8-quanto", "quanto", "qint8", 8),
        Quantisation("int4-quanto", "quanto", "qint4", 4, shared=4),
        Quantisation("int2-quanto", "quanto", "qint2", 2, shared=4),
        Quantisation("fp8-quanto", "quanto", "qfloat8_e4m3fn", 8),
        Quantisation("fp8uz-quanto", "quanto", "qfloat8_e4m3fnuz", 8),
        Quantisation("int8-torchao", "torchao", "Int8WeightOnlyConfig", 8, TORCHAO),
        Quantisation("int8dq-torchao", "torchao", "Int8DynamicActivationInt8WeightConfig", 8, TORCHAO),
        Quantisation("fp8-torchao", "torchao", "Float8WeightOnlyConfig", 8, TORCHAO),
        Quantisation("nf4-bnb", "bnb", "nf4", 4, BITSANDBYTES, shared=4, group=64),
    )
}
# Names that are known and that nothing here can do, with what comes nearest.
UNSUPPORTED = {
    "int4-torchao": ("torchao's int4 weights have no gradient for their inputs", "int4-quanto"),
    "int8-sdnq": ("SDNQ is not supported", "int8-quanto"),
    "uint8-sdnq": ("SDNQ is not supported", "int8-quanto"),
    "int4-sdnq": ("SDNQ is not supported", "int4-quanto"),
    "uint4-sdnq": ("SDNQ is not supported", "int4-quanto"),
}


def quantisation(name: str) -> Quantisation | None:
    """What a value of a precision key quantises to; None for plain dtypes. A bare name means optimum-quanto."""
    if name in PLAIN_PRECISIONS:
        return None
    return QUANTISATIONS[name if "-" in name else f"{name}-quanto"]


def check_quantisations(config: PrecisionConfig) -> Iterator[Problem]:
    """Names that cannot be had at all."""
    for key, name in config.model_dump(include=set(PRECISION_KEYS)).items():
        if name in UNSUPPORTED:
            reason, instead = UNSUPPORTED[name]
            yield Problem(key, f"{name!r} cannot be used: {reason}; {instead} is the nearest that can.")


def check_packages(config: PrecisionConfig) -> Iterator[Problem]:
    """Names whose package is not installed."""
    for key, name in config.model_dump(include=set(PRECISION_KEYS)).items():
        package = None if name in PLAIN_PRECISIONS or name in UNSUPPORTED else _package_of(name)
        if package is not None and importlib.util.find_spec(package.module) is None:
            install = f"pip install 'simpletuner[{package.extra}]'"
            yield Problem(key, f"{name!r} needs the package {package.name}, which is not installed: {install}")


def text_encoder_dtype(precision: PrecisionConfig) -> str:
    """bf16 or fp32. A float32 run encodes in float32; float16 overflows in Qwen2.5-VL, so bf16 stands in for it."""
    if precision.text_encoder_1_precision in ("bf16", "fp32"):
        return precision.text_encoder_1_precision
    return "fp32" if precision.mixed_precision == "no" else "bf16"


def text_encoder_storage(precision: PrecisionConfig, encoders: int) -> str:
    """How the weights of a family's text encoders are stored, for cache keys: "no_change" where none is quantised.

    Args:
        encoders: how many the family has, 1 or 2.
    """
    names = (precision.text_encoder_1_precision, precision.text_encoder_2_precision)[:encoders]
    stored = [found.name if (found := quantisation(name)) else "no_change" for name in names]
    return stored[0] if len(set(stored)) == 1 else "+".join(stored)


def vae_dtype(precision: PrecisionConfig, caching: CachingConfig) -> str:
    """bf16, fp16 or fp32."""
    return caching.vae_dtype or ("fp32" if precision.mixed_precision == "no" else "bf16")


def transformer_dtype(precision: PrecisionConfig) -> str:
    """bf16, fp16 or fp32: the dtype of the computation and of all weights that are not quantised.

    `base_model_precision` bf16 or fp32 is a plain dtype and wins over `mixed_precision`; so does
    `base_model_default_dtype` where the model is quantised.
    """
    if precision.base_model_precision in ("bf16", "fp32"):
        return precision.base_model_precision
    if precision.base_model_default_dtype is not None and precision.base_model_precision not in PLAIN_PRECISIONS:
        return precision.base_model_default_dtype
    return "fp32" if precision.mixed_precision == "no" else precision.mixed_precision


def _package_of(name: str) -> Package | None:
    found = quantisation(name)
    return found.package if found else None
