"""The model families, and which of them an example trains."""

from __future__ import annotations

import json
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from simpletuner.config.sources import EXAMPLES_ALIAS, example_file
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE, KANDINSKY5_VIDEO
from simpletuner.models.sanavideo.spec import SANA_VIDEO
from simpletuner.models.spec import TASKS, FamilySpec

if TYPE_CHECKING:
    from simpletuner.models.adapter import FamilyAdapter

FAMILIES: dict[str, FamilySpec] = {spec.name: spec for spec in (KANDINSKY5_IMAGE, KANDINSKY5_VIDEO, SANA_VIDEO)}
# Keys of datasets that only some families read.
FAMILY_DATASET_KEYS = frozenset(key for spec in FAMILIES.values() for key in spec.words.dataset_keys)


def canonical_family_name(name: str) -> str:
    """`Kandinsky5_Image` and `kandinsky5-image` are the same family."""
    return name.strip().lower().replace("_", "-")


def load_adapter(spec: FamilySpec) -> type[FamilyAdapter]:
    """Import the adapter class that a spec names, and torch with it."""
    adapter: type[FamilyAdapter] = resolve_name(spec.adapter)
    return adapter


def about_example(name: str) -> str:
    """What an example trains, from its config."""
    config = json.loads(example_file(name).read_text(encoding="utf-8"))
    spec = FAMILIES[config["model_family"]]
    flavour = spec.flavour(config.get("model_flavour"))
    kind = "LoRA" if config["model_type"] == "lora" else "full fine-tune"
    about = f"{kind} for {spec.title}, {flavour.name} ({TASKS[flavour.task]})"
    if "-official-" in name:
        about += ", with the settings of the official trainer"
    if "num_processes" in config:
        about += f", on {config['num_processes']} GPUs"
    is_tiny = str(config.get("pretrained_model_name_or_path", "")).startswith(EXAMPLES_ALIAS)
    return f"{about}; tiny model, no download, no GPU, minutes" if is_tiny else about
