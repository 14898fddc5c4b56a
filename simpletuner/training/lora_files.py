"""LoRA files: reading, verified writing, and conversions between the forms of programs.

Two forms are written. diffusers uses `transformer.<module>.lora_A.weight`. ComfyUI's generic form
has the prefix `diffusion_model.` instead, and works for models whose layers have the same names in
ComfyUI and diffusers, such as Kandinsky 5. ComfyUI defines the magnitudes of a DoRA differently,
see `comfyui_magnitude`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from simpletuner.atomic import UNFINISHED_FOLDER_SUFFIX, write_json
from simpletuner.errors import UserError, shorten
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.training.lora_writing import write_weights
from simpletuner.weights import lora_names
from simpletuner.weights.lora_names import LORA_FILE, PREFIXES, LoraForm
from simpletuner.weights.published_lora import lora_file, lora_settings

MAGNITUDES = {"magnitude": lora_names.MAGNITUDE, "comfyui magnitude": lora_names.COMFYUI_MAGNITUDE}
COMFYUI_PARTS = (".lora_A.weight", ".lora_B.weight", lora_names.COMFYUI_MAGNITUDE)


def write_verified(
    folder: Path,
    weights: Mapping[str, Tensor],
    header: Mapping[str, str],
    form: LoraForm,
    adapter: FamilyAdapter,
) -> Path:
    """Write a LoRA file, verify it (see `verify_file`), then move it into place; returns its path.

    The settings in its header are also written beside it, if the family's official program reads
    them there.
    """
    candidate = folder / f"unverified{UNFINISHED_FOLDER_SUFFIX}" / LORA_FILE
    write_weights(candidate, weights, header)
    verify_file(candidate, weights, form, adapter.load_bare_pipeline())
    if adapter.spec.lora_settings_file and form == "diffusers":
        settings = json.loads(header[lora_names.METADATA_KEY])
        plain = {lora_names.without_prefix(key): value for key, value in settings.items()}
        write_json(folder / adapter.spec.lora_settings_file, plain)
    # Atomic, so that a file with this name is always verified.
    final = candidate.replace(folder / LORA_FILE)
    candidate.parent.rmdir()
    return final


def verify_file(path: Path, expected: Mapping[str, Tensor], form: LoraForm, pipeline: Any) -> None:
    """Load a saved file as users will, and compare every tensor with the expected one.

    Files in diffusers' form are loaded with `pipe.load_lora_weights`. ComfyUI is not installed
    here; in its form, every name must belong to a layer of the model, since ComfyUI uses the same
    layer names.

    Args:
        pipeline: a new stock pipeline; its transformer needs no weights.

    Raises:
        RuntimeError: a key is missing after loading, or a value differs.
    """
    loaded = _load_as_users_do(path, form, pipeline)
    wrong = []
    for name, tensor in expected.items():
        if name not in loaded or not _equal(loaded[name], tensor):
            wrong.append(name)
    if wrong or len(loaded) != len(expected):
        raise RuntimeError(
            f"{path} does not load as it was saved: {shorten(wrong or sorted(loaded))}"
        )


def _load_as_users_do(path: Path, form: LoraForm, pipeline: Any) -> dict[str, Tensor]:
    """The tensors that the user's program loads from a file."""
    prefix = PREFIXES[form]
    if form == "diffusers":
        # The transformer is on the meta device; low_cpu_mem_usage keeps the loaded tensors instead
        # of copying.
        pipeline.load_lora_weights(
            path.parent, weight_name=path.name, adapter_name="check", low_cpu_mem_usage=True
        )
        loaded = get_peft_model_state_dict(pipeline.transformer, adapter_name="check")
        return {prefix + name: tensor for name, tensor in loaded.items()}
    layers = [prefix + name for name, _ in pipeline.transformer.named_modules()]
    known = {layer + part for layer in layers for part in COMFYUI_PARTS}
    return {name: tensor for name, tensor in load_file(path).items() if name in known}


