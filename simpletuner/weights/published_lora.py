"""Where a LoRA is, and how strongly it acts: the file, its header, and the settings file beside it.

The matrices of a LoRA alone do not determine its strength. It is stated in one of four places:

a tensor `alpha` per layer           files of Kohya's scripts and of ComfyUI
`lora_adapter_metadata`              header of diffusers' files
`adapter_config.json` beside it      files of peft
`config_lora.json` beside it         Kandinsky's official LoRAs

A file without any of them acts with its matrices as they are, as in diffusers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simpletuner.config.paths import home_path
from simpletuner.errors import UserError, shorten
from simpletuner.headers import METADATA, read_header
from simpletuner.weights.files import WeightsError, tensor_shapes
from simpletuner.weights.hub import hub_fault
from simpletuner.weights.lora_names import (
    ARCHITECTURE,
    LORA_FILE,
    METADATA_KEY,
    STEP_NOTE,
    layers_in,
    without_prefix,
)
from simpletuner.weights.part import HUB_ID

OFFICIAL_FILE = "lora.safetensors"  # Kandinsky's official LoRAs
PEFT_FILE = "adapter_model.safetensors"  # `save_pretrained` of peft
FILES = (LORA_FILE, OFFICIAL_FILE, PEFT_FILE)
PEFT_SETTINGS = "adapter_config.json"
OFFICIAL_SETTINGS = "config_lora.json"
COMPANIONS = (PEFT_SETTINGS, OFFICIAL_SETTINGS)
PEFT_ALPHA = 8  # peft's default, for settings that name no alpha
KOHYA_ALPHA = "ss_network_alpha"  # header entry of Kohya's scripts
# Initialisations of peft after which the base model has other weights than the published one.
BASE_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
# Settings of peft that change what the matrices mean.
REFUSED = (
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)


@dataclass(frozen=True)
class LoraSettings:
    """The settings of a LoRA that decide its strength.

    Attributes:
        origin: where they are stated, for messages; empty if they are not stated.
        alpha: None means the rank.
        alphas: alphas of layers by pattern, for layers whose alpha differs.
        is_rank_stabilised: `use_rslora`: the scale is alpha / √rank instead of alpha / rank.
    """

    origin: str = ""
    alpha: float | None = None
    alphas: Mapping[str, float] = field(default_factory=dict)
    is_rank_stabilised: bool = False

    def scale(self, layer: str, rank: int) -> float:
        """The factor on B A in a layer."""
        alpha = self.alpha
        for pattern, exception in self.alphas.items():
            if re.match(rf"(.*\.)?({pattern})$", layer):  # as peft matches
                alpha = exception
                break
        if alpha is None:
            return 1.0
        if self.is_rank_stabilised:
            return alpha / math.sqrt(rank)
        return alpha / rank


def lora_file(path: Path) -> Path:
    """The LoRA file at a path: the path itself, or the file in that folder.

    In a folder, a usual name wins; without one, the only safetensors file is meant.
    """
    if not path.is_dir():
        return path
    for name in FILES:
        if (path / name).is_file():
            return path / name
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    return path / LORA_FILE


def find_lora(location: str, *, fetch: bool = False) -> Path | None:
    """The file of a LoRA: a file, a folder that holds one, or `repo[:file]` on the hub.

    Args:
        fetch: download the file, and the settings file beside it, if necessary; otherwise return
            None if the file is not on this machine.

    Raises:
        UserError: the download failed, or the repository holds several files and none with a usual
            name.
    """
    if not is_on_hub(location):
        return lora_file(home_path(location))
    repository, _, name = location.partition(":")
    if fetch:
        return _fetched(repository, name)
    return _cached(repository, name)


def is_on_hub(location: str) -> bool:
    """Whether the location of a LoRA is `repo[:file]` on the hub, not a path."""
    repository, colon, _ = location.partition(":")
    if home_path(location).exists():
        return False
    is_file = location.endswith(".safetensors") and not colon
    return not is_file and HUB_ID.fullmatch(repository) is not None


def _cached(repository: str, name: str) -> Path | None:
    """A LoRA of the hub that is already on this machine."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    file = folder / name if name else lora_file(folder)
    if not file.is_file():
        return None
    return file


def _fetched(repository: str, name: str) -> Path:
    """Download a LoRA from the hub; without a connection, the file on this machine is used."""
    try:
        return _download(repository, name)
    except UserError:
        raise
    except Exception as error:  # releases of the client raise different errors without a network
        cached = _cached(repository, name)
        if cached is not None:
            return cached
        shown = f"{repository}:{name}" if name else repository
        message = f"{shown!r} is not a file, and could not be downloaded: {hub_fault(error)}."
        raise UserError(message) from error


def _download(repository: str, name: str) -> Path:
    """The file of a LoRA, downloaded with the settings file in its folder."""
    from huggingface_hub import HfApi, hf_hub_download

    names = HfApi().list_repo_files(repository)
    file = name or _choose(repository, names)
    # Settings first, so that a file that is on this machine always has them beside it.
    for companion in COMPANIONS:
        beside = str(Path(file).with_name(companion))
        if beside in names:
            hf_hub_download(repository, beside)
    return Path(hf_hub_download(repository, file))


