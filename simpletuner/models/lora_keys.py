"""Key names in the LoRA files of common programs, and checks of `init_lora`. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from simpletuner.config.lora import LoraConfig
from simpletuner.errors import Problem, shorten
from simpletuner.models.lora_targets import Targets, matching_modules
from simpletuner.models.source import WeightsError, tensor_shapes

LORA_FILE = "pytorch_lora_weights.safetensors"  # what `load_lora_weights` of diffusers looks for
# Prefixes of keys in LoRA files. diffusers silently loads nothing from keys with a prefix it does not expect.
KNOWN_PREFIXES = ("transformer.", "diffusion_model.", "base_model.model.")
KOHYA_PREFIX = "lora_unet_"
MAGNITUDE = ".lora_magnitude_vector"
COMFYUI_MAGNITUDE = ".dora_scale"
OTHER_KINDS = (".lokr_", ".hada_")  # in keys of LoKr and LoHa
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
    """A key without the prefix that a program puts before module names."""
    for prefix in KNOWN_PREFIXES:
        key = key.removeprefix(prefix)
    return key


def module_of(key: str, modules: Sequence[str]) -> str:
    """The module that a key of a LoRA file belongs to. Kohya's keys have no dots and are looked up in `modules`."""
    if key.startswith(KOHYA_PREFIX):
        stem = key.removeprefix(KOHYA_PREFIX).partition(".")[0]
        return next((name for name in modules if name.replace(".", "_") == stem), stem)
    key = without_prefix(key)
    for marker in (".lora_", ".alpha", COMFYUI_MAGNITUDE):
        key = key.partition(marker)[0]
    return key


def role_of(key: str) -> str | None:
    """The role of a tensor in its LoRA, or None if unknown."""
    return next((role for marker, role in ROLES.items() if marker in key), None)


def check_init_lora(config: LoraConfig, modules: Sequence[str], targets: Targets) -> Iterator[Problem]:
    """Problems of the file `init_lora`, found from its header.

    Args:
        modules: the linear layers of the transformer; empty if it is not on this machine.
        targets: selection of those that are trained.
    """
    key, path = "init_lora", Path(config.init_lora or "").expanduser()
    path = path / LORA_FILE if path.is_dir() else path
    if config.init_lora is None:
        return
    if not path.is_file():
        yield Problem(key, f"{str(path)!r} does not exist.")
        return
    try:
        shapes = tensor_shapes(path)
    except WeightsError as error:
        yield Problem(key, f"{str(path)!r} {error}.")
        return
    if any(marker in name for name in shapes for marker in OTHER_KINDS):
        message = f"{str(path)!r} holds a LoKr or LoHa, whose weights no LoRA can start from; take the LoRA beside it."
        yield Problem(key, message)
        return
    wanted = set(matching_modules(modules, targets))
    ranks = {module_of(name, modules): shape[0] for name, shape in shapes.items() if role_of(name) == "A" and shape}
    if not ranks or (modules and not ranks.keys() & set(modules)):
        first = next(iter(shapes), "no key")
        yield Problem(key, f"no key of {str(path)!r} belongs to this model (the first is {first!r}).")
        return
    found = {module: rank for module, rank in ranks.items() if module in wanted or not wanted}
    others = sorted({rank for rank in found.values() if rank != config.lora_rank})
    if others:
        shown = ", ".join(map(str, others))
        yield Problem(key, f"{str(path)!r} has rank {shown}, lora_rank is {config.lora_rank}.")
    if wanted and (absent := sorted(wanted - ranks.keys())):
        message = f"holds {len(found)} of {len(wanted)} trained layers; the others start untrained ({shorten(absent)})."
        yield Problem(key, f"{str(path)!r} {message}", fatal=False)
    if wanted and (surplus := sorted((ranks.keys() & set(modules)) - wanted)):
        message = f"{len(surplus)} layers of {str(path)!r} are not trained and are dropped ({shorten(surplus)})."
        yield Problem(key, f"{message} Name them in peft_lora_target_modules to keep them.", fatal=False)
