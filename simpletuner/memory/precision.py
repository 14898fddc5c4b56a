"""Dtypes by config name, and whether a device can compute in the configured precision."""

from __future__ import annotations

import torch

from simpletuner.config.precision import (
    UNPACKED,
    Quantisation,
    alternative_to,
    check_capability,
    multiplied,
)
from simpletuner.config.schema import PrecisionConfig
from simpletuner.errors import Problems
from simpletuner.memory.quantisation.scaled_rows import MULTIPLE, multiply
from simpletuner.models.blocks import DEVICE_FAILURES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_device(config: PrecisionConfig, device: torch.device) -> None:
    """Check that the device supports the operations; a CPU does, slowly.

    Raises:
        ConfigError: the device does not support them.
    """
    report = Problems()
    _report_lacking(config, device, report)
    report.raise_if_fatal()


def _report_lacking(config: PrecisionConfig, device: torch.device, report: Problems) -> None:
    """Report what the device lacks: the right vendor, else the capability, else operations."""
    if device.type == "cpu":
        return
    quantisations = multiplied(config)
    is_rocm = device.type == "cuda" and torch.version.hip
    if is_rocm or device.type != "cuda":
        name = "ROCm" if is_rocm else device.type
        for key, stored in quantisations.items():
            remedy = UNPACKED if stored.always else "false"
            report.error(key, f"needs an NVIDIA GPU, not {name}; set it to {remedy}.")
        return
    problems = Problems()
    check_capability(config, torch.cuda.get_device_capability(device), problems)
    report.extend(problems)
    if problems:
        return
    for key, stored in quantisations.items():
        reason = refusal(stored, device)
        if reason:
            report.error(key, f"{stored.name} {reason}")


def refusal(stored: Quantisation, device: torch.device) -> str:
    """Why a small matmul with these weights fails on a device; empty if it works.

    The compute capability is not sufficient: torch 2.10 refuses row-wise scaled fp8 on 12.0
    (pytorch #192707).
    """
    dtype = torch.float8_e4m3fn if "float8" in stored.kind else torch.int8
    side = 2 * MULTIPLE
    rows = torch.zeros(side, side, dtype=torch.bfloat16, device=device)
    levels = torch.zeros(side, side, dtype=dtype, device=device).t()
    try:
        multiply(rows, levels)
    except DEVICE_FAILURES:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        return (
            f"cannot be multiplied by this torch on this GPU ({reason}). {alternative_to(stored)}"
        )
    return ""
