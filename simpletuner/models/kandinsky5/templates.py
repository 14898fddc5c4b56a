"""The prompt templates that Kandinsky 5 was trained with.

The text encoder reads the whole prompt; the transformer gets the embeddings after the first `crop` tokens. The words
are those of the official training and inference code, including its spelling of "prompt"; releases of diffusers have
slightly different words and crops.
"""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

TemplateName = Literal["image", "image_edit", "video"]


@dataclass(frozen=True)
class TextTemplate:
    """A text with `{}` for the caption, and the number of leading tokens that the transformer does not get.

    For `image` and `video` these are the tokens before the caption. `image_edit` has 52 tokens before the caption, but
    the official code crops 55: the first three tokens of the caption are lost, here as well.
    """

    text: str
    crop: int

    def format(self, caption: str) -> str:
        """The text with the caption filled in; braces in the caption are kept."""
        return self.text.format(caption)


OFFICIAL: dict[TemplateName, TextTemplate] = {
    "image": TextTemplate(
        "<|im_start|>system\nYou are a promt engineer. Describe the image by detailing the color, shape, size, texture,"
        " quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>",
        crop=41,
    ),
    "image_edit": TextTemplate(
        "<|im_start|>system\nYou are a promt engineer. Based on the provided source image (first image) and target"
        " image (second image), create an interesting text prompt that can be used together with the source image to"
        " create the target image:<|im_end|>\n"
        "<|im_start|>user\n{}<|vision_start|><|image_pad|><|vision_end|><|im_end|>",
        crop=55,
    ),
    "video": TextTemplate(
        "<|im_start|>system\nYou are a promt engineer. Describe the video in detail.\n"
        "Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows the objects.\n"
        "Describe the location of the video, main characters or objects and their action.\n"
        "Describe the dynamism of the video and presented actions.\n"
        "Name the visual style of the video: whether it is a professional footage, user generated content,"
        " some kind of animation, video game or scren content.\n"
        "Describe the visual effects, postprocessing and transitions if they are presented in the video.\n"
        "Pay attention to the order of key actions shown in the scene.<|im_end|>\n"
        "<|im_start|>user\n{}<|im_end|>",
        crop=129,
    ),
}


@cache
def _encoding_fixer() -> Callable[[str], str]:
    """ftfy if installed, as in the pipelines; otherwise the text is unchanged."""
    if importlib.util.find_spec("ftfy") is None:
        return str
    import ftfy

    fix: Callable[[str], str] = ftfy.fix_text
    return fix


def clean_caption(caption: str) -> str:
    """Clean a caption as the pipelines do: fix broken encodings, unescape HTML, collapse whitespace."""
    # Twice, as in diffusers: captions from the web may be escaped twice (`&amp;quot;`).
    return " ".join(html.unescape(html.unescape(_encoding_fixer()(caption))).split())
