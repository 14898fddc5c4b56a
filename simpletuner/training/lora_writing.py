"""Writes LoRA files. Needs torch, but neither peft nor diffusers, which take seconds to load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save as to_safetensors
from torch import Tensor

from simpletuner.atomic import write_atomically
from simpletuner.headers import with_metadata


def fold_scale(weight: Tensor, scale: float) -> Tensor:
    """The weight times the scale, in the weight's dtype if that is exact, else in float32."""
    exact = math.frexp(scale)[0] == 0.5  # a power of two changes only the exponent
    return weight * scale if exact else weight.float() * scale


def write_weights(path: Path, weights: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file with header entries, atomically, and its folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    write_atomically(path, with_metadata(to_safetensors(content), {"format": "pt", **header}))
