"""The sentences around a caption that Kandinsky 5 was trained with.

The text encoder reads the whole sentence, the transformer only what follows the first `crop` tokens of it. The words
are the ones of the official training and inference code, their spelling of "prompt" included; releases of diffusers
carry slightly other words and other crops.
"""

from __future__ import annotations

import html
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

TemplateName = Literal["image", "image_edit", "video"]


@dataclass(frozen=True)
class TextTemplate:
    """A sentence with `{}` where the caption goes, and how many of its first tokens the transformer does not get.

    For `image` and `video` these are the tokens before the caption. Of `image_edit` Qwen's tokenizer makes 52 tokens
    before the caption, and 55 are cut off in the official code: the caption's first three are lost, here as there.
    """

    text: str
    crop: int

    def format(self, caption: str) -> str:
        """The sentence with `caption` in it; braces in the caption stay what they are."""
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
def _text_mender() -> Callable[[str], str]:
    """ftfy where it is installed, as in the pipelines; else nothing is mended."""
    if importlib.util.find_spec("ftfy") is None:
        return str
    import ftfy

    fix: Callable[[str], str] = ftfy.fix_text
    return fix


def clean_caption(caption: str) -> str:
    """The caption as the pipelines clean it: broken encodings mended, HTML unescaped, spaces collapsed."""
    text = html.unescape(html.unescape(_text_mender()(caption)))
    return re.sub(r"\s+", " ", text).strip()
