"""How the demo's models are stored."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from diffusers import ModelMixin
from transformers import PreTrainedModel


def save_bf16(model: ModelMixin | PreTrainedModel, folder: Path) -> None:
    """Save `model` with its weights in bfloat16; the model itself and all buffers stay as they are."""
    stored = copy.deepcopy(model)
    for parameter in stored.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    stored.save_pretrained(folder)