def _choose(repository: str, names: Collection[str]) -> str:
    """The LoRA file in a repository with these files."""
    for usual in FILES:
        if usual in names:
            return usual
    files = [name for name in names if name.endswith(".safetensors")]
    if len(files) == 1:
        return files[0]
    if not files:
        raise UserError(f"{repository!r} on the hub holds no safetensors file.")
    shown = shorten(sorted(files), 5)
    message = f"{repository!r} on the hub holds several LoRAs: {shown}."
    raise UserError(f"{message} Choose one with {repository}:FILE.")


def lora_settings(path: Path) -> LoraSettings:
    """The settings of a LoRA file, from its header or from the file beside it.

    Raises:
        WeightsError: they cannot be read, contradict each other or the file, or ask for more than a
            plain LoRA.
    """
    notes = read_header(path)[METADATA]
    layers = layers_in(tensor_shapes(path))
    has_alphas = any("alpha" in parts for parts in layers.values())
    settings = LoraSettings()
    if METADATA_KEY in notes:
        settings = _parse(str(notes[METADATA_KEY]), METADATA_KEY)
    elif not has_alphas:
        ranks = {parts["A"][0] for parts in layers.values() if parts.get("A")}
        settings = _settings_beside(path, ranks)
    if has_alphas and settings.is_rank_stabilised:
        message = f"has an alpha for each layer, and {settings.origin} asks for use_rslora"
        raise WeightsError(f"{message}; they contradict each other, so its strength is unknown")
    if not settings.origin and not has_alphas and KOHYA_ALPHA in notes:
        return _parse(json.dumps({"lora_alpha": _number(notes[KOHYA_ALPHA])}), KOHYA_ALPHA)
    return settings


def _number(text: Any) -> Any:
    """A number from a header; another text is returned as it is, and `_parse` reports it."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return text


def _settings_beside(path: Path, ranks: Collection[int]) -> LoraSettings:
    """The settings in a file beside a LoRA whose layers have these ranks."""
    stated: list[LoraSettings] = []
    for name in COMPANIONS:
        companion = path.with_name(name)
        if not companion.is_file():
            continue
        text = companion.read_text(encoding="utf-8", errors="replace")
        settings = _parse(text, f"{name} beside it")
        stated_ranks = _ranks(json.loads(text))
        if stated_ranks and not stated_ranks.issuperset(ranks):
            own_ranks = ", ".join(map(str, sorted(ranks)))
            other_ranks = ", ".join(map(str, sorted(stated_ranks)))
            message = f"has rank {own_ranks}, and {name} beside it says {other_ranks}"
            advice = "that file belongs to another LoRA; move one of them to its own folder"
            raise WeightsError(f"{message}: {advice}")
        stated.append(settings)
    if not stated:
        return LoraSettings()
    first = stated[0]
    if any(replace(settings, origin=first.origin) != first for settings in stated):
        files = f"{PEFT_SETTINGS} and {OFFICIAL_SETTINGS}"
        message = f"lies beside {files}, which state different strengths"
        raise WeightsError(f"{message}; remove the one that belongs to another LoRA")
    return first


def _ranks(settings: Mapping[str, Any]) -> set[int]:
    """The ranks that settings name; empty if they name none."""
    ranks = [settings.get("r")]
    pattern = settings.get("rank_pattern")
    if isinstance(pattern, dict):
        ranks += pattern.values()
    return {rank for rank in ranks if isinstance(rank, int)}


def _parse(text: str, origin: str) -> LoraSettings:
    """Settings by peft's names, as JSON text.

    Raises:
        WeightsError: they cannot be read, or ask for more than a plain LoRA.
    """
    try:
        settings = {without_prefix(key): value for key, value in json.loads(text).items()}
        if not settings:
            return LoraSettings(origin)
        alpha = settings.get("lora_alpha", PEFT_ALPHA)
        alphas = settings.get("alpha_pattern") or {}
        for pattern in alphas:
            re.compile(pattern)
        if not all(map(math.isfinite, (alpha, *alphas.values()))):
            raise ValueError
    # Other programs may write lists, nulls, numbers beyond float, deep nesting, invalid patterns.
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, re.error):
        message = f"holds settings of the adapter that cannot be read ({origin})"
        raise WeightsError(message) from None
    _refuse_other_kinds(settings, origin)
    return LoraSettings(
        origin=origin,
        alpha=alpha,
        alphas=alphas,
        is_rank_stabilised=bool(settings.get("use_rslora")),
    )


def _refuse_other_kinds(settings: Mapping[str, Any], origin: str) -> None:
    """Refuse peft's settings of anything but a plain LoRA."""
    kind = str(settings.get("peft_type") or "LORA")
    if kind.upper() != "LORA":
        raise WeightsError(f"is a {kind}, as {origin} says, not a LoRA")
    used = [name for name in REFUSED if settings.get(name)]
    if used:
        raise WeightsError(f"needs {', '.join(used)} ({origin}), which a plain LoRA does not have")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(BASE_CHANGING):
        message = f"was trained on a base model changed by init_lora_weights {start!r} ({origin})"
        raise WeightsError(f"{message}; convert it to a plain LoRA with peft first")


def model_in_header(path: Path) -> tuple[str, str]:
    """Family and flavour in the header of a LoRA that this program trained, else empty texts."""
    notes = read_header(path)[METADATA]
    if STEP_NOTE not in notes:
        return "", ""
    family, _, rest = str(notes.get(ARCHITECTURE, "")).partition("/")
    return family, rest.partition("/")[0]  # `family/flavour/lora`
