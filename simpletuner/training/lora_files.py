"""LoRA files: the key names of different programs, and conversions between them.

Two forms are written. diffusers uses `transformer.<module>.lora_A.weight`. ComfyUI's generic form has the prefix
`diffusion_model.` instead, and works for models whose layers have the same names in ComfyUI and diffusers, as Kandinsky
5. ComfyUI defines the magnitudes of a DoRA differently, see `comfyui_magnitude`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

from simpletuner.errors import UserError
from simpletuner.headers import METADATA, read_header
from simpletuner.models.lora_keys import COMFYUI_MAGNITUDE, MAGNITUDE, module_of, role_of, without_prefix
from simpletuner.training.manifest import LORA_FILE

LoraForm = Literal["diffusers", "comfyui"]

PREFIXES: dict[LoraForm, str] = {"diffusers": "transformer.", "comfyui": "diffusion_model."}
# diffusers reads the adapter's settings from this entry of the safetensors header.
METADATA_KEY = "lora_adapter_metadata"
COMFYUI_PARTS = (".lora_A.weight", ".lora_B.weight", COMFYUI_MAGNITUDE)


def fold_scale(weight: Tensor, scale: float) -> Tensor:
    """The weight times the scale, in its own dtype if that is exact, else in float32."""
    exact = math.frexp(scale)[0] == 0.5  # a power of two changes the exponent alone
    return weight if scale == 1 else weight * scale if exact else weight.float() * scale


def file_settings(settings: Mapping[str, Any], form: LoraForm) -> dict[str, str]:
    """The header entry with the adapter's settings."""
    prefixed = {PREFIXES[form] + key: value for key, value in settings.items()}
    return {METADATA_KEY: json.dumps(prefixed, indent=2, sort_keys=True)}


def comfyui_magnitude(magnitude: Tensor, base: Tensor, update: Tensor) -> Tensor:
    """The magnitude with which ComfyUI computes the trained weight.

    With W the base weight, D the update and m the magnitude, DoRA's weight is m (W + D) / |W + D|
    (arXiv:2402.09353, equation 5), each row with its own norm. ComfyUI divides by |W| instead, so it gets
    m |W| / |W + D|.

    Args:
        magnitude: (out,).
        base, update: (out, in).

    Returns:
        (out, 1): by this shape ComfyUI knows that it is per row.
    """
    return (magnitude.float() * _norm_ratio(base, update))[:, None].to(magnitude.dtype)


def trained_magnitude(scale: Tensor, base: Tensor, update: Tensor) -> Tensor:
    """The trained magnitude (out,) of ComfyUI's `dora_scale`; the inverse of `comfyui_magnitude`."""
    return (scale.float().flatten() / _norm_ratio(base, update)).to(scale.dtype)


def _norm_ratio(base: Tensor, update: Tensor) -> Tensor:
    base, update = base.detach().float().cpu(), update.detach().float().cpu()
    return base.norm(dim=1) / (base + update).norm(dim=1)


def read_lora_file(path: Path, modules: list[str]) -> dict[str, Tensor]:
    """Read a LoRA file in any common form as `<module>.lora_A.weight` / `lora_B.weight`, scale folded in.

    Magnitudes of a DoRA are `<module>.lora_magnitude_vector`, or `<module>.dora_scale` if they are ComfyUI's.

    Args:
        path: the file, or a folder with `pytorch_lora_weights.safetensors`.
        modules: names of the transformer's modules, to resolve keys in which dots were replaced.

    Raises:
        UserError: the file does not exist, or no key of it belongs to this model.
    """
    path = path / LORA_FILE if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"init_lora: {str(path)!r} does not exist.")
    raw = load_file(path)
    known = set(modules)
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in raw.items():
        module, role = module_of(key, modules), role_of(key)
        if module in known and role:
            pairs.setdefault(module, {})[role] = tensor
    pairs = {module: pair for module, pair in pairs.items() if "A" in pair and "B" in pair}
    if not pairs:
        raise UserError(f"init_lora: no key of {str(path)!r} belongs to this model (the first is {next(iter(raw))!r}).")
    settings = _settings_of(path)
    weights = {}
    for module, pair in pairs.items():
        rank = pair["A"].shape[0]
        alpha = float(pair["alpha"]) if "alpha" in pair else float(settings.get("lora_alpha", rank))
        weights[f"{module}.lora_A.weight"] = pair["A"]
        weights[f"{module}.lora_B.weight"] = pair["B"] * (alpha / rank)
        for role, suffix in (("magnitude", MAGNITUDE), ("comfyui magnitude", COMFYUI_MAGNITUDE)):
            if role in pair:
                weights[module + suffix] = pair[role]
    return weights


def _settings_of(path: Path) -> dict[str, Any]:
    metadata = read_header(path).get(METADATA, {})
    raw = json.loads(metadata[METADATA_KEY]) if METADATA_KEY in metadata else {}
    return {without_prefix(key): value for key, value in raw.items()}
