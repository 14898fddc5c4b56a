"""Where the VAE of a preview is while the transformer draws, and the other way round."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from simpletuner.config.schema import OffloadConfig
from simpletuner.memory.offload.attach import offload_layers


def place_vae(vae: nn.Module, transformer: nn.Module, config: OffloadConfig, device: torch.device) -> None:
    """Put a loaded VAE where the configuration wants it; by default it stays whole on the device."""
    if config.group_offload_vae:
        offload_layers(vae, config, device)
    elif config.enable_model_cpu_offload:
        take_turns(transformer, vae, device)


def take_turns(transformer: nn.Module, vae: nn.Module, device: torch.device) -> None:
    """Let the VAE come to the device for encoding and decoding only, and the transformer leave meanwhile.

    Parameters stay the same objects, so training goes on behind a preview as if nothing had moved.
    """
    vae.to("cpu")
    for name in ("encode", "decode"):
        inner = getattr(vae, name)

        @functools.wraps(inner)
        def alone(*inputs: Any, inner: Any = inner, **settings: Any) -> Any:
            transformer.to("cpu")
            vae.to(device)
            try:
                return inner(*inputs, **settings)
            finally:
                vae.to("cpu")
                transformer.to(device)

        setattr(vae, name, alone)
