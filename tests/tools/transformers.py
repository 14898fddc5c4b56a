"""Adapters, inputs and block inputs of tiny transformers."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from simpletuner.models.cost import Adapters, TransformerCost
from simpletuner.models.lora_layers import linear_modules, matching_modules
from tests.tools.tiny import WIDTH

KANDINSKY_TARGETS = ["to_query", "to_key", "to_value"]
SANA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def adapters_of(cost: TransformerCost, targets: list[str], rank: int) -> Adapters:
    """A LoRA of these target modules, as the plan sees it."""
    modules = matching_modules(linear_modules(cost.shapes), targets)
    return Adapters(rank, frozenset(modules))


def with_lora(model: Any, adapters: Adapters) -> Any:
    """The frozen model with this LoRA, in training mode; no factor is zero."""
    model.requires_grad_(False)
    config = LoraConfig(
        r=adapters.rank, target_modules=sorted(adapters.modules), init_lora_weights=False
    )
    model.add_adapter(config)
    return model.train()


def kandinsky_inputs(
    frames: int, side: int, text: int, dtype: torch.dtype, channels: int = 16
) -> dict[str, Any]:
    """Inputs of `build_kandinsky` for two samples of `side` latent positions per side."""
    tokens_per_side = side // 2
    return {
        "hidden_states": torch.randn(2, frames, side, side, channels).to(dtype),
        "encoder_hidden_states": torch.randn(2, text, WIDTH).to(dtype),
        "pooled_projections": torch.randn(2, WIDTH).to(dtype),
        "timestep": torch.full((2,), 500.0),
        "visual_rope_pos": [
            torch.arange(frames),
            torch.arange(tokens_per_side),
            torch.arange(tokens_per_side),
        ],
        "text_rope_pos": torch.arange(text),
        "return_dict": False,
    }


def sana_inputs(frames: int, side: int, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs of `build_sana` for two samples of `side` latent positions per side."""
    return {
        "hidden_states": torch.randn(2, 16, frames, side, side).to(dtype),
        "encoder_hidden_states": torch.randn(2, 300, WIDTH).to(dtype),
        "encoder_attention_mask": torch.ones(2, 300, dtype=torch.long),
        "timestep": torch.full((2,), 500.0),
        "return_dict": False,
    }


def block_inputs(model: Any, inputs: dict[str, Any], block: nn.Module) -> tuple[Any, ...]:
    """What the model passes to one of its blocks."""
    calls: list[tuple[Any, ...]] = []
    hook = block.register_forward_pre_hook(lambda module, arguments: calls.append(arguments))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return calls[0]
