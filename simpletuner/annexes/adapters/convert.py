"""Converts a result for another program: a LoRA, LoKr or LoHa between the key names of diffusers
and ComfyUI, and a fully fine-tuned transformer to one file.

The values stay as they are. Only a strength, where it is stated apart from the matrices, is
multiplied into them, since the programs look for it in different places.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from simpletuner.annexes.adapters.forms import (
    DORA,
    form_of,
    holds_magnitudes,
    model_of,
    why_not_comfyui,
)
from simpletuner.annexes.figures import is_number
from simpletuner.atomic import open_atomically
from simpletuner.config.json_reader import read_json
from simpletuner.config.paths import missing_path
from simpletuner.errors import Problems, UserError, shorten
from simpletuner.headers import METADATA, join_header, read_head, read_header
from simpletuner.models.lora_checks import read_shapes
from simpletuner.planning.checkpoint_folder import NOTE_FILE, PIPELINE_FOLDER
from simpletuner.training.lora_writing import fold_scale, write_weights
from simpletuner.weights.files import WeightsError, weights_header
from simpletuner.weights.lora_names import (
    ARCHITECTURE,
    COMFYUI_MAGNITUDE,
    KOHYA_PREFIX,
    LORA_FILE,
    MAGNITUDE,
    METADATA_KEY,
    OTHER_KINDS,
    PREFIXES,
    STEP_NOTE,
    LoraForm,
    file_settings,
    module_of,
    plain_settings,
    role_of,
    without_prefix,
)
from simpletuner.weights.published_lora import LoraSettings, lora_file, lora_settings

KEY = "convert"
FOLDER = "transformer"  # of a pipeline
STRENGTH_NOTE = (
    "simpletuner.strength"  # header entry: the strength that was multiplied into the weights
)
LYCORIS_PREFIX = "lycoris_"
# Where the factor of a layer goes: into one side of the product. Each layer has one of these.
SCALED = (".lokr_w2", ".lokr_w2_a", ".hada_w1_a")
PLACES = {"adapter": "models/loras", "transformer": "models/diffusion_models"}  # of ComfyUI


@dataclass(frozen=True)
class Converted:
    """A written file, and the folder of ComfyUI that it belongs into."""

    path: Path
    place: str


def convert(
    source: Path,
    form: LoraForm,
    output: Path | None = None,
    strength: float = 1.0,
    *,
    overwrite: bool = False,
) -> Converted:
    """Write a result in another form.

    Args:
        source: a file, an output folder of a run, a checkpoint, or a pipeline's folder.
        output: the file to write, or a folder for it; None for one beside the source.
        strength: multiplied into the weights.

    Raises:
        UserError: the source cannot be converted, or the file exists.
    """
    if not source.exists():
        raise UserError(missing_path(source))
    transformer = transformer_folder(source)
    target = target_file(source, form, output)
    if target.exists() and not overwrite:
        raise UserError(
            f"{target} exists already; choose another file with --output, or give --overwrite."
        )
    if transformer is not None:
        convert_transformer(transformer, form, target, strength)
        return Converted(target, PLACES["transformer"])
    convert_adapter(lora_file(source), form, target, strength)
    return Converted(target, PLACES["adapter"])


def target_file(source: Path, form: LoraForm, output: Path | None) -> Path:
    """The file to write: `my-lora-comfyui.safetensors` beside a file or in a folder `my-lora`."""
    named = source.resolve()
    folder = source if source.is_dir() else source.parent
    if named.name == LORA_FILE:  # it says nothing; the name of its folder does
        stem = named.parent.name
    elif named.is_file():
        stem = named.stem
    else:
        stem = named.name
    name = f"{stem or 'lora'}-{form}.safetensors"
    if output is None:
        return folder / name
    if output.is_dir():
        return output / name
    if output.suffix != ".safetensors":
        raise UserError(
            f"--output: {str(output)!r} is neither a folder nor a name that ends with .safetensors."
        )
    return output


def transformer_folder(source: Path) -> Path | None:
    """The folder with a fully fine-tuned transformer: the source, or a folder in it; None if it
    holds none.
    """
    if source.is_file():
        return None
    for folder in (source / PIPELINE_FOLDER / FOLDER, source / FOLDER, source):
        config = read_json(folder / "config.json", Problems(), dict) or {}
        if "Transformer" in str(config.get("_class_name")):
            return folder
    return None


def convert_transformer(folder: Path, form: LoraForm, target: Path, strength: float) -> None:
    """Write a transformer as one file, by its plain names, which original programs and ComfyUI
    read.

    The data are copied file by file, so that the weights need not fit into memory.
    """
    if form == "diffusers":
        raise UserError(f"{folder} is in diffusers' form already: load it with from_pretrained.")
    if strength != 1.0:
        raise UserError("--strength: a full fine-tune replaces the weights, so it has no strength.")
    notes = _notes_of(folder)
    family, _, flavour = notes.get(ARCHITECTURE, "").partition("/")
    if family and (obstacle := why_not_comfyui(family, flavour)):
        raise UserError(obstacle)
    files = sorted(folder.glob("*.safetensors"))
    _check_complete(folder, files)
    header: dict[str, Any] = {METADATA: {"format": "pt", **notes}}
    offset = 0
    for file in files:
        tensors = read_header(file)
        tensors.pop(METADATA)
        for name, entry in tensors.items():
            start, end = entry["data_offsets"]
            header[name] = {**entry, "data_offsets": [start + offset, end + offset]}
        offset += max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    with open_atomically(target) as output:
        output.write(join_header(header, b""))
        for file in files:
            with file.open("rb") as data:
                read_head(data)
                shutil.copyfileobj(data, output, 1 << 24)


def _notes_of(folder: Path) -> dict[str, str]:
    """The note of a published pipeline around a transformer's folder; empty without one."""
    path = folder.parent / NOTE_FILE
    return dict(read_json(path, Problems(), dict) or {}) if path.is_file() else {}


