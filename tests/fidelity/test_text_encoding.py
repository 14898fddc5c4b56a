"""Embeddings equal the pipelines', though templates are reused and captions are batched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL.Image import Image

from simpletuner.config.precision import quantisation
from simpletuner.memory.quantisation.layers import quantise
from simpletuner.models.adapter import TextRequest
from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.templates import TextTemplate
from simpletuner.models.kandinsky5.text import QWEN_LAYERS, Kandinsky5TextEncoder
from simpletuner.models.prompt_start import FEWEST_TO_READ, PromptStart
from tests.tools.families import CPU, make_adapter, make_video_adapter, picture
from tests.tools.sana_family import make_sana_adapter
from tests.tools.tiny import PIPELINES, WIDTH, make_checkpoint, split_as_qwen
from tests.tools.tiny_sana import build_gemma
from tests.tools.tolerances import MODEL, assert_close

CAPTIONS = (
    "a star",
    "",
    "two blue circles on a white ground, seen from far away",
    "तारा 你好 <|im_end|> & more",
    "a long tale of a ball that rolls " * 8,
)


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path, i2i_checkpoint: Path
) -> dict[str, Path]:
    video = make_checkpoint(tmp_path_factory.mktemp("t2v"), "t2v")
    return {"t2i": t2i_checkpoint, "i2i": i2i_checkpoint, "t2v": video}


def encoder_of(
    checkpoint: Path, task: str, dtype: torch.dtype = torch.float32
) -> Kandinsky5TextEncoder:
    make = make_video_adapter if task == "t2v" else make_adapter
    encoder = make(checkpoint, task).load_text_encoder(CPU, dtype)
    assert isinstance(encoder, Kandinsky5TextEncoder)
    return encoder


def source_for(task: str, index: int) -> Image | None:
    """Pictures of alternating sizes, for prompts that contain one."""
    if task != "i2i":
        return None
    width = 64 if index % 2 == 0 else 96
    return picture(width, 64, index)


def stock_pipeline(checkpoint: Path, task: str, encoder: Kandinsky5TextEncoder) -> Any:
    pipeline = PIPELINES[task].from_pretrained(
        checkpoint, tokenizer=load_processor(checkpoint), transformer=None, vae=None
    )
    pipeline.prompt_template = encoder.template.text
    pipeline.prompt_template_encode_start_idx = encoder.template.crop
    return pipeline


@torch.no_grad()
def stock_embeds(
    pipeline: Any, task: str, caption: str, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pipeline's embeddings of one prompt, (L, D) and (D2)."""
    source = {"image": [source_for(task, index)]} if task == "i2i" else {}
    hidden, pooled, _ = pipeline.encode_prompt(caption, **source)
    return hidden[0], pooled[0]


