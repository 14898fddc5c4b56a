"""Load a VAE, the same way for every family."""

from __future__ import annotations

from typing import Any

import torch

from simpletuner.config.schema import CachingConfig
from simpletuner.models.source import Part


def load_vae(vae_class: Any, part: Part, caching: CachingConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """A frozen VAE on a device, with slices and tiles as configured."""
    vae = vae_class.from_pretrained(part.fetch(), torch_dtype=dtype, variant=part.variant)
    vae.requires_grad_(False).eval().to(device)
    if caching.vae_enable_slicing:
        vae.enable_slicing()
    if caching.vae_enable_tiling:
        vae.enable_tiling()
    return vae
