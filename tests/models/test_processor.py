"""The processor without torchvision, and the true lengths of the templates in tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import Kandinsky5I2IPipeline, Kandinsky5T2IPipeline
from PIL import Image
from transformers import Qwen2VLProcessor

from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.templates import OFFICIAL, TemplateName
from tests.tools.tiny import TOKENIZERS, make_checkpoint, split_as_qwen


@pytest.fixture(scope="module")
def t2i_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("t2i"))


@pytest.fixture(scope="module")
def i2i_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("i2i"), "i2i")


@pytest.mark.parametrize(("name", "before"), [("image", 41), ("image_edit", 52), ("video", 129)])
def test_the_templates_have_their_true_lengths_in_qwens_tokens(
    name: TemplateName, before: int, tmp_path: Path
) -> None:
    """Of edits, the first three tokens of a caption are cropped too, as in the official code."""
    shutil.copytree(TOKENIZERS / "tokenizer", tmp_path / "tokenizer")
    split_as_qwen(tmp_path)
    tokenizer = load_processor(tmp_path).tokenizer
    template = OFFICIAL[name]

    ids = tokenizer(template.format("a red star on a hill")).input_ids

    assert len(tokenizer(template.text.partition("{}")[0]).input_ids) == before
    rest = "a red star on a hill<|im_end|>"
    if name == "image_edit":
        rest = " on a hill<|vision_start|>"
    assert tokenizer.decode(ids[template.crop :]).startswith(rest)


@pytest.mark.parametrize("name", ["image", "video"])
def test_crop_is_the_number_of_tokens_before_the_caption(name: TemplateName) -> None:
    tokenizer = load_processor(TOKENIZERS).tokenizer
    before, _, _ = OFFICIAL[name].text.partition("{}")

    assert len(tokenizer(before).input_ids) == OFFICIAL[name].crop
    # The templates that diffusers ships spell "prompt", which is one token instead of two.
    assert len(tokenizer(before.replace("promt", "prompt")).input_ids) == OFFICIAL[name].crop - 1


@pytest.mark.parametrize(
    "caption", ["a red star", "एक लाल तारा", "一颗红色的星星", "zigzag\u200d🎈", "100 %"]
)
def test_the_crop_leaves_the_whole_caption(caption: str) -> None:
    tokenizer = load_processor(TOKENIZERS).tokenizer
    template = OFFICIAL["image"]

    ids = tokenizer(template.format(caption)).input_ids

    assert tokenizer.decode(ids[template.crop :]) == f"{caption}<|im_end|>"


def test_the_processor_is_saved_and_accepted_as_the_stock_class(
    t2i_folder: Path, tmp_path: Path
) -> None:
    processor = load_processor(t2i_folder)
    assert isinstance(processor, Qwen2VLProcessor)

    index = json.loads((t2i_folder / "model_index.json").read_text())
    assert index["tokenizer"] == ["transformers", "Qwen2VLProcessor"]

    processor.save_pretrained(tmp_path / "tokenizer")
    assert load_processor(tmp_path).tokenizer.get_vocab() == processor.tokenizer.get_vocab()


def test_the_processor_writes_chats_by_the_template_of_its_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(TOKENIZERS / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("<{{ messages[0].content }}>")

    chat = [{"role": "user", "content": "a cat"}]

    assert load_processor(tmp_path).apply_chat_template(chat, tokenize=False) == "<a cat>"


def test_the_processor_encodes_text_in_the_stock_pipeline(t2i_folder: Path) -> None:
    pipe = Kandinsky5T2IPipeline.from_pretrained(t2i_folder, tokenizer=load_processor(t2i_folder))
    pipe.set_progress_bar_config(disable=True)
    pipe.resolutions = [(64, 64)]

    embeds, pooled, lengths = pipe.encode_prompt("a red star")
    other_embeds, other_pooled, _ = pipe.encode_prompt("a red cat")
    result = pipe("a red star", height=64, width=64, num_inference_steps=2, output_type="pt")

    assert embeds.shape == (1, 4, 32)  # three words and the end of the sentence
    assert lengths.tolist() == [0, 4]
    assert not torch.allclose(embeds, other_embeds)
    assert not torch.allclose(pooled, other_pooled)
    assert result.image.shape == (1, 3, 64, 64)
    assert result.image.isfinite().all()


def test_the_processor_encodes_text_and_picture_in_the_stock_pipeline(i2i_folder: Path) -> None:
    pipe = Kandinsky5I2IPipeline.from_pretrained(i2i_folder, tokenizer=load_processor(i2i_folder))
    pipe.set_progress_bar_config(disable=True)
    pipe.resolutions = [(64, 64)]
    red, blue = (Image.new("RGB", (64, 64), colour) for colour in ("red", "blue"))

    of_red, _, lengths = pipe.encode_prompt("a round cat", image=red)
    of_blue, _, _ = pipe.encode_prompt("a round cat", image=blue)
    result = pipe(red, "a round cat", height=64, width=64, num_inference_steps=2, output_type="pt")

    # 64 px are halved, then enlarged to the least size of 56 px: 4 x 4 patches of 14 px, merged two
    # by two.
    words = 3
    picture = 4
    picture_marks_and_end = 3
    assert of_red.shape == (1, words + picture + picture_marks_and_end, 32)
    assert lengths.tolist() == [0, of_red.shape[1]]
    assert not torch.allclose(of_red, of_blue)
    assert result.image.isfinite().all()