def _check_complete(folder: Path, files: Sequence[Path]) -> None:
    """Raise a UserError unless the files are complete and hold every weight of the folder's
    index.
    """
    names: set[str] = set()
    for file in files:
        try:
            names |= weights_header(file).keys()
        except WeightsError as error:
            raise UserError(f"{str(file)!r} {error}.") from None
    if not names:
        raise UserError(f"{str(folder)!r} is incomplete: it lacks every weight.")
    wanted: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        report = Problems()
        content = read_json(index, report, dict)
        report.raise_if_fatal()
        wanted.update(content.get("weight_map", {}))
    absent = sorted(wanted - names)
    if absent:
        raise UserError(f"{str(folder)!r} is incomplete: it lacks {shorten(absent)}.")


def convert_adapter(path: Path, form: LoraForm, target: Path, strength: float) -> None:
    """Write a LoRA, LoKr or LoHa in a form, with the strength multiplied into its weights."""
    report = Problems()
    shapes = read_shapes(KEY, path, report)
    report.raise_if_fatal()
    family, flavour = model_of(path)
    if form == "comfyui" and (obstacle := why_not_comfyui(family, flavour)):
        raise UserError(f"{str(path)!r}: {obstacle}")
    _check_names(path, list(shapes), form, strength)
    weights = load_file(path)
    notes: dict[str, str] = read_header(path)[METADATA]
    if strength != 1.0:
        notes = {**notes, STRENGTH_NOTE: f"{strength:g}"}
    if any(marker in name for name in shapes for marker in OTHER_KINDS):
        settings = _settings_of_product(path, notes)
        factor = strength * float(settings["alpha"]) / float(settings["r"])
        notes.update(file_settings({**settings, "alpha": settings["r"]}, form))
        write_weights(target, products_in(weights, form, factor), notes)
        return
    named = lora_in(weights, lora_settings(path), form, strength)
    own = METADATA_KEY in notes and STEP_NOTE in notes  # its strength is in the matrices
    settings = json.loads(notes[METADATA_KEY]) if own else plain_settings(_ranks_of(named))
    plain = {without_prefix(key): value for key, value in settings.items()}
    write_weights(target, named, {**notes, **file_settings(plain, form)})


