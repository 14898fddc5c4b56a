"""Embeddings equal those of the stock pipelines, though the template is read once and captions
share batches.
"""

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
    adapter = (
        make_video_adapter(checkpoint, task) if task == "t2v" else make_adapter(checkpoint, task)
    )
    encoder = adapter.load_text_encoder(CPU, dtype)
    assert isinstance(encoder, Kandinsky5TextEncoder)
    return encoder


def source_for(task: str, index: int) -> Image | None:
    """Pictures of two sizes, for prompts that hold one."""
    return picture((64, 96)[index % 2], 64, index) if task == "i2i" else None


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
    """What a pipeline makes of one prompt, (L, D) and (D2)."""
    extra = {"image": [source_for(task, index)]} if task == "i2i" else {}
    hidden, pooled, _ = pipeline.encode_prompt(caption, **extra)
    return hidden[0], pooled[0]


@contextmanager
def tokens_read(module: torch.nn.Module) -> Iterator[list[int]]:
    """Tokens in each call of a decoder."""
    seen: list[int] = []
    hook = module.register_forward_pre_hook(
        lambda _, inputs, settings: seen.append(settings["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("task", ["t2i", "t2v", "i2i"])
def test_batched_captions_equal_single_ones(checkpoints: dict[str, Path], task: str) -> None:
    encoder = encoder_of(checkpoints[task], task)
    pipeline = stock_pipeline(checkpoints[task], task, encoder)
    requests = [
        TextRequest(caption, source_for(task, index)) for index, caption in enumerate(CAPTIONS)
    ]
    together = encoder.encode(requests)
    for index, (request, mine) in enumerate(zip(requests, together, strict=True)):
        hidden, pooled = stock_embeds(pipeline, task, request.caption, index)
        (alone,) = encoder.encode([request])
        assert_close(alone["prompt_embeds"], hidden, terms=MODEL)
        assert_close(mine["prompt_embeds"], hidden, terms=MODEL)
        for embeds in (alone, mine):
            assert_close(embeds["pooled_prompt_embeds"], pooled, terms=MODEL)


def test_edits_lose_their_first_tokens_as_in_the_pipeline(
    i2i_checkpoint: Path, tmp_path: Path
) -> None:
    """With a tokenizer that splits the template as Qwen's does: 52 tokens before the caption, 55
    cut off.
    """
    folder = shutil.copytree(i2i_checkpoint, tmp_path / "i2i")
    split_as_qwen(folder)
    encoder = encoder_of(folder, "i2i")
    hidden, _ = stock_embeds(
        stock_pipeline(folder, "i2i", encoder), "i2i", "a red star on a cat", 0
    )
    (ours,) = encoder.encode([TextRequest("a red star on a cat", source_for("i2i", 0))])
    assert_close(ours["prompt_embeds"], hidden, terms=MODEL)
    words = 3
    picture_tokens = 4
    around_it_and_end = 3

    assert ours["prompt_embeds"].shape == (words + picture_tokens + around_it_and_end, WIDTH)


@pytest.mark.parametrize("task", ["t2i", "i2i"])
def test_prompts_of_equal_padded_length_share_a_batch(
    checkpoints: dict[str, Path], task: str
) -> None:
    """Whatever the pictures in them take, if these are of one size."""
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
    """Against float32 weights of the same values: ours, alone and in a batch, is as near as the
    pipeline's.
    """
    encoder = encoder_of(checkpoints[task], task, torch.bfloat16)
    pipeline = stock_pipeline(checkpoints[task], task, encoder)
    pipeline.text_encoder = encoder.qwen
    pipeline.text_encoder_2 = encoder.clip
    requests = [TextRequest(caption) for caption in CAPTIONS]
    found = {
        "pipeline": [stock_embeds(pipeline, task, caption, 0)[0] for caption in CAPTIONS],
        "alone": [encoder.encode([request])[0]["prompt_embeds"] for request in requests],
        "together": [one["prompt_embeds"] for one in encoder.encode(requests)],
    }
    encoder.qwen.float()
    exact = torch.cat([stock_embeds(pipeline, task, caption, 0)[0] for caption in CAPTIONS])
    errors = {
        name: float((torch.cat(rows).float() - exact).norm() / exact.norm())
        for name, rows in found.items()
    }

    assert 1e-3 < errors["pipeline"] < 0.1
    assert errors["alone"] < 1.1 * errors["pipeline"]
    assert errors["together"] < 1.1 * errors["pipeline"]


def test_quantised_encoders_reuse_the_template(t2i_checkpoint: Path) -> None:
    encoder = encoder_of(t2i_checkpoint, "t2i")
    int8 = quantisation("int8")
    assert int8 is not None
    pipeline = stock_pipeline(t2i_checkpoint, "t2i", encoder)
    full, _ = stock_embeds(pipeline, "t2i", CAPTIONS[2], 0)
    quantise(encoder.qwen, QWEN_LAYERS, int8, accelerator=CPU)
    pipeline.text_encoder = encoder.qwen
    hidden, _ = stock_embeds(pipeline, "t2i", CAPTIONS[2], 0)
    found = encoder.encode([TextRequest(caption) for caption in CAPTIONS])[2]["prompt_embeds"]

    assert_close(found, hidden, terms=MODEL)
    assert (full - hidden).abs().max() > 1e-3


def test_the_template_is_encoded_once_and_captions_in_batches(
    t2i_checkpoint: Path,
) -> None:
    encoder = encoder_of(t2i_checkpoint, "t2i")
    requests = [
        TextRequest(caption) for caption in ("a star", "one star", CAPTIONS[4], "a far star")
    ]
    short, long = (encoder.padded_length(requests[index]) for index in (0, 2))
    kept = len(encoder.start.tokens)
    start = encoder.template.crop + encoder.max_length
    assert short < long
    with tokens_read(encoder.qwen.model.language_model) as seen:
        encoder.encode(requests)
        encoder.encode(requests[2:])
    rest = [length - min(kept, length - FEWEST_TO_READ) for length in (short, long)]

    assert seen == [start, 3 * rest[0], rest[1], rest[1], rest[0]]


@pytest.mark.parametrize(("task", "sees"), [("t2i", False), ("t2v", False), ("i2i", True)])
def test_only_the_needed_parts_of_the_encoder_are_loaded(
    checkpoints: dict[str, Path], task: str, sees: bool
) -> None:
    encoder = encoder_of(checkpoints[task], task)

    assert not list(encoder.qwen.lm_head.parameters())
    assert (encoder.qwen.model.visual is not None) is sees


def test_the_cached_template_is_never_modified(t2i_checkpoint: Path) -> None:
    encoder = encoder_of(t2i_checkpoint, "t2i")
    first = encoder.encode([TextRequest(CAPTIONS[2])])
    encoder.encode([TextRequest(caption) for caption in CAPTIONS])
    again = encoder.encode([TextRequest(CAPTIONS[2])])

    assert torch.equal(first[0]["prompt_embeds"], again[0]["prompt_embeds"])


def test_a_caption_that_merges_with_the_templates_last_token_is_encoded_right(
    t2i_checkpoint: Path,
) -> None:
    """Where the words before the caption end in the middle of a token, the rest is read with the
    caption.
    """
    encoder = encoder_of(t2i_checkpoint, "t2i")
    encoder.template = TextTemplate(
        "<|im_start|>system\nBe brief.<|im_end|>\nDescribe the col{}<|im_end|>", crop=4
    )
    words = encoder.template.text.partition("{}")[0]
    encoder.start = PromptStart(encoder.processor.tokenizer(words)["input_ids"], 40)
    pipeline = stock_pipeline(t2i_checkpoint, "t2i", encoder)
    captions = ["or of it, all of it, from left to right", "a star that falls and falls"]
    whole = len(encoder.start.tokens)
    inputs = [encoder._tokenize(caption, None)["input_ids"][0] for caption in captions]
    assert [torch.equal(ids[:whole], encoder.start.tokens) for ids in inputs] == [False, True], (
        "none melts"
    )
    for caption, mine in zip(
        captions, encoder.encode([TextRequest(caption) for caption in captions]), strict=True
    ):
        hidden, _ = stock_embeds(pipeline, "t2i", caption, 0)
        assert_close(mine["prompt_embeds"], hidden, terms=MODEL)


def test_an_instruction_longer_than_the_attention_window_is_encoded_right() -> None:
    """Gemma's every other layer sees so many tokens back and no further; mask and kept keys must
    agree on that.
    """
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
        whole = gemma(ids, attention_mask=mask).last_hidden_state
        mine = start.read(gemma, ids, mask)
        gemma.config.sliding_window = 4096
        far = gemma(ids, attention_mask=mask).last_hidden_state

    assert_close(mine[mask.bool()], whole[mask.bool()], terms=MODEL)
    assert (far - whole).abs().max() > 1e-2, "the window hides nothing"


def test_sana_encodes_its_instruction_once(sana_checkpoint: Path) -> None:
    encoder: Any = make_sana_adapter(sana_checkpoint).load_text_encoder(CPU, torch.float32)
    with tokens_read(encoder.gemma) as seen:
        for caption in CAPTIONS[:1] * 2:
            encoder.start.read(encoder.gemma, *_tokens(encoder, caption))
    whole = encoder._length(bare=False)

    assert seen[0] == whole
    assert seen[1] == seen[2] < 310
    assert whole > 400


def _tokens(encoder: Any, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = encoder.tokenizer(
        [encoder.instruction + caption],
        padding="max_length",
        max_length=encoder._length(False),
        return_tensors="pt",
    )
    return inputs.input_ids, inputs.attention_mask
