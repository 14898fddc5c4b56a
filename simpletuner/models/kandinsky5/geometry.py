"""The grid of tokens in Kandinsky 5 Video, as far as it is known without torch: NABLA's tiles and the RoPE scale."""

from __future__ import annotations

from collections.abc import Mapping

from simpletuner.models.kandinsky5.options import RopeScale

TILE_SIDE = 8  # tokens, within one latent frame
TILE = TILE_SIDE**2  # tokens that share one row of the mask


def is_sparse(transformer_config: Mapping[str, object]) -> bool:
    """Whether a checkpoint was trained with NABLA."""
    return transformer_config.get("attention_type") == "nabla"


def is_sparse_flavour(name: str) -> bool:
    """Whether the published checkpoint of a flavour was."""
    return "-pro-" in name or "-10s" in name


STANDARD: RopeScale = (1.0, 2.0, 2.0)
HIGH: RopeScale = (1.0, 3.16, 3.16)
STANDARD_SIDES = (480, 854)  # pixels; diffusers' rule: both sides within


def rope_scale_of_size(size: tuple[int, int] | None, flavour: str) -> RopeScale:
    """The scale that the stock pipeline samples this size with; without a size, the one of the flavour."""
    if size is None:
        return HIGH if flavour.endswith("-hd") else STANDARD
    low, high = STANDARD_SIDES
    return STANDARD if all(low <= side <= high for side in size) else HIGH
