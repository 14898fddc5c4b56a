"""Precision keys: dtypes by name, and the quantisation of weights.

Dtype and quantisation of an encoder are part of the identity of its cache entries. Names only:
`memory.quantisation` applies these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from simpletuner.config.option import Group, Package, check_installed, common, option, unless, when
from simpletuner.config.types import Flag, Integer
from simpletuner.errors import Problems

if TYPE_CHECKING:  # schema imports this module
    from simpletuner.config.schema import CachingConfig

BITSANDBYTES = Package("bitsandbytes", "bitsandbytes>=0.46,<0.51")
TORCHAO = Package("torchao", "torchao>=0.18,<0.19")
Precision = Literal[
    "no_change",
    "bf16",
    "fp32",
    "int8",
    "int4",
    "int2",
    "fp8",
    "fp8uz",
    "int8-quanto",
    "int4-quanto",
    "int2-quanto",
    "fp8-quanto",
    "fp8uz-quanto",
    "int8-torchao",
    "int8dq-torchao",
    "int4-torchao",
    "fp8-torchao",
    "nf4-bnb",
    "int8-sdnq",
    "uint8-sdnq",
    "int4-sdnq",
    "uint4-sdnq",
]
PLAIN_PRECISIONS = ("no_change", "bf16", "fp32")
Attention = Literal[
    "diffusers", "flex", "flash-attn-2", "flash-attn-3", "flash-attn-4", "xformers", "sageattention"
]
Library = Literal["quanto", "torchao", "bnb"]
recomputed = partial(option, requires=when("gradient_checkpointing"))
# Names of other trainers: why they cannot be used, and what to use instead.
_NO_GRADIENT = "torchao's int4 weights have no gradient for their inputs"
_NO_SDNQ = "SDNQ is not supported"
UNSUPPORTED = {
    name: f"cannot be used: {reason}; the nearest supported value is {replacement}"
    for name, reason, replacement in (
        ("int4-torchao", _NO_GRADIENT, "int4-quanto"),
        ("int8-sdnq", _NO_SDNQ, "int8-quanto"),
        ("uint8-sdnq", _NO_SDNQ, "int8-quanto"),
        ("int4-sdnq", _NO_SDNQ, "int4-quanto"),
        ("uint4-sdnq", _NO_SDNQ, "int4-quanto"),
    )
}
quantised = partial(option, refused=UNSUPPORTED)
PRECISION_KEYS = ("base_model_precision", "text_encoder_1_precision", "text_encoder_2_precision")


class PrecisionConfig(Group):
    """Precision and compute"""

    mixed_precision: Literal["bf16", "no", "fp16", "fp8"] = common(
        "bf16", refused={"fp8": "is not available yet; use bf16"}
    )
    """Compute dtype; no means float32. fp16 is for GPUs without bf16."""
    base_model_precision: Precision = quantised(
        "no_change",
        excludes=when(
            model_type="full",
            because=(
                "a quantised model cannot be trained in full; use model_type lora, or bf16 and "
                "offload auto"
            ),
        )
        & unless(base_model_precision=PLAIN_PRECISIONS),
        common=True,
    )
    """Precision of the frozen transformer. All values but no_change, bf16 and fp32 quantise its
    linear layers, for LoRA only. Names without a library use optimum-quanto."""
    quantized_matmul: Flag = option(
        False,
        requires=when(base_model_precision=("int8", "int8-quanto", "fp8", "fp8-quanto")),
        excludes=when(
            model_type="full", because="it multiplies frozen weights, and it has none; leave it out"
        ),
    )
    """Multiply by the weights of int8-quanto or fp8-quanto without unpacking them; activations and
    gradients are rounded to the same type. Gradients differ by a percent or more; a run prints the
    error."""
    text_encoder_1_precision: Precision = quantised(
        "no_change", label="First Text Encoder Precision", common=True
    )
    """Precision of the first text encoder, with the same choices; part of the cache identity."""
    text_encoder_2_precision: Precision = quantised(
        "no_change", label="Second Text Encoder Precision"
    )
    """Precision of the second text encoder (CLIP in Kandinsky); part of the cache identity."""
    base_model_default_dtype: Literal["bf16", "fp32"] | None = option(
        None,
        default_note="as mixed_precision: bf16",
        requires=unless(
            base_model_precision=PLAIN_PRECISIONS, because="the base model is not quantised"
        ),
    )
    """Compute dtype of a quantised model, and dtype of its unquantised weights."""
    quantize_via: Literal["cpu", "accelerator", "pipeline"] = option("cpu")
    """Device that quantises; same results. accelerator moves one block at a time to the device,
    pipeline one layer."""
    gradient_checkpointing: Flag = common(True)
    """Compute activations again in the backward pass instead of keeping them: far less memory,
    slower steps, same gradients.
    """
    gradient_checkpointing_interval: Integer | None = recomputed(
        None, ge=1, default_note="all blocks"
    )
    """Recompute only every n-th block."""
    gradient_checkpointing_kept_blocks: Integer = recomputed(0, ge=0)
    """Number of recomputed blocks, evenly spaced, that keep their activations instead."""
    attention_mechanism: Attention = common(
        "diffusers",
        refused={"sageattention": "has no backward pass and cannot train; use diffusers"},
        remarks={
            "flex": (
                "is for block-sparse attention; dense attention uses torch's kernel, as with "
                "diffusers"
            )
        },
    )
    """Kernel of dense self-attention; diffusers is torch's. All others need a package, flash-attn-3
    also an H100, flash-attn-4 an H100 or B200."""
    disable_tf32: Flag = option(False)
    """Disable TF32 for float32 matmuls on a GPU. A float32 VAE and modulation never use it."""

    @property
    def checkpoint_interval(self) -> int | None:
        """Every n-th block is recomputed in the backward pass; None: no block."""
        if not self.gradient_checkpointing:
            return None
        return self.gradient_checkpointing_interval or 1

    @property
    def checkpoints_all(self) -> bool:
        """Whether all blocks are recomputed in the backward pass."""
        return self.checkpoint_interval == 1 and not self.gradient_checkpointing_kept_blocks


@dataclass(frozen=True)
class Quantisation:
    """One way to store the weights of linear layers.

    Attributes:
        name: name with its library, as in cache keys: `int8-quanto`, even if the user wrote `int8`.
        library: the library that implements it.
        kind: the library's name for it.
        bits: bits per weight, without the scales of its row or group.
        shared: bytes for the scales of a group; 0 if each row has one scale.
        group: number of weights per group.
        package: required optional package, if any.
        multiplies: minimum CUDA compute capability to multiply these weights without unpacking them
            (`quantized_matmul`); None if unsupported.
        always: they are always multiplied without unpacking.
    """

    name: str
    library: Library
    kind: str
    bits: int
    package: Package | None = None
    shared: int = 0
    group: int = 128
    multiplies: tuple[int, int] | None = None
    always: bool = False

    @property
    def bytes_per_weight(self) -> float:
        """Includes the scales of groups; scales of rows are negligible."""
        return self.bits / 8 + self.shared / self.group


# Turing (7.5) has the first int8 tensor cores, Ada (8.9) the first for float8. Below 8 bits, quanto
# stores a 16-bit scale and shift per group, bitsandbytes a float32 scale.
QUANTISATIONS = {
    stored.name: stored
    for stored in (
        Quantisation("int8-quanto", "quanto", "qint8", 8, multiplies=(7, 5)),
        Quantisation("int4-quanto", "quanto", "qint4", 4, shared=4),
        Quantisation("int2-quanto", "quanto", "qint2", 2, shared=4),
        Quantisation("fp8-quanto", "quanto", "qfloat8_e4m3fn", 8, multiplies=(8, 9)),
        Quantisation("fp8uz-quanto", "quanto", "qfloat8_e4m3fnuz", 8),
        Quantisation("int8-torchao", "torchao", "Int8WeightOnlyConfig", 8, TORCHAO),
        Quantisation(
            "int8dq-torchao",
            "torchao",
            "Int8DynamicActivationInt8WeightConfig",
            8,
            TORCHAO,
            multiplies=(7, 5),
            always=True,
        ),
        Quantisation("fp8-torchao", "torchao", "Float8WeightOnlyConfig", 8, TORCHAO),
        Quantisation("nf4-bnb", "bnb", "nf4", 4, BITSANDBYTES, shared=4, group=64),
    )
}
# As int8dq-torchao, but the weights are unpacked before each product, which every device supports.
UNPACKED = "int8-torchao"


def quantisation(name: str) -> Quantisation | None:
    """The quantisation that a precision key selects; None for plain dtypes."""
    # A bare name means optimum-quanto. no_change, bf16 and fp32 become names that are not in the
    # table, such as bf16-quanto.
    if "-" not in name:
        name = f"{name}-quanto"
    return QUANTISATIONS.get(name)


def quantised_bytes(name: str) -> float:
    """Bytes per weight of a precision that quantises; 0 for a plain one."""
    stored = quantisation(name)
    return stored.bytes_per_weight if stored else 0.0


def check_quantized_matmul(config: PrecisionConfig, report: Problems) -> None:
    """Report weights that `quantized_matmul` cannot multiply as stored."""
    allowed = [
        name for name, stored in QUANTISATIONS.items() if stored.multiplies and not stored.always
    ]
    stored = quantisation(config.base_model_precision)
    if not config.quantized_matmul or (stored is not None and stored.name in allowed):
        return
    advice = "Leave it out."
    if stored is None:
        advice = "Leave it out, or set base_model_precision int8-quanto."
    message = (
        f"multiplies weights stored as {', '.join(allowed)}, not {config.base_model_precision!r}: "
        f"{_why_not(stored)}. {advice}"
    )
    report.error("quantized_matmul", message)


def _why_not(stored: Quantisation | None) -> str:
    """Why weights cannot be multiplied as stored."""
    if stored is None:
        return "these are not quantised"
    if stored.always:
        return "it multiplies in int8 without this key"
    if stored.library == "torchao":
        return "torchao computes its own products"
    if stored.bits == 8:
        return "GPUs multiply another float8"
    return "below 8 bits, scales change within a row"


def multiplied(config: PrecisionConfig) -> dict[str, Quantisation]:
    """Quantisations whose weights are multiplied without unpacking, by the key that asks for it."""
    quantisations = {}
    for key, name in config.model_dump(include=set(PRECISION_KEYS)).items():
        stored = quantisation(name)
        if stored is not None and stored.always:
            quantisations[key] = stored
    base = quantisation(config.base_model_precision)
    if config.quantized_matmul and base is not None:
        quantisations["quantized_matmul"] = base
    return quantisations


def multiplies_in_int8(config: PrecisionConfig) -> bool:
    """Whether the weights of the base model are multiplied in int8."""
    stored = quantisation(config.base_model_precision)
    return config.quantized_matmul and stored is not None and stored.name == "int8-quanto"


def check_capability(
    config: PrecisionConfig, capability: tuple[int, int] | None, report: Problems
) -> None:
    """Report weights that the GPU cannot multiply as stored.

    Args:
        capability: compute capability of the GPU; None if unknown.
    """
    if capability is None:
        return
    for key, stored in multiplied(config).items():
        if stored.multiplies is None or capability >= stored.multiplies:
            continue
        needed = _version_text(stored.multiplies)
        present = _version_text(capability)
        message = (
            f"{stored.name} needs a GPU of compute capability {needed}; this one has {present}. "
            f"{alternative_to(stored, capability)}"
        )
        report.error(key, message)


def _version_text(capability: tuple[int, int]) -> str:
    """`8.9`"""
    return ".".join(map(str, capability))


def alternative_to(stored: Quantisation, capability: tuple[int, int] = (0, 0)) -> str:
    """Advice for a GPU of this compute capability that cannot multiply the weights as stored."""
    if stored.always:
        return f"Use {UNPACKED}."
    usable = []
    for name, candidate in QUANTISATIONS.items():
        if candidate.multiplies and candidate.multiplies <= capability and not candidate.always:
            usable.append(name)
    if not usable:
        return "Set quantized_matmul false."
    return f"Set base_model_precision {' or '.join(usable)}, or quantized_matmul false."


def check_packages(config: PrecisionConfig, report: Problems) -> None:
    """Report quantisations whose package is not installed."""
    for key, name in config.model_dump(include=set(PRECISION_KEYS)).items():
        stored = quantisation(name)
        if stored is not None and stored.package:
            check_installed(stored.package, key, name, report)


def text_encoder_dtype(precision: PrecisionConfig) -> str:
    """bf16 or fp32: the dtype of computation in text encoders."""
    if precision.text_encoder_1_precision in ("bf16", "fp32"):
        return precision.text_encoder_1_precision
    # A float32 run encodes in float32. Never fp16, which overflows in Qwen2.5-VL.
    return "fp32" if precision.mixed_precision == "no" else "bf16"


def text_encoder_storage(precision: PrecisionConfig, encoders: int) -> str:
    """Quantisation of a family's text encoders, for cache keys; "no_change" if none is quantised.

    Args:
        encoders: number of text encoders, 1 or 2.
    """
    # The setting of an encoder that the family lacks must not change cache keys.
    names = (precision.text_encoder_1_precision, precision.text_encoder_2_precision)[:encoders]
    stored_as = []
    for name in names:
        stored = quantisation(name)
        stored_as.append("no_change" if stored is None else stored.name)
    # `int8-quanto` if all agree, else for instance `no_change+nf4-bnb`.
    if len(set(stored_as)) == 1:
        return stored_as[0]
    return "+".join(stored_as)


def vae_dtype(precision: PrecisionConfig, caching: CachingConfig) -> str:
    """bf16, fp16 or fp32."""
    if caching.vae_dtype is not None:
        return caching.vae_dtype
    return "fp32" if precision.mixed_precision == "no" else "bf16"


def transformer_dtype(precision: PrecisionConfig) -> str:
    """bf16, fp16 or fp32: the dtype of computation and of all weights that are not quantised.

    `base_model_precision` bf16 or fp32 is a plain dtype and overrides `mixed_precision`; so does
    `base_model_default_dtype` if the model is quantised.
    """
    if precision.base_model_precision in ("bf16", "fp32"):
        return precision.base_model_precision
    is_quantised = precision.base_model_precision not in PLAIN_PRECISIONS
    if is_quantised and precision.base_model_default_dtype is not None:
        return precision.base_model_default_dtype
    return "fp32" if precision.mixed_precision == "no" else precision.mixed_precision


def compute_dtypes(
    precision: PrecisionConfig, caching: CachingConfig, encoders: int
) -> dict[str, str]:
    """Compute dtypes of the transformer, the VAE and `encoders` text encoders."""
    text = text_encoder_dtype(precision)
    stored = text_encoder_storage(precision, encoders)
    return {
        "mixed_precision.compute": transformer_dtype(precision),
        "text_encoder_1_precision": text if stored == "no_change" else f"{stored} in {text}",
        "vae_dtype": vae_dtype(precision, caching),
    }
