"""Converts results for other programs.

A LoRA, LoKr or LoHa is converted between the key names of diffusers and ComfyUI, and a fully
fine-tuned transformer to one file. The values stay as they are. Only a strength that is stated
apart from the matrices is multiplied into them, since programs look for it in different places.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
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
# Header entry: the strength that was multiplied into the weights.
STRENGTH_NOTE = "simpletuner.strength"
LYCORIS_PREFIX = "lycoris_"
# The factor of a layer is multiplied into one side of its product; each layer has one of these.
SCALED = (".lokr_w2", ".lokr_w2_a", ".hada_w1_a")
# Folders of ComfyUI.
PLACES = {"adapter": "models/loras", "transformer": "models/diffusion_models"}


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
    path = source.resolve()
    folder = source if source.is_dir() else source.parent
    if path.name == LORA_FILE:  # the same for all LoRAs, so the name of its folder is used
        stem = path.parent.name
    elif path.is_file():
        stem = path.stem
    else:
        stem = path.name
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
    """The folder with a fully fine-tuned transformer: the source, or a folder in it; else None."""
    if source.is_file():
        return None
    for folder in (source / PIPELINE_FOLDER / FOLDER, source / FOLDER, source):
        config = read_json(folder / "config.json", Problems(), dict) or {}
        if "Transformer" in str(config.get("_class_name")):
            return folder
    return None


def convert_transformer(folder: Path, form: LoraForm, target: Path, strength: float) -> None:
    """Write a transformer as one file, by its plain names, for original programs and ComfyUI.

    The data are copied file by file, so that the weights need not fit into memory.
    """
    if form == "diffusers":
        raise UserError(f"{folder} is in diffusers' form already: load it with from_pretrained.")
    if strength != 1.0:
        raise UserError("--strength: a full fine-tune replaces the weights, so it has no strength.")
    notes = _notes_of(folder)
    family, _, flavour = notes.get(ARCHITECTURE, "").partition("/")
    obstacle = why_not_comfyui(family, flavour) if family else ""
    if obstacle:
        raise UserError(obstacle)
    files = sorted(folder.glob("*.safetensors"))
    _check_complete(folder, files)
    # The data of the files are written one after the other, so their offsets are shifted.
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
                read_head(data)  # skips the file's own header
                shutil.copyfileobj(data, output, 1 << 24)


def _notes_of(folder: Path) -> dict[str, str]:
    """The note of a published pipeline around a transformer's folder; empty without one."""
    path = folder.parent / NOTE_FILE
    if not path.is_file():
        return {}
    return dict(read_json(path, Problems(), dict) or {})


def _check_complete(folder: Path, files: Sequence[Path]) -> None:
    """Check that the files are complete, and hold every weight of the folder's index.

    Raises:
        UserError: they are not, or do not.
    """
    names: set[str] = set()
    for file in files:
        try:
            names |= weights_header(file).keys()
        except WeightsError as error:
            raise UserError(f"{str(file)!r} {error}.") from None
    if not names:
        raise UserError(f"{str(folder)!r} is incomplete: it lacks every weight.")
    indexed: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        report = Problems()
        content = read_json(index, report, dict)
        report.raise_if_fatal()
        indexed.update(content.get("weight_map", {}))
    missing = sorted(indexed - names)
    if missing:
        raise UserError(f"{str(folder)!r} is incomplete: it lacks {shorten(missing)}.")


def convert_adapter(path: Path, form: LoraForm, target: Path, strength: float) -> None:
    """Write a LoRA, LoKr or LoHa in a form, with the strength multiplied into its weights."""
    report = Problems()
    shapes = read_shapes(KEY, path, report)
    report.raise_if_fatal()
    family, flavour = model_of(path)
    obstacle = why_not_comfyui(family, flavour) if form == "comfyui" else ""
    if obstacle:
        raise UserError(f"{str(path)!r}: {obstacle}")
    _check_names(path, list(shapes), form, strength)
    weights = load_file(path)
    notes: dict[str, str] = read_header(path)[METADATA]
    if strength != 1.0:
        notes = {**notes, STRENGTH_NOTE: f"{strength:g}"}
    if _is_product(shapes):
        settings = _settings_of_product(path, notes)
        factor = strength * float(settings["alpha"]) / float(settings["r"])
        notes.update(file_settings({**settings, "alpha": settings["r"]}, form))
        write_weights(target, products_in(weights, form, factor), notes)
        return
    tensors = lora_in(weights, lora_settings(path), form, strength)
    if METADATA_KEY in notes and STEP_NOTE in notes:
        # A file of this program: its scale is in the matrices already.
        settings = json.loads(notes[METADATA_KEY])
    else:
        settings = plain_settings(_ranks_of(tensors))
    plain = {without_prefix(key): value for key, value in settings.items()}
    write_weights(target, tensors, {**notes, **file_settings(plain, form)})