@contextmanager
def tokens_read(module: torch.nn.Module) -> Iterator[list[int]]:
    """Number of tokens in each call of a decoder."""
    counts: list[int] = []
    hook = module.register_forward_pre_hook(
        lambda _, inputs, settings: counts.append(settings["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield counts
    finally:
        hook.remove()


@pytest.mark.parametrize("task", ["t2i", "t2v", "i2i"])
def test_batched_captions_equal_single_ones(checkpoints: dict[str, Path], task: str) -> None:
    encoder = encoder_of(checkpoints[task], task)
    pipeline = stock_pipeline(checkpoints[task], task, encoder)
    requests = [
        TextRequest(caption, source_for(task, index)) for index, caption in enumerate(CAPTIONS)
    ]
    batched = encoder.encode(requests)
    singles = [encoder.encode([request])[0] for request in requests]

    for index, request in enumerate(requests):
        hidden, pooled = stock_embeds(pipeline, task, request.caption, index)
        for embeds in (singles[index], batched[index]):
            assert_close(embeds["prompt_embeds"], hidden, terms=MODEL)
            assert_close(embeds["pooled_prompt_embeds"], pooled, terms=MODEL)


def test_edits_lose_their_first_tokens_as_in_the_pipeline(
    i2i_checkpoint: Path, tmp_path: Path
) -> None:
    """With Qwen's tokenization of the template: 52 tokens before the caption, 55 cropped."""
    folder = shutil.copytree(i2i_checkpoint, tmp_path / "i2i")
    split_as_qwen(folder)
    encoder = encoder_of(folder, "i2i")
    pipeline = stock_pipeline(folder, "i2i", encoder)

    (embeds,) = encoder.encode([TextRequest("a red star on a cat", source_for("i2i", 0))])

    hidden, _ = stock_embeds(pipeline, "i2i", "a red star on a cat", 0)
    assert_close(embeds["prompt_embeds"], hidden, terms=MODEL)
    words = 3  # of six
    picture_tokens = 4
    picture_marks_and_end = 3
    assert embeds["prompt_embeds"].shape == (words + picture_tokens + picture_marks_and_end, WIDTH)


@pytest.mark.parametrize("task", ["t2i", "i2i"])
def test_prompts_of_equal_padded_length_share_a_batch(
    checkpoints: dict[str, Path], task: str
) -> None:
    """However many tokens their pictures take, if these have one size."""
    encoder = encoder_of(checkpoints[task], task)
    captions = ["a star" + " a star" * count for count in range(6)]
    requests = [TextRequest(caption, source_for(task, 0)) for caption in captions]
    shapes: dict[Any, Any] = {}
    for request in requests:
        inputs = encoder._padded(encoder._tokenize(request.caption, request.picture))
        shapes.setdefault(encoder.padded_length(request), set()).add(inputs["input_ids"].shape)

    assert 1 < len(shapes) < len(captions)
    assert all(len(shape) == 1 for shape in shapes.values())


@pytest.mark.parametrize("task", ["t2i", "t2v"])
def test_reusing_the_template_adds_no_error_in_bf16(
    checkpoints: dict[str, Path], task: str
) -> None:
    """Compared with float32 weights of the same values, errors are those of the pipeline."""
    encoder = encoder_of(checkpoints[task], task, torch.bfloat16)
    pipeline = stock_pipeline(checkpoints[task], task, encoder)
    pipeline.text_encoder = encoder.qwen
    pipeline.text_encoder_2 = encoder.clip
    requests = [TextRequest(caption) for caption in CAPTIONS]

    def stock_rows() -> torch.Tensor:
        return torch.cat([stock_embeds(pipeline, task, caption, 0)[0] for caption in CAPTIONS])

    stock = stock_rows()
    singles = torch.cat([encoder.encode([request])[0]["prompt_embeds"] for request in requests])
    batched = torch.cat([embeds["prompt_embeds"] for embeds in encoder.encode(requests)])
    encoder.qwen.float()
    exact = stock_rows()

    def error(rows: torch.Tensor) -> float:
        return float((rows.float() - exact).norm() / exact.norm())

    assert 1e-3 < error(stock) < 0.1
    assert error(singles) < 1.1 * error(stock)
    assert error(batched) < 1.1 * error(stock)


def test_quantised_encoders_reuse_the_template(t2i_checkpoint: Path) -> None:
    encoder = encoder_of(t2i_checkpoint, "t2i")
    int8 = quantisation("int8")
    assert int8 is not None
    pipeline = stock_pipeline(t2i_checkpoint, "t2i", encoder)
    full, _ = stock_embeds(pipeline, "t2i", CAPTIONS[2], 0)
    quantise(encoder.qwen, QWEN_LAYERS, int8, accelerator=CPU)
    pipeline.text_encoder = encoder.qwen
    hidden, _ = stock_embeds(pipeline, "t2i", CAPTIONS[2], 0)
    embeds = encoder.encode([TextRequest(caption) for caption in CAPTIONS])

    assert_close(embeds[2]["prompt_embeds"], hidden, terms=MODEL)
    assert (full - hidden).abs().max() > 1e-3


def test_the_template_is_encoded_once_and_captions_in_batches(t2i_checkpoint: Path) -> None:
    encoder = encoder_of(t2i_checkpoint, "t2i")
    captions = ("a star", "one star", CAPTIONS[4], "a far star")  # three short, one long
    requests = [TextRequest(caption) for caption in captions]
    short = encoder.padded_length(requests[0])
    long = encoder.padded_length(requests[2])
    assert short < long

    with tokens_read(encoder.qwen.model.language_model) as counts:
        encoder.encode(requests)
        encoder.encode(requests[2:])

    template = encoder.template.crop + encoder.max_length

    def tokens_after_template(length: int) -> int:
        return length - min(len(encoder.start.tokens), length - FEWEST_TO_READ)

    short_rest = tokens_after_template(short)
    long_rest = tokens_after_template(long)
    assert counts == [template, 3 * short_rest, long_rest, long_rest, short_rest]


@pytest.mark.parametrize(
    ("task", "reads_pictures"), [("t2i", False), ("t2v", False), ("i2i", True)]
)
def test_only_the_needed_parts_of_the_encoder_are_loaded(
    checkpoints: dict[str, Path], task: str, reads_pictures: bool
) -> None:
    encoder = encoder_of(checkpoints[task], task)

    assert not list(encoder.qwen.lm_head.parameters())
    assert (encoder.qwen.model.visual is not None) is reads_pictures


def test_the_cached_template_is_never_modified(t2i_checkpoint: Path) -> None:
    encoder = encoder_of(t2i_checkpoint, "t2i")
    first = encoder.encode([TextRequest(CAPTIONS[2])])
    encoder.encode([TextRequest(caption) for caption in CAPTIONS])
    again = encoder.encode([TextRequest(CAPTIONS[2])])

    assert torch.equal(first[0]["prompt_embeds"], again[0]["prompt_embeds"])


def test_a_caption_that_merges_with_the_templates_last_token_is_encoded_right(
    t2i_checkpoint: Path,
) -> None:
    """The template then ends in the middle of a token, whose tokens are read with the caption."""
    encoder = encoder_of(t2i_checkpoint, "t2i")
    encoder.template = TextTemplate(
        "<|im_start|>system\nBe brief.<|im_end|>\nDescribe the col{}<|im_end|>", crop=4
    )
    words = encoder.template.text.partition("{}")[0]
    encoder.start = PromptStart(encoder.processor.tokenizer(words)["input_ids"], 40)
    pipeline = stock_pipeline(t2i_checkpoint, "t2i", encoder)
    merging = "or of it, all of it, from left to right"  # "color"
    separate = "a star that falls and falls"
    for caption, merges in ((merging, True), (separate, False)):
        ids = encoder._tokenize(caption, None)["input_ids"][0]
        starts_with_template = torch.equal(ids[: len(encoder.start.tokens)], encoder.start.tokens)
        assert starts_with_template is not merges

    batched = encoder.encode([TextRequest(merging), TextRequest(separate)])

    for caption, embeds in zip((merging, separate), batched, strict=True):
        hidden, _ = stock_embeds(pipeline, "t2i", caption, 0)
        assert_close(embeds["prompt_embeds"], hidden, terms=MODEL)


def test_an_instruction_longer_than_the_attention_window_is_encoded_right() -> None:
    """Every other layer of Gemma attends to a window; mask and cached keys must agree on it."""
    torch.manual_seed(0)
    config = build_gemma(64).config
    config.sliding_window = 8
    gemma = type(build_gemma(64))(config).eval()
    ids = torch.randint(3, 64, (3, 40))
    ids[1:, :20] = ids[0, :20]
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    start = PromptStart(ids[0, :20].tolist(), 40)
    with torch.no_grad():
        expected = gemma(ids, attention_mask=mask).last_hidden_state
        hidden = start.read(gemma, ids, mask)
        gemma.config.sliding_window = 4096
        unlimited = gemma(ids, attention_mask=mask).last_hidden_state

    is_real = mask.bool()
    assert_close(hidden[is_real], expected[is_real], terms=MODEL)
    assert (unlimited - expected).abs().max() > 1e-2, "the window has an effect"


def test_sana_encodes_its_instruction_once(sana_checkpoint: Path) -> None:
    encoder: Any = make_sana_adapter(sana_checkpoint).load_text_encoder(CPU, torch.float32)
    with tokens_read(encoder.gemma) as counts:
        for _ in range(2):
            encoder.start.read(encoder.gemma, *_tokens(encoder, CAPTIONS[0]))

    length = encoder._length(bare=False)
    assert length > 400
    start, first, second = counts
    assert start == length
    assert first == second
    assert first < 310


def _tokens(encoder: Any, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = encoder.tokenizer(
        [encoder.instruction + caption],
        padding="max_length",
        max_length=encoder._length(False),
        return_tensors="pt",
    )
    return inputs.input_ids, inputs.attention_mask
