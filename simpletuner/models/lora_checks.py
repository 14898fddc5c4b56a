"""Checks of LoRA files by their headers, before a weight is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from pathlib import Path

from simpletuner.config.lora import LoraConfig
from simpletuner.config.paths import home_path, missing_path, similar_path
from simpletuner.errors import Problems, counted, shorten
from simpletuner.headers import METADATA, read_header
from simpletuner.models.lora_layers import Targets, matching_modules
from simpletuner.weights.files import Shape, Shapes, WeightsError, tensor_shapes, weights_header
from simpletuner.weights.lora_names import (
    COMFYUI_MAGNITUDE,
    FLOATS,
    MAGNITUDE,
    OTHER_KINDS,
    layers_in,
    role_of,
)
from simpletuner.weights.published_lora import find_lora, lora_settings, model_in_header

INIT = "init_lora"
# (out, in) features of a model's linear layers by name; empty if it is not on this machine.
Features = Mapping[str, tuple[int, int]]


def check_init_lora(
    config: LoraConfig, modules: Features, targets: Targets, family: str, report: Problems
) -> None:
    """Report problems of the file `init_lora`, from its header.

    Args:
        modules: the linear layers of the transformer; empty if it is not on this machine.
        targets: selection of the trained layers.
        family: family of the model.
    """
    if config.init_lora is None:
        return
    path = find_lora(config.init_lora)
    if path is None:
        _check_hub_id(config.init_lora, report)
        return
    faults = Problems()
    shapes = read_shapes(INIT, path, faults)
    if _is_other_kind(shapes):
        report.error(
            INIT,
            f"{str(path)!r} holds a LoKr or LoHa, whose weights no LoRA can start from; take the "
            "LoRA beside it.",
        )
        return
    if shapes:
        _check_contents(INIT, path, shapes, modules, family, faults)
    report.extend(faults)
    if not shapes or faults.are_fatal:
        return  # what follows would only report consequences
    trigger = read_header(path)[METADATA].get("trigger")
    if trigger:
        phrase = str(trigger).strip()
        report.warn(
            INIT,
            f"{str(path)!r} was trained with captions that begin with {phrase!r}; begin yours "
            "with it, too.",
        )
    _check_layers(config, path, shapes, modules, set(matching_modules(modules, targets)), report)


def _is_other_kind(shapes: Shapes) -> bool:
    """Whether a file has the weights of another kind of adapter."""
    return any(marker in name for name in shapes for marker in OTHER_KINDS)


def _check_hub_id(location: str, report: Problems) -> None:
    """Problems of a LoRA that is still on the hub."""
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        report.error(
            INIT,
            f"{location!r} is not on this machine, and HF_HUB_OFFLINE forbids a download. Unset "
            "it, or download the LoRA and its settings file, and name their folder.",
        )
    elif home_path(location).parent.is_dir():
        report.warn(
            INIT,
            f"there is no file or folder {location!r}, so it is treated as a Hugging Face LoRA id."
            f"{similar_path(home_path(location))}",
        )


def _check_layers(
    config: LoraConfig,
    path: Path,
    shapes: Shapes,
    modules: Features,
    trained: Set[str],
    report: Problems,
) -> None:
    """Compare the layers of `init_lora` with the trained layers, if these are known."""
    layers = layers_in(shapes, list(modules))
    ranks = {layer: parts["A"][0] for layer, parts in layers.items() if parts.get("A")}
    compared = trained or set(ranks)
    used_ranks = {rank for layer, rank in ranks.items() if layer in compared}
    differing = sorted(used_ranks - {config.lora_rank})
    if differing:
        shown = ", ".join(map(str, differing))
        report.error(INIT, f"{str(path)!r} has rank {shown}, lora_rank is {config.lora_rank}.")
    is_dora = any(name.endswith((MAGNITUDE, COMFYUI_MAGNITUDE)) for name in shapes)
    if is_dora and not config.use_dora:
        report.error(INIT, f"{str(path)!r} is a DoRA; set use_dora.")
    if trained:
        _check_coverage(path, trained, ranks.keys() & set(modules), report)


def _check_coverage(path: Path, trained: Set[str], held: Set[str], report: Problems) -> None:
    """Report trained layers missing in the file, and layers in the file that are not trained."""
    absent = sorted(trained - held)
    if absent:
        report.warn(
            INIT,
            f"{str(path)!r} holds {len(trained & held)} of {len(trained)} trained layers; the "
            f"others start untrained ({shorten(absent)}).",
        )
    surplus = sorted(held - trained)
    if surplus:
        report.warn(
            INIT,
            f"not trained, so dropped: {counted(len(surplus), 'layer')} of {str(path)!r} "
            f"({shorten(surplus)}). Name them in peft_lora_target_modules to keep them.",
        )


def read_shapes(key: str, path: Path, report: Problems) -> dict[str, Shape]:
    """Names and shapes in the LoRA file of a key.

    Empty, with a problem reported, if the file cannot be used.
    """
    if not path.is_file():
        report.error(key, missing_path(path))
        return {}
    try:
        shapes = tensor_shapes(path)
        if not shapes:
            raise WeightsError("holds no weights")
        _check_header(path)
        lora_settings(path)
        return shapes
    except WeightsError as error:
        report.error(key, f"{str(path)!r} {error}.")
        return {}


def _check_header(path: Path) -> None:
    """Check the dtypes and shapes in a LoRA file.

    Raises:
        WeightsError: they cannot be those of a LoRA; the message follows the file's name.
    """
    header = weights_header(path)
    not_floats = []
    for name, (dtype, _) in header.items():
        is_factor = role_of(name) not in (None, "alpha")
        if is_factor and dtype not in FLOATS:
            not_floats.append(f"{name} ({dtype})")
    if not_floats:
        raise WeightsError(
            f"contains weights that are not floating point: {shorten(not_floats, 3)}"
        )
    layers = layers_in({name: shape for name, (_, shape) in header.items()})
    unpaired = _unpaired(layers)
    if unpaired:
        raise WeightsError(
            f"has layers whose A and B matrices do not match: {shorten(unpaired, 3)}"
        )
    per_input = _magnitudes_of_inputs(layers)
    if per_input:
        raise WeightsError(
            "is a DoRA with a magnitude per input, where one per output is supported: "
            f"{shorten(per_input, 3)}"
        )


def _unpaired(layers: Mapping[str, Mapping[str, Shape]]) -> list[str]:
    """Layers whose A and B cannot be multiplied, or whose alpha is not a single number."""
    wrong = []
    for layer, parts in layers.items():
        down = parts.get("A", ())
        up = parts.get("B", ())
        alpha = parts.get("alpha", ())
        are_matrices = len(down) > 1 and len(up) > 1
        fits = are_matrices and down[0] == up[1] > 0 and math.prod(alpha) == 1
        if not fits and ("A" in parts or "B" in parts):
            shapes = f"A {list(down)}, B {list(up)}"
            if alpha:
                shapes += f", alpha {list(alpha)}"
            wrong.append(f"{layer} ({shapes})")
    return wrong


def _magnitudes_of_inputs(layers: Mapping[str, Mapping[str, Shape]]) -> list[str]:
    """Layers of a DoRA whose magnitudes are not one per output.

    LyCORIS writes one per input with `wd_on_output: false`. ComfyUI distinguishes the two by the
    first side of the tensor, and so does this, even for a square layer.
    """
    wrong = []
    for layer, parts in layers.items():
        outputs = parts["B"][0] if "B" in parts else 0
        plain = parts.get("magnitude")
        comfyui = parts.get("comfyui magnitude")
        if plain is not None and math.prod(plain) != outputs:
            wrong.append(f"{layer} ({list(plain)} for {outputs} outputs)")
        elif comfyui is not None and (math.prod(comfyui) != outputs or comfyui[0] != outputs):
            wrong.append(f"{layer} ({list(comfyui)} for {outputs} outputs)")
    return wrong


def check_lora_file(key: str, path: Path, modules: Features, family: str, report: Problems) -> None:
    """Report problems of applying a whole LoRA file to a model, from its header.

    Args:
        modules: (out, in) features of the model's linear layers; empty if it is not on this
            machine.
        family: family of the model.
    """
    shapes = read_shapes(key, path, report)
    if shapes:
        _check_contents(key, path, shapes, modules, family, report)


def _check_contents(
    key: str, path: Path, shapes: Shapes, modules: Features, family: str, report: Problems
) -> None:
    """Report a LoRA of another family, tensors that no LoRA has, and layers that do not fit."""
    trained_on, _ = model_in_header(path)
    if trained_on not in ("", family):
        report.error(key, f"{str(path)!r} was trained on {trained_on}, not on {family}.")
        return
    unknown = [name for name in shapes if role_of(name) is None]
    if unknown:
        report.error(key, f"{str(path)!r} is not a plain LoRA: it holds {shorten(unknown, 3)}.")
    if modules:
        _check_fit(key, path, layers_in(shapes, list(modules)), modules, report)


def _check_fit(
    key: str,
    path: Path,
    layers: Mapping[str, Mapping[str, Shape]],
    modules: Features,
    report: Problems,
) -> None:
    """Compare the layers of a LoRA file with the model's."""
    foreign = sorted(layers.keys() - modules.keys())
    if foreign:
        message = f"layers in {str(path)!r} are not in this model ({shorten(foreign, 3)})."
        report.error(key, f"{len(foreign)} of {len(layers)} {message}")
    for layer, parts in layers.items():
        if layer not in modules or "A" not in parts:
            continue
        outputs, inputs = modules[layer]
        features = (parts["B"][0], parts["A"][1])  # every A has its B, see `_unpaired`
        if features != (outputs, inputs):
            in_file = f"{features[0]}x{features[1]}"
            message = (
                f"{layer} has {outputs}x{inputs} features in the model and {in_file} in the file."
            )
            report.error(key, f"{str(path)!r} is for other layers: {message}")
            return
