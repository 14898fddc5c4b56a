"""The prompt templates that Kandinsky 5 was trained with.

The text encoder reads the whole prompt; the transformer gets the embeddings after the first `crop`
tokens. The words in `templates.toml` are those of the official training and inference code,
including its spelling of "prompt"; releases of diffusers have slightly different words and crops.
"""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

from simpletuner.config.json_reader import read_toml

TemplateName = Literal["image", "image_edit", "video"]


@dataclass(frozen=True)
class TextTemplate:
    """A text with `{}` for the caption, and how many of its first tokens are cropped.

    The transformer does not get the cropped tokens. For `image` and `video` these are the tokens
    before the caption. `image_edit` has 52 tokens before the caption, but the official code crops
    55: the first three tokens of the caption are lost, here as well.
    """

    text: str
    crop: int

    def format(self, caption: str) -> str:
        """The text with the caption filled in; braces in the caption are kept."""
        return self.text.format(caption)


_TABLES = read_toml("simpletuner.models.kandinsky5", "templates.toml")
OFFICIAL: dict[TemplateName, TextTemplate] = {
    name: TextTemplate(**_TABLES[name]) for name in get_args(TemplateName)
}


@cache
def _encoding_fixer() -> Callable[[str], str]:
    """ftfy if installed, as in the pipelines; otherwise the text is unchanged."""
    if importlib.util.find_spec("ftfy") is None:
        return str
    import ftfy

    return ftfy.fix_text


def clean_caption(caption: str) -> str:
    """Clean a caption as the pipelines do: encodings, HTML escapes, whitespace."""
    fix_encoding = _encoding_fixer()
    fixed = fix_encoding(caption)
    # Twice, as in diffusers: captions from the web may be escaped twice (`&amp;quot;`).
    unescaped = html.unescape(html.unescape(fixed))
    return " ".join(unescaped.split())
