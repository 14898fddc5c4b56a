"""Key names and metadata of LoRA files, in the forms of diffusers, ComfyUI, peft and kohya."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from simpletuner.weights.files import Shape, Shapes

# Dtypes of the format that a LoRA may have.
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3")
# Metadata of a result: its step, and `family/flavour`, for a LoRA `family/flavour/lora`.
STEP_NOTE = "simpletuner.step"
ARCHITECTURE = "modelspec.architecture"
# The name that `load_lora_weights` of diffusers expects.
LORA_FILE = "pytorch_lora_weights.safetensors"
METADATA_KEY = "lora_adapter_metadata"  # the adapter's settings in the header of diffusers' files
# Key prefix of a file. diffusers loads no keys with another prefix, and only logs a warning.
LoraForm = Literal["diffusers", "comfyui"]
PREFIXES: dict[LoraForm, str] = {"diffusers": "transformer.", "comfyui": "diffusion_model."}
KOHYA_PREFIX = "lora_unet_"
MAGNITUDE = ".lora_magnitude_vector"
COMFYUI_MAGNITUDE = ".dora_scale"
OTHER_KINDS = (".lokr_", ".hada_")  # in keys of LoKr and LoHa
# Parts of keys: lora_A and lora_B in peft and diffusers, lora_down and lora_up in Kohya's scripts.
ROLES = {
    ".lora_A.": "A",
    ".lora_down.": "A",
    ".lora_B.": "B",
    ".lora_up.": "B",
    MAGNITUDE: "magnitude",
    COMFYUI_MAGNITUDE: "comfyui magnitude",
    ".alpha": "alpha",
}


def without_prefix(key: str) -> str:
    """A key without the program-specific prefix before the module name."""
    for prefix in (*PREFIXES.values(), "base_model.model."):
        key = key.removeprefix(prefix)
    return key


def file_settings(settings: Mapping[str, Any], form: LoraForm) -> dict[str, str]:
    """The header entry with the adapter's settings."""
    prefixed = {PREFIXES[form] + key: value for key, value in settings.items()}
    return {METADATA_KEY: json.dumps(prefixed, indent=2, sort_keys=True)}


def plain_settings(ranks: Mapping[str, int]) -> dict[str, Any]:
    """peft's settings of a LoRA with these ranks by layer and a scale of 1.

    The matrices already contain its strength.
    """
    ((usual, _),) = Counter(ranks.values()).most_common(1)
    # Anchored: peft would also match the end of a longer path.
    exceptions = {f"^{name}": rank for name, rank in ranks.items() if rank != usual}
    return {
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": exceptions,
        "alpha_pattern": exceptions,
        "target_modules": sorted(ranks),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def module_of(key: str, modules: Sequence[str]) -> str:
    """The module that a key of a LoRA file belongs to.

    Kohya's keys have no dots and are looked up in `modules`.
    """
    if key.startswith(KOHYA_PREFIX):
        stem = key.removeprefix(KOHYA_PREFIX).partition(".")[0]
        for name in modules:
            # In lora_unet_transformer_blocks_0_attn1_to_q, underscores replace dots too, so compare
            # whole names.
            if name.replace(".", "_") == stem:
                return name
        return stem
    key = without_prefix(key)
    for marker in (".lora_", ".alpha", COMFYUI_MAGNITUDE):
        key = key.partition(marker)[0]
    return key


def role_of(key: str) -> str | None:
    """The role of a tensor in its LoRA, or None if unknown."""
    if key.endswith(".bias"):  # of `lora_bias`; a bias is not a matrix of the LoRA
        return None
    for marker, role in ROLES.items():
        if marker in key:
            return role
    return None


def layers_in(shapes: Shapes, modules: Sequence[str] = ()) -> dict[str, dict[str, Shape]]:
    """The tensors of a LoRA file with these shapes, by module and role; see `module_of`."""
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        role = role_of(name)
        if role is not None:
            layers.setdefault(module_of(name, modules), {})[role] = shape
    return layers