def _ranks_of(named: Mapping[str, Tensor]) -> dict[str, int]:
    """The rank of each layer of a LoRA."""
    ranks = {}
    for name, tensor in named.items():
        layer, marker, _ = without_prefix(name).partition(".lora_A.")
        if marker:
            ranks[layer] = len(tensor)
    return ranks


def _check_names(path: Path, names: Sequence[str], form: LoraForm, strength: float) -> None:
    """Raise a UserError for tensors that cannot be named for another program."""
    if any(name.startswith(LYCORIS_PREFIX) for name in names):
        raise UserError(
            f"{str(path)!r} has the names of LyCORIS; convert the LoRA beside it, {LORA_FILE}."
        )
    if any(name.startswith(KOHYA_PREFIX) for name in names):
        message = (
            f"{str(path)!r} has Kohya's names, in which underscores replace the dots of layers."
        )
        raise UserError(f"{message} ComfyUI loads some of these; a conversion would have to guess.")
    if holds_magnitudes(names) and form_of(names) != form:
        raise UserError(f"{str(path)!r}: {DORA} Train with lora_format: {form}.")
    if holds_magnitudes(names) and strength != 1.0:
        raise UserError(
            "--strength: the magnitudes of a DoRA do not scale; choose the strength where you "
            "load it."
        )
    _check_roles(path, names)


def _check_roles(path: Path, names: Sequence[str]) -> None:
    """Raise a UserError for tensors that belong to no kind of adapter."""
    is_product = any(marker in name for name in names for marker in OTHER_KINDS)
    strange = [name for name in names if role_of(name) is None and not is_product]
    if strange:
        raise UserError(f"{str(path)!r} is not a plain LoRA: it holds {shorten(strange, 3)}.")


def lora_in(
    weights: Mapping[str, Tensor], settings: LoraSettings, form: LoraForm, strength: float = 1.0
) -> dict[str, Tensor]:
    """The tensors of a LoRA by the names of a form, with its scale and a strength multiplied into
    B.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        layers.setdefault(module_of(name, ()), {})[str(role_of(name))] = tensor
    named = {}
    for layer, parts in layers.items():
        if "A" not in parts:  # an alpha without matrices
            continue
        rank = len(parts["A"])
        scale = float(parts["alpha"]) / rank if "alpha" in parts else settings.scale(layer, rank)
        key = PREFIXES[form] + layer
        named[f"{key}.lora_A.weight"] = parts["A"]
        named[f"{key}.lora_B.weight"] = fold_scale(parts["B"], scale * strength)
        if "magnitude" in parts:
            named[key + MAGNITUDE] = parts["magnitude"]
        if "comfyui magnitude" in parts:
            named[key + COMFYUI_MAGNITUDE] = parts["comfyui magnitude"]
    return named


def products_in(weights: Mapping[str, Tensor], form: LoraForm, factor: float) -> dict[str, Tensor]:
    """The tensors of a LoKr or LoHa by the names of a form, with a factor multiplied into each
    layer.

    ComfyUI scales a LoKr by alpha / rank only where a factor is a product, and a file without
    alphas not at all.
    """
    named = {PREFIXES[form] + without_prefix(name): tensor for name, tensor in weights.items()}
    if factor == 1.0:
        return named
    for name, tensor in named.items():
        if name.endswith(SCALED):
            named[name] = fold_scale(tensor, factor)
    return named


def _settings_of_product(path: Path, notes: Mapping[str, str]) -> dict[str, Any]:
    """Rank and alpha of a LoKr or LoHa, by peft's names.

    Raises:
        UserError: the header does not have them.
    """
    settings: dict[str, Any] = {}
    with suppress(KeyError, ValueError, AttributeError):  # no settings, or not an object in JSON
        settings = {
            without_prefix(key): value for key, value in json.loads(notes[METADATA_KEY]).items()
        }
    rank = settings.get("r", 0)
    alpha = settings.get("alpha")
    if is_number(alpha) and is_number(rank) and rank > 0:
        return settings
    message = f"{str(path)!r} is a LoKr or LoHa whose header does not state its rank and alpha."
    raise UserError(f"{message} Convert the LoRA beside it.")
