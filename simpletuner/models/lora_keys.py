"""Selection of a LoRA's layers, key names in LoRA files, and checks of these files. Imports no torch.

A selection has one of peft's two forms: a list of module names, each matching modules whose dotted path equals or ends
with it, or a regular expression that must match the whole path.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

from simpletuner.config.lora import LoraConfig
from simpletuner.config.values import absence_of, home_path, read_json
from simpletuner.errors import Problem, Reading, UserError, counted, did_you_mean, shorten
from simpletuner.headers import METADATA, read_header
from simpletuner.models.cost import Shape, Shapes
from simpletuner.models.source import HUB_ID, WeightsError, hub_fault, tensor_shapes, weights_header
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
LORA_FILE = "pytorch_lora_weights.safetensors"  # the name that `load_lora_weights` of diffusers expects
OFFICIAL_FILE = "lora.safetensors"  # Kandinsky's official LoRAs; their settings are in `config_lora.json` beside it
METADATA_KEY = "lora_adapter_metadata"  # the adapter's settings in the header of diffusers' files
# Key prefix of a file. diffusers silently ignores keys with an unexpected prefix.
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


def lora_file(path: Path) -> Path:
    """The LoRA file at a path: the path itself, or the file in that folder."""
    if not path.is_dir():
        return path
    official = path / OFFICIAL_FILE
    return official if official.is_file() and not (path / LORA_FILE).is_file() else path / LORA_FILE


def without_prefix(key: str) -> str:
    """A key without the program-specific prefix before the module name."""
    for prefix in (*PREFIXES.values(), "base_model.model."):
        key = key.removeprefix(prefix)
    return key


def file_settings(settings: Mapping[str, Any], form: LoraForm) -> dict[str, str]:
    """The header entry with the adapter's settings."""
    prefixed = {PREFIXES[form] + key: value for key, value in settings.items()}
    return {METADATA_KEY: json.dumps(prefixed, indent=2, sort_keys=True)}


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
    return next((role for marker, role in ROLES.items() if marker in key), None)


def layers_in(shapes: Shapes, modules: Sequence[str] = ()) -> dict[str, dict[str, Shape]]:
    """The tensors of a LoRA file with these shapes, by module and role; see `module_of`."""
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        if role := role_of(name):
            layers.setdefault(module_of(name, modules), {})[role] = shape
    return layers


def check_init_lora(config: LoraConfig, modules: Sequence[str], targets: Targets) -> Iterator[Problem]:
    """Report problems of the file `init_lora`, from its header.

    Args:
        modules: the linear layers of the transformer; empty if it is not on this machine.
        targets: selection of the trained layers.
    """
    key, path = "init_lora", lora_file(home_path(config.init_lora or ""))
    if config.init_lora is None:
        return
    shapes = yield from read_shapes(key, path)
    if not shapes:
        return
    if any(marker in name for name in shapes for marker in OTHER_KINDS):
        message = f"{str(path)!r} holds a LoKr or LoHa, whose weights no LoRA can start from; take the LoRA beside it."
        yield Problem(key, message)
        return
    trigger = read_header(path)[METADATA].get("trigger")
    if trigger:
        message = f"{str(path)!r} was trained with captions that begin with {trigger!r}; begin yours with it, too."
        yield Problem(key, message, fatal=False)
    yield from _check_layers(config, path, shapes, modules, set(matching_modules(modules, targets)))


def _check_layers(
    config: LoraConfig, path: Path, shapes: Shapes, modules: Sequence[str], wanted: Set[str]
) -> Iterator[Problem]:
    """Compare the layers of `init_lora` with the trained layers (`wanted`), if known."""
    key = "init_lora"
    ranks = {layer: parts["A"][0] for layer, parts in layers_in(shapes, modules).items() if parts.get("A")}
    if not ranks or (modules and not ranks.keys() & set(modules)):
        yield Problem(key, f"no key of {str(path)!r} belongs to this model (the first is {next(iter(shapes))!r}).")
        return
    others = sorted({rank for module, rank in ranks.items() if module in (wanted or ranks)} - {config.lora_rank})
    if others:
        shown = ", ".join(map(str, others))
        yield Problem(key, f"{str(path)!r} has rank {shown}, lora_rank is {config.lora_rank}.")
    if not config.use_dora and any(name.endswith((MAGNITUDE, COMFYUI_MAGNITUDE)) for name in shapes):
        yield Problem(key, f"{str(path)!r} is a DoRA; set use_dora.")
    if wanted:
        yield from _check_coverage(path, wanted, ranks.keys() & set(modules))


def _check_coverage(path: Path, wanted: Set[str], held: Set[str]) -> Iterator[Problem]:
    """Report trained layers missing in the file, and layers in the file that are not trained."""
    if absent := sorted(wanted - held):
        covered = f"holds {len(wanted & held)} of {len(wanted)} trained layers"
        message = f"{str(path)!r} {covered}; the others start untrained ({shorten(absent)})."
        yield Problem("init_lora", message, fatal=False)
    if surplus := sorted(held - wanted):
        message = f"not trained, so dropped: {counted(len(surplus), 'layer')} of {str(path)!r} ({shorten(surplus)})."
        yield Problem("init_lora", f"{message} Name them in peft_lora_target_modules to keep them.", fatal=False)


