"""NABLA as far as it can be known without torch: how large its tiles are, and which checkpoints have it."""

from __future__ import annotations

from collections.abc import Mapping

TILE_SIDE = 8  # tokens, within one latent frame
TILE = TILE_SIDE**2  # tokens that share one row of the mask


def is_sparse(transformer_config: Mapping[str, object]) -> bool:
    """Whether a checkpoint was trained with NABLA."""
    return transformer_config.get("attention_type") == "nabla"


def is_sparse_flavour(name: str) -> bool:
    """Whether the published checkpoint of a flavour was."""
    return "-pro-" in name or "-10s" in name
