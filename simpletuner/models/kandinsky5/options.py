"""The options that only Kandinsky 5 has, NABLA's tiles, and the RoPE scale of clips.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer

from simpletuner.config.option import Group, common, option
from simpletuner.config.types import PathText, parse_number

AttentionType = Literal["auto", "dense", "nabla"]
RopeScale = tuple[float, float, float]
AUTO = "auto"


def parse_rope_scale(value: object) -> RopeScale | None:
    """Three numbers for time, height and width; None for auto.

    Raises:
        ValueError: it is neither.
    """
    if value is None or str(value).strip().lower() == AUTO:
        return None
    parts: Any = value.strip("[]() ").split(",") if isinstance(value, str) else value
    with suppress(TypeError, ValueError):
        time, height, width = (parse_number(part) for part in parts)
        if min(time, height, width) > 0:
            return time, height, width
    raise ValueError("is not auto or three numbers above 0")


def write_rope_scale(scale: RopeScale | None) -> str:
    """The scale as written in a config."""
    return AUTO if scale is None else ",".join(f"{number:g}" for number in scale)


class KandinskyOptions(Group):
    """Kandinsky 5"""

    qwen_text_encoder_model_name_or_path: PathText | None = option(
        None, default_note="the model path"
    )
    """Hub id or folder to take the Qwen2.5-VL text encoder from."""
    text_template: Literal["official", "diffusers"] = common("official")
    """The words around a caption: those the model was trained on, or diffusers' own."""
    rope_scale: Annotated[
        RopeScale | None, BeforeValidator(parse_rope_scale), PlainSerializer(write_rope_scale)
    ] = option(None, default_note=AUTO, form="text")
    """auto, or three numbers for time, height and width (video)."""
    attention_type: AttentionType = option("auto")
    """auto follows the checkpoint's config.json, as the diffusers pipeline does; or dense, or nabla
    (block-sparse)."""


TILE_SIDE = 8  # tokens per side of a tile, within one latent frame
TILE = TILE_SIDE**2  # tokens per tile; they share one row of the mask
# Pairs of tiles whose order is sorted at one time, which takes 16 bytes per pair.
PAIRS_AT_ONCE = 2**24


def heads_at_once(samples: int, heads: int, tiles: int) -> int:
    """The number of heads, one at least, whose pairs of tiles are sorted at one time."""
    return max(1, min(heads, PAIRS_AT_ONCE // (samples * tiles**2)))


# What a transformer's config.json calls an `attention_type`.
DIFFUSERS_NAMES: dict[AttentionType, str] = {"dense": "regular", "nabla": "nabla"}
# What NABLA needs in a transformer's config.json: the kept mass, and the sides of the window in
# tiles.
NABLA_SETTINGS = ("attention_P", "attention_wT", "attention_wH", "attention_wW")


def transformer_overrides(settings: Mapping[str, Any]) -> dict[str, object]:
    """What the settings of a run replace in the transformer's config.json."""
    name = DIFFUSERS_NAMES.get(settings["attention_type"])
    return {} if name is None else {"attention_type": name}


def is_sparse(transformer_config: Mapping[str, object]) -> bool:
    """Whether a transformer attends with NABLA."""
    return transformer_config.get("attention_type") == "nabla"


def is_sparse_flavour(name: str) -> bool:
    """Whether the published checkpoint of a flavour was trained with NABLA."""
    return "-pro-" in name or "-10s" in name


def is_dense_at_size(flavour: str, size: tuple[int, int]) -> bool:
    """Whether the publisher's program samples a sparse flavour densely at this size.

    It has a configuration of its own for Pro's five seconds in SD.
    """
    is_five_seconds = "-pro-" in flavour and "-5s" in flavour
    return is_five_seconds and rope_scale_of_size(size, flavour) == STANDARD


# Divisors of the positions in time, height and width, which the stock pipelines choose by size.
STANDARD: RopeScale = (1.0, 2.0, 2.0)
HIGH: RopeScale = (1.0, 3.16, 3.16)
STANDARD_SIDES = (480, 854)  # pixels; as in diffusers, both sides must be in this range


def rope_scale_of_size(size: tuple[int, int] | None, flavour: str) -> RopeScale:
    """The scale that the stock pipeline uses at this size; without a size, the flavour's."""
    if size is None:
        is_standard = not flavour.endswith("-hd")
    else:
        low, high = STANDARD_SIDES
        is_standard = all(low <= side <= high for side in size)
    return STANDARD if is_standard else HIGH
