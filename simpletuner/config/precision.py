"""Which dtype the encoders run in, by name: part of the identity of what they encode."""

from __future__ import annotations

from .schema import CachingConfig, PrecisionConfig


def text_encoder_dtype(precision: PrecisionConfig) -> str:
    """bf16 or fp32. A float32 run encodes in float32; float16 overflows in Qwen2.5-VL, so bf16 stands in for it."""
    if precision.text_encoder_1_precision in ("bf16", "fp32"):
        return precision.text_encoder_1_precision
    return "fp32" if precision.mixed_precision == "no" else "bf16"


def vae_dtype(precision: PrecisionConfig, caching: CachingConfig) -> str:
    """bf16, fp16 or fp32."""
    return caching.vae_dtype or ("fp32" if precision.mixed_precision == "no" else "bf16")


def transformer_dtype(precision: PrecisionConfig) -> str:
    """bf16, fp16 or fp32. `base_model_precision` bf16 or fp32 is a plain dtype and wins over `mixed_precision`."""
    if precision.base_model_precision in ("bf16", "fp32"):
        return precision.base_model_precision
    return "fp32" if precision.mixed_precision == "no" else precision.mixed_precision