def _is_product(names: Iterable[str]) -> bool:
    """Whether a file with tensors of these names is a LoKr or LoHa."""
    return any(marker in name for name in names for marker in OTHER_KINDS)


def _ranks_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The rank of each layer of a LoRA."""
    ranks = {}
    for name, tensor in tensors.items():
        layer, marker, _ = without_prefix(name).partition(".lora_A.")
        if marker:
            ranks[layer] = len(tensor)
    return ranks


def _check_names(path: Path, names: Sequence[str], form: LoraForm, strength: float) -> None:
    """Check that tensors can be named for another program.

    Raises:
        UserError: they cannot.
    """
    if any(name.startswith(LYCORIS_PREFIX) for name in names):
        raise UserError(
            f"{str(path)!r} has the names of LyCORIS; convert the LoRA beside it, {LORA_FILE}."
        )
    if any(name.startswith(KOHYA_PREFIX) for name in names):
        raise UserError(
            f"{str(path)!r} has Kohya's names, in which underscores replace the dots of layers. "
            "ComfyUI loads some of these; a conversion would have to guess."
        )
    if holds_magnitudes(names) and form_of(names) != form:
        raise UserError(f"{str(path)!r}: {DORA} Train with lora_format: {form}.")
    if holds_magnitudes(names) and strength != 1.0:
        raise UserError(
            "--strength: the magnitudes of a DoRA do not scale; choose the strength where you "
            "load it."
        )
    _check_roles(path, names)


def _check_roles(path: Path, names: Sequence[str]) -> None:
    """Check that tensors belong to a kind of adapter.

    Raises:
        UserError: some do not.
    """
    if _is_product(names):
        return
    unknown = [name for name in names if role_of(name) is None]
    if unknown:
        raise UserError(f"{str(path)!r} is not a plain LoRA: it holds {shorten(unknown, 3)}.")


def lora_in(
    weights: Mapping[str, Tensor], settings: LoraSettings, form: LoraForm, strength: float = 1.0
) -> dict[str, Tensor]:
    """The tensors of a LoRA by the names of a form; scale and strength are multiplied into B."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        layers.setdefault(module_of(name, ()), {})[str(role_of(name))] = tensor
    named = {}
    for layer, parts in layers.items():
        if "A" not in parts:  # an alpha without matrices
            continue
        rank = len(parts["A"])
        if "alpha" in parts:
            scale = float(parts["alpha"]) / rank
        else:
            scale = settings.scale(layer, rank)
        key = PREFIXES[form] + layer
        named[f"{key}.lora_A.weight"] = parts["A"]
        named[f"{key}.lora_B.weight"] = fold_scale(parts["B"], scale * strength)
        if "magnitude" in parts:
            named[key + MAGNITUDE] = parts["magnitude"]
        if "comfyui magnitude" in parts:
            named[key + COMFYUI_MAGNITUDE] = parts["comfyui magnitude"]
    return named


def products_in(weights: Mapping[str, Tensor], form: LoraForm, factor: float) -> dict[str, Tensor]:
    """The tensors of a LoKr or LoHa by the names of a form, with a factor multiplied into layers.

    ComfyUI scales a LoKr by alpha / rank only where a factor is a product, and a file without
    alphas not at all; so the factor is in the tensors.
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
    raise UserError(
        f"{str(path)!r} is a LoKr or LoHa whose header does not state its rank and alpha. Convert "
        "the LoRA beside it."
    )
