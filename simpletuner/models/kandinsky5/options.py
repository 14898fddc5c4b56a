"""The options that only Kandinsky 5 has."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, PlainSerializer

from simpletuner.config.option import Group, common, option
from simpletuner.config.values import PathText, parse_number

RopeScale = tuple[float, float, float]
AUTO = "auto"


def parse_rope_scale(value: object) -> RopeScale | None:
    """Three numbers for time, height and width; None for auto.

    Raises:
        ValueError: it is neither.
    """
    if value is None or str(value).strip().lower() == AUTO:
        return None
    parts = value.strip("[]() ").split(",") if isinstance(value, str) else value
    try:
        time, height, width = (parse_number(part) for part in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError("is not auto or three numbers above 0") from None
    if min(time, height, width) <= 0:
        raise ValueError("is not auto or three numbers above 0")
    return time, height, width


def write_rope_scale(scale: RopeScale | None) -> str:
    """The scale as written in a config."""
    return AUTO if scale is None else ",".join(f"{number:g}" for number in scale)


class KandinskyOptions(Group):
    """Kandinsky 5"""

    qwen_text_encoder_model_name_or_path: PathText | None = option(
        None, "Hub id or folder to take the Qwen2.5-VL text encoder from.", default_note="the model path"
    )
    text_template: Literal["official", "diffusers"] = common(
        "official", "The words around a caption: those the model was trained on, or diffusers' own."
    )
    rope_scale: Annotated[RopeScale | None, BeforeValidator(parse_rope_scale), PlainSerializer(write_rope_scale)] = (
        option(None, "auto, or three numbers for time, height and width (video).", default_note=AUTO, form="text")
    )
