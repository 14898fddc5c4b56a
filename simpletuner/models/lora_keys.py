"""Selection of a LoRA's layers, and key names in LoRA files. Imports no torch.

A selection has one of peft's two forms: a list of module names, each matching modules whose dotted path equals or ends
with it, or a regular expression that must match the whole path.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from simpletuner.config.values import read_json
from simpletuner.errors import Problem, Reading, did_you_mean
from simpletuner.headers import METADATA
from simpletuner.models.cost import Shape, Shapes
from simpletuner.models.spec import FamilySpec

LORA_TARGETS = "peft_lora_target_modules"
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E5M2", "F8_E4M3")  # dtypes of the format that a LoRA may have
Targets = list[str] | str


def resolve_targets(value: Any, spec: FamilySpec) -> Reading[Targets]:
    """Resolve a value of `peft_lora_target_modules`; None means the family's default."""
    if isinstance(value, str):
        if value in spec.lora_presets:
            return spec.lora_presets[value]
        if value.endswith(".json") or "/" in value:
            value = yield from read_json(Path(value), list, "a JSON list of module names")
        else:
            value = [name.strip() for name in value.split(",")]
    if value and isinstance(value, list) and all(isinstance(name, str) for name in value):
        return value
    if value is not None:
        yield Problem(LORA_TARGETS, f"{value!r} is not a list of module names.")
    return list(spec.lora_targets)


def matching_modules(modules: Iterable[str], targets: Targets) -> list[str]:
    """The modules that a selection matches."""
    if isinstance(targets, str):
        return [name for name in modules if re.fullmatch(targets, name)]
    # With leading dots, only whole names match: `to_q` does not match `add_to_q`.
    endings = tuple(f".{target}" for target in targets)
    return [name for name in modules if f".{name}".endswith(endings)]


def check_targets(modules: Iterable[str], targets: Targets) -> list[Problem]:
    """Report names that match no module of the transformer, with the nearest names that do."""
    modules = list(modules)
    if isinstance(targets, str):
        return [] if matching_modules(modules, targets) else [Problem(LORA_TARGETS, f"{targets!r} matches no module.")]
    # `to_q`, and `attn1.to_q` or `to_out.0`.
    endings = sorted({".".join(name.split(".")[-depth:]) for name in modules for depth in (1, 2)})
    return [
        Problem(LORA_TARGETS, f"{target!r} matches no module of the transformer.{did_you_mean(target, endings)}")
        for target in targets
        if not matching_modules(modules, [target])
    ]


def weights_of(shapes: Shapes) -> dict[str, Shape]:
    """Shapes of weights with at least two dimensions, by layer, among parameters with these shapes."""
    return {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) > 1}


def linear_modules(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """Linear layers and pointwise convolutions by name, with (out, in) features, among parameters with these shapes.

    Every two-dimensional weight, even of an embedding, counts as a linear layer.
    """
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(".weight") and (len(shape) == 2 or shape[2:] == (1, 1))
    }


STEP_NOTE = "simpletuner.step"  # metadata of a result: its step
ARCHITECTURE = "modelspec.architecture"  # metadata of a result: `family/flavour`, for a LoRA `family/flavour/lora`
LORA_FILE = "pytorch_lora_weights.safetensors"  # the name that `load_lora_weights` of diffusers expects
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
    """peft's settings of a LoRA with these ranks by layer, whose scale is multiplied into its matrices."""
    usual = Counter(ranks.values()).most_common(1)[0][0]
    # Anchored: peft would also match the end of a longer path.
    exceptions = {f"^{name}": rank for name, rank in ranks.items() if rank != usual}
    return {
        "r": usual, "lora_alpha": usual, "rank_pattern": exceptions, "alpha_pattern": exceptions,
        "target_modules": sorted(ranks), "lora_dropout": 0.0, "bias": "none",
    }  # fmt: skip


def rename(header: Mapping[str, Any], form: LoraForm) -> dict[str, Any]:
    """The header of this program's LoRA file in another form; the data that follow are unchanged."""
    notes: dict[str, str] = header[METADATA]
    settings = {without_prefix(key): value for key, value in json.loads(notes[METADATA_KEY]).items()}
    tensors = {PREFIXES[form] + without_prefix(name): each for name, each in header.items() if name != METADATA}
    return {METADATA: {**notes, **file_settings(settings, form)}, **tensors}


def module_of(key: str, modules: Sequence[str]) -> str:
    """The module that a key of a LoRA file belongs to. Kohya's keys have no dots and are looked up in `modules`."""
    if key.startswith(KOHYA_PREFIX):
        stem = key.removeprefix(KOHYA_PREFIX).partition(".")[0]
        # In lora_unet_transformer_blocks_0_attn1_to_q, underscores replace dots too, so compare whole names.
        return next((name for name in modules if name.replace(".", "_") == stem), stem)
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
        if role := role_of(name):
            layers.setdefault(module_of(name, modules), {})[role] = shape
    return layers