def _equal(loaded: Tensor, expected: Tensor) -> bool:
    """Whether the tensors are equal in the loader's dtype, which is that of the base weight."""
    return bool(torch.equal(loaded.cpu(), expected.to(loaded.dtype)))


def comfyui_magnitude(magnitude: Tensor, base: Tensor, update: Tensor) -> Tensor:
    """The magnitude with which ComfyUI computes the trained weight.

    With the base weight W, the update D and the magnitude m, DoRA's weight is m (W + D) / |W + D|
    (arXiv:2402.09353, equation 5), with norms per row. ComfyUI divides by |W| instead, so its
    magnitude is m |W| / |W + D|.

    Args:
        magnitude: (out,).
        base, update: (out, in).

    Returns:
        (out, 1), the shape from which ComfyUI infers that it is per row.
    """
    return (magnitude.float() * _norm_ratio(base, update))[:, None].to(magnitude.dtype)


def trained_magnitude(scale: Tensor, base: Tensor, update: Tensor) -> Tensor:
    """The trained magnitude (out,) from ComfyUI's; the inverse of `comfyui_magnitude`."""
    return (scale.float().flatten() / _norm_ratio(base, update)).to(scale.dtype)


def _norm_ratio(base: Tensor, update: Tensor) -> Tensor:
    """|W| / |W + D| per row."""
    base = base.detach().float().cpu()
    update = update.detach().float().cpu()
    return base.norm(dim=1) / (base + update).norm(dim=1)


def read_lora_file(path: Path, modules: list[str], key: str = "init_lora") -> dict[str, Tensor]:
    """Read a LoRA file in any common form, with the scale folded in.

    Names of the result are `<module>.lora_A.weight` and `<module>.lora_B.weight`. Magnitudes of a
    DoRA are `<module>.lora_magnitude_vector`, or `<module>.dora_scale` in ComfyUI's form.

    Args:
        path: the file, or a folder with one.
        modules: names of the transformer's modules, to resolve keys with replaced dots.
        key: config key of the path, for errors.

    Raises:
        UserError: the file does not exist, or none of its keys belongs to this model.
    """
    path = lora_file(path)
    if not path.is_file():
        raise UserError(f"{key}: {str(path)!r} does not exist.")
    raw = load_file(path)
    for name, tensor in raw.items():
        if tensor.dtype.itemsize == 1:
            raw[name] = tensor.float()  # fp8 has no arithmetic; float32 can represent its values
    damaged = [name for name, tensor in raw.items() if not bool(tensor.isfinite().all())]
    if damaged:
        raise UserError(
            f"{key}: {str(path)!r} holds NaN or infinite values in {shorten(damaged, 3)}."
        )
    pairs = _by_module(raw, modules)
    if not pairs:
        first = next(iter(raw))
        raise UserError(
            f"{key}: no key of {str(path)!r} belongs to this model (the first is {first!r})."
        )
    settings = lora_settings(path)
    weights = {}
    for module, pair in pairs.items():
        rank = pair["A"].shape[0]
        if "alpha" in pair:
            scale = float(pair["alpha"]) / rank
        else:
            scale = settings.scale(module, rank)
        weights[f"{module}.lora_A.weight"] = pair["A"]
        weights[f"{module}.lora_B.weight"] = pair["B"] * scale
        for role, suffix in MAGNITUDES.items():
            if role in pair:
                weights[module + suffix] = pair[role]
    return weights


def _by_module(raw: Mapping[str, Tensor], modules: list[str]) -> dict[str, dict[str, Tensor]]:
    """The tensors of each module with a LoRA pair, by role."""
    known = set(modules)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in raw.items():
        module = lora_names.module_of(name, modules)
        role = lora_names.role_of(name)
        if module in known and role:
            pairs.setdefault(module, {})[role] = tensor
    return {module: pair for module, pair in pairs.items() if "A" in pair and "B" in pair}


def layer_names(transformer: nn.Module) -> list[str]:
    """The names of a transformer's modules, as without a LoRA."""
    return [name.removesuffix(".base_layer") for name, _ in transformer.named_modules()]
