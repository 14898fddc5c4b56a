"""LoRA files: the key names of different programs, and conversions between them.

Two forms are written. diffusers uses `transformer.<module>.lora_A.weight`. ComfyUI's generic form has the prefix
`diffusion_model.` instead, and works for models whose layers have the same names in ComfyUI and diffusers, as Kandinsky
5. ComfyUI defines the magnitudes of a DoRA differently, see `comfyui_magnitude`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from peft import get_peft_model_state_dict
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor

from simpletuner.atomic import UNFINISHED_FOLDER_SUFFIX, write_atomically
from simpletuner.errors import UserError, shorten
from simpletuner.headers import with_metadata
from simpletuner.models.lora_keys import (
    COMFYUI_MAGNITUDE,
    MAGNITUDE,
    METADATA_KEY,
    lora_file,
    lora_settings,
    module_of,
    role_of,
)
from simpletuner.training.manifest import LORA_FILE

LoraForm = Literal["diffusers", "comfyui"]

PREFIXES: dict[LoraForm, str] = {"diffusers": "transformer.", "comfyui": "diffusion_model."}
COMFYUI_PARTS = (".lora_A.weight", ".lora_B.weight", COMFYUI_MAGNITUDE)


def fold_scale(weight: Tensor, scale: float) -> Tensor:
    """The weight times the scale, in its own dtype if that is exact, else in float32."""
    exact = math.frexp(scale)[0] == 0.5  # a power of two changes the exponent alone
    return weight if scale == 1 else weight * scale if exact else weight.float() * scale


def file_settings(settings: Mapping[str, Any], form: LoraForm) -> dict[str, str]:
    """The header entry with the adapter's settings."""
    prefixed = {PREFIXES[form] + key: value for key, value in settings.items()}
    return {METADATA_KEY: json.dumps(prefixed, indent=2, sort_keys=True)}


def write_weights(path: Path, weights: Mapping[str, Tensor], header: Mapping[str, str]) -> Path:
    """Write a safetensors file with header entries, atomically; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, with_metadata(to_safetensors(dict(weights)), {"format": "pt", **header}))
    return path


def release_file(
    folder: Path, write: Callable[[Path], Path], expected: Mapping[str, Tensor], form: LoraForm, pipeline: Any
) -> Path:
    """Write a LoRA file, verify it (see `verify_file`), then move it into place; returns its path.

    Args:
        write: writes the file into a folder and returns its path.
    """
    trial = folder / f"unverified{UNFINISHED_FOLDER_SUFFIX}"
    candidate = write(trial)
    verify_file(candidate, expected, form, pipeline)
    final = candidate.replace(folder / LORA_FILE)
    trial.rmdir()
    return final


def verify_file(path: Path, expected: Mapping[str, Tensor], form: LoraForm, pipeline: Any) -> None:
    """Load a saved file as its users will and compare every tensor with what was to be saved.

    Files in diffusers' form go through `pipe.load_lora_weights`. ComfyUI is not installed here; for its form every name
    must belong to a layer of the model, since ComfyUI uses the same layer names.

    Args:
        pipeline: a new stock pipeline; its transformer needs no weights.

    Raises:
        RuntimeError: a key is missing after loading, or a value differs.
    """
    prefix = PREFIXES[form]
    if form == "diffusers":
        # Its transformer is on the meta device; low_cpu_mem_usage keeps the loaded tensors instead of copying into it.
        pipeline.load_lora_weights(path.parent, weight_name=path.name, adapter_name="check", low_cpu_mem_usage=True)
        loaded = get_peft_model_state_dict(pipeline.transformer, adapter_name="check")
        loaded = {prefix + name: tensor for name, tensor in loaded.items()}
    else:
        layers = [prefix + name for name, _ in pipeline.transformer.named_modules()]
        known = {layer + part for layer in layers for part in COMFYUI_PARTS}
        loaded = {name: each for name, each in load_file(path).items() if name in known}
    wrong = [name for name in expected if name not in loaded or not _equal(loaded[name], expected[name])]
    if wrong or len(loaded) != len(expected):
        raise RuntimeError(f"{path} does not load as it was saved: {shorten(wrong or sorted(loaded))}")


def _equal(loaded: Tensor, expected: Tensor) -> bool:
    """Whether they are equal in the loader's dtype, which is the base weight's."""
    return bool(torch.equal(loaded.cpu(), expected.to(loaded.dtype)))


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


def read_lora_file(path: Path, modules: list[str], key: str = "init_lora") -> dict[str, Tensor]:
    """Read a LoRA file in any common form as `<module>.lora_A.weight` / `lora_B.weight`, scale folded in.

    Magnitudes of a DoRA are `<module>.lora_magnitude_vector`, or `<module>.dora_scale` if they are ComfyUI's.

    Args:
        path: the file, or a folder that holds one.
        modules: names of the transformer's modules, to resolve keys in which dots were replaced.
        key: names the path in errors.

    Raises:
        UserError: the file does not exist, or no key of it belongs to this model.
    """
    path = lora_file(path)
    if not path.is_file():
        raise UserError(f"{key}: {str(path)!r} does not exist.")
    # fp8 has no arithmetic; float32 holds all its values.
    raw = {name: each.float() if each.dtype.itemsize == 1 else each for name, each in load_file(path).items()}
    known = set(modules)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in raw.items():
        module, role = module_of(name, modules), role_of(name)
        if module in known and role:
            pairs.setdefault(module, {})[role] = tensor
    pairs = {module: pair for module, pair in pairs.items() if "A" in pair and "B" in pair}
    if not pairs:
        raise UserError(f"{key}: no key of {str(path)!r} belongs to this model (the first is {next(iter(raw))!r}).")
    settings = lora_settings(path)
    alphas: dict[str, float] = settings["alpha_pattern"]  # of layers whose alpha is not lora_alpha
    weights = {}
    for module, pair in pairs.items():
        rank = pair["A"].shape[0]
        usual = alphas.get(get_pattern_key(alphas, module), settings.get("lora_alpha", rank))
        alpha = float(pair.get("alpha", usual))
        weights[f"{module}.lora_A.weight"] = pair["A"]
        weights[f"{module}.lora_B.weight"] = pair["B"] * (alpha / rank)
        for role, suffix in (("magnitude", MAGNITUDE), ("comfyui magnitude", COMFYUI_MAGNITUDE)):
            if role in pair:
                weights[module + suffix] = pair[role]
    return weights
