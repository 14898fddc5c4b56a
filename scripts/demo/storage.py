"""How the demo's models are stored."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from diffusers import ModelMixin
from transformers import PreTrainedModel


def save_bf16(model: ModelMixin | PreTrainedModel, folder: Path) -> None:
    """Save `model` with its weights in bfloat16 and its buffers unchanged."""
    stored = copy.deepcopy(model)
    for parameter in stored.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    stored.save_pretrained(folder)
    # The path that the weights were loaded from is private to this machine.
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)
