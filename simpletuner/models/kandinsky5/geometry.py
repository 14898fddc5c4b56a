"""The token grid of Kandinsky 5 Video: NABLA's tiles and the RoPE scale. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping

from simpletuner.models.kandinsky5.options import RopeScale

TILE_SIDE = 8  # tokens per side of a tile, within one latent frame
TILE = TILE_SIDE**2  # tokens per tile; they share one row of the mask


def is_sparse(transformer_config: Mapping[str, object]) -> bool:
    """Whether a checkpoint was trained with NABLA."""
    return transformer_config.get("attention_type") == "nabla"


def is_sparse_flavour(name: str) -> bool:
    """Whether the published checkpoint of a flavour was trained with NABLA."""
    return "-pro-" in name or "-10s" in name


STANDARD: RopeScale = (1.0, 2.0, 2.0)
HIGH: RopeScale = (1.0, 3.16, 3.16)
STANDARD_SIDES = (480, 854)  # pixels; as in diffusers, both sides must be in this range


def rope_scale_of_size(size: tuple[int, int] | None, flavour: str) -> RopeScale:
    """The scale that the stock pipeline uses at this size; without a size, the flavour's."""
    if size is None:
        return HIGH if flavour.endswith("-hd") else STANDARD
    low, high = STANDARD_SIDES
    return STANDARD if all(low <= side <= high for side in size) else HIGH
