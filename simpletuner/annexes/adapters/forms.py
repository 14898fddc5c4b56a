"""In which program's form a LoRA is, and whether ComfyUI can use its model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from simpletuner.headers import METADATA, read_header
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.weights import lora_names
from simpletuner.weights.lora_names import PREFIXES, LoraForm
from simpletuner.weights.published_lora import model_in_header

DORA = (
    "The magnitudes of a DoRA differ between diffusers and ComfyUI, by norms of the model's "
    "weights."
)


def form_of(names: Iterable[str]) -> LoraForm:
    """The form of a file with tensors of these names; that of other programs is diffusers'."""
    if any(name.startswith(PREFIXES["comfyui"]) for name in names):
        return "comfyui"
    return "diffusers"


def why_not_comfyui(family: str, flavour: str) -> str:
    """Why ComfyUI cannot use what was trained for a model; empty if it can."""
    spec = FAMILIES.get(family)
    if spec is None:
        return "ComfyUI cannot load it: it has no built-in model of this family."
    if not spec.in_comfyui:
        return f"ComfyUI cannot load it: it has no built-in {spec.title}."
    if not spec.for_flavour(flavour).in_comfyui:
        return f"ComfyUI cannot use it: it cannot run {spec.title} {flavour}."
    return ""


def holds_magnitudes(names: Iterable[str]) -> bool:
    """Whether a file with tensors of these names is a DoRA."""
    suffixes = (lora_names.MAGNITUDE, lora_names.COMFYUI_MAGNITUDE)
    return any(name.endswith(suffixes) for name in names)


def model_of(path: Path) -> tuple[str, str]:
    """Family and flavour of a LoRA, from its header; else the family with layers of its names.

    Both are empty if they are unknown.
    """
    family, flavour = model_in_header(path)
    if family:
        return family, flavour
    names = [lora_names.without_prefix(name) for name in read_header(path) if name != METADATA]
    for spec in FAMILIES.values():
        if _has_layers_of(spec, names):
            return spec.name, ""
    return "", ""


def _has_layers_of(spec: FamilySpec, names: Iterable[str]) -> bool:
    """Whether a layer is in a group of a family's blocks."""
    groups = tuple(f"{group}." for group in spec.block_counts)
    return any(name.startswith(groups) for name in names)
