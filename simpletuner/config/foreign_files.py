"""Recognises config and dataset files of other trainers, and explains what to write instead."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

from simpletuner.errors import shorten

YAML = (".yaml", ".yml")
# Marks of a YAML file, and the program that writes such files.
AUTHORS = {
    r"(?m)^\s*-?\s*type:\s*['\"]?(sd_trainer|diffusion_trainer|ui_trainer)": "ai-toolkit",
    r"(?m)^job:\s*['\"]?extension": "ai-toolkit",
    r"(?m)^compute_environment:": "accelerate",
}
WAYS = (
    "Write one with `simpletuner configure`, or let `simpletuner start FOLDER` write one for a "
    "folder of files."
)
# What the settings of a config of ai-toolkit are called here.
AI_TOOLKIT = (
    "Its network.linear is lora_rank here, train.steps is max_train_steps, train.lr is "
    "learning_rate, train.batch_size is train_batch_size, save.save_every is "
    "checkpoint_step_interval, sample.prompts is user_prompt_library, and folder_path of its "
    "datasets is instance_data_dir in the file that data_backend_config names."
)
FOLDERS = ("image_directory", "video_directory", "image_dir", "path")
DATASET_KEYS = (
    "Its folders are instance_data_dir here, each in a dataset of its own; num_repeats n is "
    "repeats n - 1, batch_size is train_batch_size, caption_extension .txt is caption_strategy "
    "textfile, and target_frames is video.num_frames."
)


def foreign_config(path: Path, text: str) -> str:
    """Why a file is not a config here, as text after its name; empty if it may be one."""
    if path.suffix.lower() in YAML:
        keys = f" {AI_TOOLKIT}" if _author_of(text) == "ai-toolkit" else ""
        return f"is {_yaml_file(text)}; a config here is a JSON, TOML or .env file.{keys} {WAYS}"
    if path.suffix.lower() != ".toml":
        return ""
    content = _parsed(text)
    author = _author_of_datasets(content)
    if not author:
        return ""
    return f"is a dataset file of {author}, not a config. {_advice(content)}"


def foreign_datasets(path: Path, text: str) -> str:
    """Why a file is not a dataset file here, as text after its name; empty if it may be one."""
    if path.suffix.lower() in YAML:
        return f"is {_yaml_file(text)}; a dataset file here is a JSON list. {WAYS}"
    if path.suffix.lower() != ".toml":
        return ""
    content = _parsed(text)
    author = _author_of_datasets(content) or "another program"
    return f"is a TOML file of {author}; a dataset file here is a JSON list. {_advice(content)}"


def _yaml_file(text: str) -> str:
    """What a YAML file is, for messages."""
    author = _author_of(text)
    return f"a YAML file of {author}" if author else "a YAML file"


def _author_of(text: str) -> str:
    """The program that a YAML file is for; empty if it is not recognised."""
    for mark, author in AUTHORS.items():
        if re.search(mark, text):
            return author
    return ""


def _parsed(text: str) -> dict[str, Any]:
    """The content of a TOML file; empty if it is not valid."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return {}


def _author_of_datasets(content: dict[str, Any]) -> str:
    """The program that a TOML file with datasets is for; empty if it is not recognised."""
    if _tables(content, "directory"):
        return "diffusion-pipe"
    datasets = _tables(content, "datasets")
    if any("subsets" in dataset for dataset in datasets):
        return "kohya's sd-scripts"
    return "musubi-tuner" if datasets else ""


def _tables(content: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The tables `[[key]]` of a TOML file."""
    value = content.get(key)
    tables = value if isinstance(value, list) else []
    return [table for table in tables if isinstance(table, dict)]


def _advice(content: dict[str, Any]) -> str:
    """What to write instead of a dataset file, with its folders."""
    tables = _tables(content, "datasets") + _tables(content, "directory")
    for dataset in _tables(content, "datasets"):
        tables += _tables(dataset, "subsets")
    folders = []
    for table in tables:
        folders += [str(table[key]) for key in FOLDERS if key in table]
    if not folders:
        return DATASET_KEYS
    if len(folders) == 1:
        return f"{DATASET_KEYS} For its folder: `simpletuner start {shlex.quote(folders[0])}`."
    return f"{DATASET_KEYS} Its folders: {shorten(folders, 5)}."