def read_shapes(key: str, path: Path) -> Reading[dict[str, Shape]]:
    """Names and shapes in the LoRA file of a key; empty, with a problem, if the file cannot be used."""
    if not path.is_file():
        yield Problem(key, absence_of(path))
        return {}
    try:
        shapes = tensor_shapes(path)
        if fault := _fault(path) if shapes else "holds no weights":
            raise WeightsError(fault)
        return shapes
    except WeightsError as error:
        yield Problem(key, f"{str(path)!r} {error}.")
        return {}


def _fault(path: Path) -> str:
    """The fault of a LoRA file's header or settings, as text after its name; empty without a fault."""
    header = weights_header(path)
    kinds = {name: kind for name, (kind, _) in header.items() if role_of(name) not in (None, "alpha")}
    if wrong := [f"{name} ({kind})" for name, kind in kinds.items() if kind not in FLOATS]:
        return f"holds weights that are no floating-point numbers: {shorten(wrong, 3)}"
    if wrong := _unpaired({name: shape for name, (_, shape) in header.items()}):
        return f"holds matrices without a product: {shorten(wrong, 3)}"
    try:
        lora_settings(path)
    except WeightsError as error:
        return str(error)
    return ""


def _unpaired(shapes: Shapes) -> list[str]:
    """Layers of a LoRA file whose A and B cannot be multiplied, or whose alpha is not a single number."""
    wrong = []
    for layer, parts in layers_in(shapes).items():
        down, up, alpha = (parts.get(role, ()) for role in ("A", "B", "alpha"))
        fits = min(len(down), len(up)) > 1 and down[0] == up[1] > 0 and math.prod(alpha) == 1
        if not fits and parts.keys() & {"A", "B"}:
            wrong.append(f"{layer} (A {list(down)}, B {list(up)}" + (f", alpha {list(alpha)})" if alpha else ")"))
    return wrong


def lora_settings(path: Path) -> dict[str, Any]:
    """The adapter's settings by peft's names, from a file's header or beside an official Kandinsky LoRA; may be empty.

    Raises:
        WeightsError: the settings cannot be read.
    """
    text = read_header(path)[METADATA].get(METADATA_KEY)
    beside = path.with_name("config_lora.json")
    if text is None and path.name == OFFICIAL_FILE and beside.is_file():
        text = beside.read_text(encoding="utf-8", errors="replace")
    try:
        settings = {without_prefix(key): value for key, value in json.loads(text or "{}").items()}
        alphas = settings["alpha_pattern"] = settings.get("alpha_pattern") or {}
        for layer, alpha in {"": settings.get("lora_alpha", 1), **alphas}.items():
            if not math.isfinite(alpha) or not re.compile(layer):
                raise ValueError
    # Settings of any program may have lists, nulls, numbers beyond float, deep nesting, invalid patterns.
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, re.error):
        raise WeightsError(f"holds settings of the adapter that cannot be read ({METADATA_KEY})") from None
    return settings


def find_lora(location: str, *, fetch: bool = False) -> Path | None:
    """The file of a LoRA: a file, a folder that holds one, or `repo[:file]` on the hub.

    Args:
        fetch: download the file if necessary; otherwise return None if it is not on this machine.

    Raises:
        UserError: the download failed.
    """
    path, (repo, _, name) = home_path(location), location.partition(":")
    if path.exists() or not HUB_ID.fullmatch(repo):
        return lora_file(path)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name or LORA_FILE, local_files_only=not fetch))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if fetch:
            raise UserError(f"{location!r} is no file, and could not be downloaded: {hub_fault(error)}.") from error
    return None


def check_lora_file(key: str, path: Path, modules: Mapping[str, tuple[int, int]], family: str) -> Iterator[Problem]:
    """Report problems of applying a whole LoRA file to a model, from its header.

    Args:
        modules: (out, in) features of the model's linear layers; empty if it is not on this machine.
        family: family of the model.
    """
    shapes = yield from read_shapes(key, path)
    if not shapes:
        return
    trained_on = family_in_header(path)
    if trained_on not in ("", family):
        yield Problem(key, f"{str(path)!r} was trained on {trained_on}, not on {family}.")
        return
    strange = [name for name in shapes if role_of(name) is None]
    if strange:
        yield Problem(key, f"{str(path)!r} is not a plain LoRA: it holds {shorten(strange, 3)}.")
    if modules:
        yield from _check_fit(key, path, layers_in(shapes, list(modules)), modules)


def _check_fit(
    key: str, path: Path, layers: Mapping[str, Mapping[str, Shape]], modules: Mapping[str, tuple[int, int]]
) -> Iterator[Problem]:
    """Compare the layers of a LoRA file with the model's."""
    if foreign := sorted(layers.keys() - modules.keys()):
        message = f"layers in {str(path)!r} are not in this model ({shorten(foreign, 3)})."
        yield Problem(key, f"{len(foreign)} of {len(layers)} {message}")
    for layer, parts in layers.items():
        features = (parts["B"][0], parts["A"][1]) if "A" in parts else None  # each A has its B
        if layer in modules and features not in (None, modules[layer]):
            ours, theirs = ("{}x{}".format(*each) for each in (modules[layer], features))
            message = f"{layer} has {ours} features in the model and {theirs} in the file."
            yield Problem(key, f"{str(path)!r} is for other layers: {message}")
            return


def family_in_header(path: Path) -> str:
    """The family in the header of a LoRA that this program trained; empty if the header has none."""
    notes = read_header(path)[METADATA]
    return str(notes.get("modelspec.architecture", "")).partition("/")[0] if STEP_NOTE in notes else ""
