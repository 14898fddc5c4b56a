"""Converts results for other programs.

A LoRA, LoKr or LoHa is converted between the key names of diffusers and ComfyUI, and a fully
fine-tuned transformer to one file. The values stay as they are. Only a strength is multiplied into
them: the one that is stated apart from the matrices, since programs look for it in different
places, and the one that the user chooses.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simpletuner.annexes.adapters.choice import Choice, find_choice
from simpletuner.annexes.adapters.forms import (
    DORA,
    form_of,
    holds_magnitudes,
    model_of,
    why_not_comfyui,
)
from simpletuner.annexes.adapters.rewrite import Piece, Rewritten, decoded
from simpletuner.annexes.figures import is_number
from simpletuner.atomic import open_atomically
from simpletuner.config.json_reader import read_json
from simpletuner.errors import Problems, UserError, shorten
from simpletuner.headers import METADATA, join_header, read_head, read_header
from simpletuner.models.lora_checks import read_shapes
from simpletuner.planning.checkpoint_folder import NOTE_FILE, read_manifest
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
from simpletuner.weights.published_lora import LoraSettings, lora_settings

KEY = "convert"
# Header entry: the strength that was multiplied into the weights.
STRENGTH_NOTE = "simpletuner.strength"
LYCORIS_PREFIX = "lycoris_"
# The factor of a layer is multiplied into one side of its product; each layer has one of these.
SCALED = (".lokr_w2", ".lokr_w2_a", ".hada_w1_a")
# Folders of ComfyUI.
PLACES = {"adapter": "models/loras", "transformer": "models/diffusion_models"}
UNTRAINED = "0 is the untrained model, so there is nothing to write."
REPLACES = "A full fine-tune replaces the weights, so it has no strength."
MAGNITUDES_STAY = (
    "The magnitudes of a DoRA do not scale, so a strength cannot be built into its file; choose "
    "the strength where you load it."
)


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
    checkpoint: str | None = None,
    ema: bool = False,
    overwrite: bool = False,
) -> Converted:
    """Write a result or a checkpoint in another form.

    Args:
        source: a file, an output folder of a run, a checkpoint, or a pipeline's folder.
        output: the file to write, or a folder for it; None for one beside the source.
        strength: multiplied into the weights.
        checkpoint, ema: choose among the weights of a run, see `find_choice`.

    Raises:
        UserError: the source cannot be converted, or the file exists.
    """
    if strength == 0:
        raise UserError(f"--strength: {UNTRAINED}")
    choice = find_choice(source, checkpoint, ema=ema)
    target = target_file(choice, form, strength, output)
    if target.exists() and not overwrite:
        raise UserError(
            f"{target} exists already; choose another file with --output, or give --overwrite."
        )
    if choice.is_full:
        convert_transformer(choice.path, form, target, strength)
        return Converted(target, PLACES["transformer"])
    rewritten(choice.path, form, strength).write(target)
    return Converted(target, PLACES["adapter"])


def target_file(choice: Choice, form: LoraForm, strength: float, output: Path | None) -> Path:
    """The file to write, by default beside the weights, under a name that says what it holds."""
    name = choice.file_name(form, strength)
    if output is None:
        return choice.folder / name
    if output.is_dir():
        return output / name
    if output.suffix != ".safetensors":
        raise UserError(
            f"--output: {str(output)!r} is neither a folder nor a name that ends with .safetensors."
        )
    return output


def convert_transformer(folder: Path, form: LoraForm, target: Path, strength: float) -> None:
    """Write a transformer as one file, by its plain names, for original programs and ComfyUI.

    The data are copied file by file, so that the weights need not fit into memory.
    """
    if form == "diffusers":
        raise UserError(f"{folder} is in diffusers' form already: load it with from_pretrained.")
    if strength != 1.0:
        raise UserError(f"--strength: {REPLACES}")
    obstacle = why_not_one_file(folder)
    if obstacle:
        raise UserError(obstacle)
    notes = _notes_of(folder)
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


def why_not_one_file(folder: Path) -> str:
    """Why ComfyUI cannot use a transformer; empty if it can, or if its model is unknown."""
    family, _, flavour = _notes_of(folder).get(ARCHITECTURE, "").partition("/")
    manifest = read_manifest(folder.parent)
    if not family and manifest is not None:  # of a checkpoint
        family = manifest.identity.model_family
        flavour = manifest.identity.model_flavour
    return why_not_comfyui(family, flavour) if family else ""


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


def rewritten(path: Path, form: LoraForm, strength: float = 1.0) -> Rewritten:
    """The file of a LoRA, LoKr or LoHa in a form, with the strength multiplied into its weights.

    Raises:
        UserError: it cannot be written so.
    """
    report = Problems()
    shapes = read_shapes(KEY, path, report)
    report.raise_if_fatal()
    obstacle = why_not(path, form, strength)
    if obstacle:
        raise UserError(f"{str(path)!r}: {obstacle}")
    header = read_header(path)
    notes: dict[str, str] = header.pop(METADATA)
    if strength != 1.0:
        notes = {**notes, STRENGTH_NOTE: f"{strength:g}"}
    if _is_product(shapes):
        settings = _settings_of_product(notes)
        factor = strength * float(settings["alpha"]) / float(settings["r"])
        notes.update(file_settings({**settings, "alpha": settings["r"]}, form))
        names = names_of_product(header, form, factor)
        pieces = [Piece(name, header[old], scale) for name, (old, scale) in names.items()]
        return Rewritten(path, notes, pieces)
    alphas = _alphas_in(path, header)
    pieces = lora_pieces(header, alphas, lora_settings(path), form, strength)
    if METADATA_KEY in notes and STEP_NOTE in notes:
        # A file of this program: its scale is in the matrices already.
        settings = json.loads(notes[METADATA_KEY])
    else:
        settings = plain_settings(_ranks_of(pieces))
    plain = {without_prefix(key): value for key, value in settings.items()}
    return Rewritten(path, {**notes, **file_settings(plain, form)}, pieces)


def why_not(path: Path, form: LoraForm, strength: float = 1.0) -> str:
    """Why the file of a LoRA, LoKr or LoHa cannot be written in a form; empty if it can."""
    try:
        names = [*weights_header(path)]
        family, flavour = model_of(path)
        notes = read_header(path)[METADATA]
    except (WeightsError, OSError, ValueError):
        return "The file is damaged: its header cannot be read."
    if not names:
        return "The file holds no weights."
    obstacle = why_not_comfyui(family, flavour) if form == "comfyui" else ""
    if obstacle:
        return obstacle
    obstacle = _why_not_named(names, form, strength)
    if obstacle:
        return obstacle
    if _is_product(names) and not _settings_of_product(notes):
        return (
            "It is a LoKr or LoHa whose header does not state its rank and alpha. Convert the "
            "LoRA beside it."
        )
    return ""


def _is_product(names: Iterable[str]) -> bool:
    """Whether a file with tensors of these names is a LoKr or LoHa."""
    return any(marker in name for name in names for marker in OTHER_KINDS)


def _ranks_of(pieces: Iterable[Piece]) -> dict[str, int]:
    """The rank of each layer of a LoRA."""
    ranks = {}
    for piece in pieces:
        layer, marker, _ = without_prefix(piece.name).partition(".lora_A.")
        if marker:
            ranks[layer] = int(piece.entry["shape"][0])
    return ranks


def _why_not_named(names: Sequence[str], form: LoraForm, strength: float) -> str:
    """Why tensors cannot be named and scaled for a program; empty if they can."""
    if any(name.startswith(LYCORIS_PREFIX) for name in names):
        return f"It has the names of LyCORIS; convert the LoRA beside it, {LORA_FILE}."
    if any(name.startswith(KOHYA_PREFIX) for name in names):
        return (
            "It has Kohya's names, in which underscores replace the dots of layers. ComfyUI loads "
            "some of these; a conversion would have to guess."
        )
    if holds_magnitudes(names) and form_of(names) != form:
        return f"{DORA} Train with lora_format: {form}."
    if holds_magnitudes(names) and strength != 1.0:
        return MAGNITUDES_STAY
    if _is_product(names):
        return ""
    unknown = [name for name in names if role_of(name) is None]
    if unknown:
        return f"It is not a plain LoRA: it holds {shorten(unknown, 3)}."
    return ""


def lora_pieces(
    header: Mapping[str, Any],
    alphas: Mapping[str, float],
    settings: LoraSettings,
    form: LoraForm,
    strength: float = 1.0,
) -> list[Piece]:
    """The tensors of a LoRA by the names of a form; scale and strength are multiplied into B.

    Args:
        header: of its file.
        alphas: by layer, where the file has them.
    """
    layers: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, entry in header.items():
        layers.setdefault(module_of(name, ()), {})[str(role_of(name))] = entry
    pieces = []
    for layer, parts in layers.items():
        if "A" not in parts:  # an alpha without matrices
            continue
        rank = int(parts["A"]["shape"][0])
        if layer in alphas:
            scale = alphas[layer] / rank
        else:
            scale = settings.scale(layer, rank)
        key = PREFIXES[form] + layer
        pieces.append(Piece(f"{key}.lora_A.weight", parts["A"]))
        pieces.append(Piece(f"{key}.lora_B.weight", parts["B"], scale * strength))
        if "magnitude" in parts:
            pieces.append(Piece(key + MAGNITUDE, parts["magnitude"]))
        if "comfyui magnitude" in parts:
            pieces.append(Piece(key + COMFYUI_MAGNITUDE, parts["comfyui magnitude"]))
    return pieces


def _alphas_in(path: Path, header: Mapping[str, Any]) -> dict[str, float]:
    """The alphas that the file of a LoRA has as tensors, by layer."""
    alphas = {}
    with path.open("rb") as file:
        read_head(file)
        data_start = file.tell()
        for name, entry in header.items():
            if role_of(name) == "alpha":
                content = Piece(name, entry).read(file, data_start)
                [alpha] = np.atleast_1d(decoded(content, entry["dtype"]))
                alphas[module_of(name, ())] = float(alpha)
    return alphas


def names_of_product(
    names: Iterable[str], form: LoraForm, factor: float
) -> dict[str, tuple[str, float]]:
    """How the tensors of a LoKr or LoHa are named in a form: their old names and their factors.

    ComfyUI scales a LoKr by alpha / rank only where a factor is a product, and a file without
    alphas not at all; so the factor of a layer is multiplied into one of its tensors.
    """
    renamed = {}
    for name in names:
        scale = factor if name.endswith(SCALED) else 1.0
        renamed[PREFIXES[form] + without_prefix(name)] = (name, scale)
    return renamed


def _settings_of_product(notes: Mapping[str, str]) -> dict[str, Any]:
    """Rank and alpha of a LoKr or LoHa, by peft's names; empty if its header has none."""
    settings: dict[str, Any] = {}
    with suppress(KeyError, ValueError, AttributeError):  # no settings, or not an object in JSON
        settings = {
            without_prefix(key): value for key, value in json.loads(notes[METADATA_KEY]).items()
        }
    rank = settings.get("r", 0)
    alpha = settings.get("alpha")
    if is_number(alpha) and is_number(rank) and rank > 0:
        return settings
    return {}
