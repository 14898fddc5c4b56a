"""Lets the frozen layers of a model multiply in the bits of their weights (`quantized_matmul`), where a GPU can."""

from __future__ import annotations

import logging

import torch
from torch import nn

from simpletuner.config.precision import UNPACKED, Quantisation, check_capability, multiplied
from simpletuner.config.schema import PrecisionConfig
from simpletuner.errors import ConfigError, Problem, shorten
from simpletuner.memory.precision import QuantisedLinear, QuantisedProducts
from simpletuner.memory.rounding import MULTIPLE, multiply
from simpletuner.models.blocks import DEVICE_FAILURES

logger = logging.getLogger(__name__)


def check_device(config: PrecisionConfig, device: torch.device) -> None:
    """Check that the device has the operations; a CPU has them, slowly.

    Raises:
        ConfigError: it does not.
    """
    asked = multiplied(config)
    if not asked or device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip:
        name = "ROCm" if device.type == "cuda" else device.type
        values = {key: UNPACKED if stored.always else "false" for key, stored in asked.items()}
        message = "needs an NVIDIA GPU, not {}; set it to {}."
        raise ConfigError([Problem(key, message.format(name, value)) for key, value in values.items()])
    if problems := [*check_capability(config, torch.cuda.get_device_capability(device))]:
        raise ConfigError(problems)
    refused = {key: f"{stored.name} {why}" for key, stored in asked.items() if (why := refusal(stored, device))}
    if refused:
        raise ConfigError([Problem(key, message) for key, message in refused.items()])


def refusal(stored: Quantisation, device: torch.device) -> str:
    """Why a small product of such weights fails on a device, empty if it works.

    The compute capability does not tell: torch 2.10 refuses fp8 with scales per row on 12.0 (pytorch #192707).
    """
    dtype = torch.float8_e4m3fn if "float8" in stored.kind else torch.int8
    levels = torch.zeros(2 * MULTIPLE, 2 * MULTIPLE, dtype=dtype, device=device).t()
    try:
        multiply(torch.zeros(2 * MULTIPLE, 2 * MULTIPLE, dtype=torch.bfloat16, device=device), levels)
    except DEVICE_FAILURES:
        raise
    except RuntimeError as error:
        reason, _, _ = str(error).partition("\n")
        remedy = f"Use {UNPACKED}." if stored.always else "Set quantized_matmul false."
        return f"cannot be multiplied by this torch on this GPU ({reason}). {remedy}"
    return ""


def use_quantised_products(model: nn.Module) -> None:
    """Let the quantised layers of a model multiply in their own bits, except for those whose sizes do not allow it."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}
    odd = [name for name, each in layers.items() if each.in_features % MULTIPLE or each.out_features % MULTIPLE]
    for name in layers.keys() - set(odd):
        layers[name].form = QuantisedProducts()
    if odd:
        message = "quantized_matmul: %s are multiplied unpacked, since their sizes are no multiples of %d."
        logger.info(message, shorten(odd), MULTIPLE)
