"""Lets the frozen layers of a model multiply in the bits of their weights (`quantized_matmul`), where a GPU can."""

from __future__ import annotations

import logging

import torch
from torch import nn

from simpletuner.config.precision import UNPACKED, check_capability, multiplied
from simpletuner.config.schema import PrecisionConfig
from simpletuner.errors import ConfigError, Problem, shorten
from simpletuner.memory.precision import QuantisedLinear, QuantisedProducts
from simpletuner.memory.rounding import MULTIPLE

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


def use_quantised_products(model: nn.Module) -> None:
    """Let the quantised layers of a model multiply in their own bits, except for those whose sizes do not allow it."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QuantisedLinear)}
    odd = [name for name, each in layers.items() if each.in_features % MULTIPLE or each.out_features % MULTIPLE]
    for name in layers.keys() - set(odd):
        layers[name].form = QuantisedProducts()
    if odd:
        message = "quantized_matmul: %s are multiplied unpacked, since their sizes are no multiples of %d."
        logger.info(message, shorten(odd), MULTIPLE)
