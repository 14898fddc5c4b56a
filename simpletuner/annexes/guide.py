"""Descriptions of flavours and examples, to help users choose."""

from __future__ import annotations

import json

from simpletuner.config.sources import EXAMPLES_ALIAS, example_file
from simpletuner.errors import Problems
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import Flavour

TASKS = {
    "t2i": "text to image",
    "i2i": "image editing",
    "t2v": "text to video",
    "i2v": "image to video",
}
# Meanings of the parts of a flavour's name.
NAME_PARTS = {
    "sft": "for styles, characters, motions",
    "pretrain": "for entirely new concepts, on large datasets",
    "lite": "the small model",
    "pro": "the large model",
    "5s": "up to 5 s",
    "10s": "up to 10 s",
    "hd": "high resolution",
    "480p": "480 lines",
    "720p": "720 lines",
    "nocfg": "samples without guidance",
    "distilled": "samples in 16 steps without guidance",
    "distilled16steps": "samples in 16 steps without guidance",
}


def about_flavour(flavour: Flavour) -> str:
    """What a flavour is for, and what the user must provide."""
    phrases = [TASKS[flavour.task]]
    if flavour.dataset_task:
        phrases.append(f"or {TASKS[flavour.dataset_task]}")
    phrases += [NAME_PARTS[part] for part in flavour.name.split("-") if part in NAME_PARTS]
    if flavour.needs:
        phrases.append(f"needs {flavour.needs}")
    return ", ".join(phrases)


def about_example(name: str) -> str:
    """A description of an example, derived from its config."""
    config = json.loads(example_file(name, Problems()).read_text(encoding="utf-8"))
    spec = FAMILIES[config["model_family"]]
    flavour = spec.flavour(config.get("model_flavour"))
    kind = "LoRA" if config["model_type"] == "lora" else "full fine-tune"
    about = f"{kind} for {spec.title}, {flavour.name} ({TASKS[flavour.task]})"
    if "-official-" in name:
        about += ", with the settings of the official trainer"
    if "num_processes" in config:
        about += f", on {config['num_processes']} GPUs"
    checkpoint = str(config.get("pretrained_model_name_or_path", ""))
    if checkpoint.startswith(EXAMPLES_ALIAS):
        about += "; tiny model, no download, no GPU, minutes"
    return about
