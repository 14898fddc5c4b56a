"""Sana Video's captions are encoded as in the stock pipelines."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SanaImageToVideoPipeline

from simpletuner.config.load import Layer, resolve
from simpletuner.diffusion.batch import Batch
from simpletuner.diffusion.flow import make_noisy
from simpletuner.errors import Problems
from simpletuner.models.adapter import TextRequest
from simpletuner.models.sanavideo.options import SanaOptions
from simpletuner.models.sanavideo.spec import SANA_VIDEO, text_fingerprint, with_motion_score
from simpletuner.models.sanavideo.video import pipeline_instruction
from tests.tools.families import CPU
from tests.tools.sana_family import (
    make_sana_adapter,
    make_sana_config,
    record_pipeline,
    stock_pipeline,
)
from tests.tools.tolerances import MODEL, assert_close

CAPTIONS = (
    "A RED ball \n",
    "Élan: तारा 你好 (x) & more",
    "many words " * 100,  # does not fit
    "user prompt: a cat",
)


def pipeline_text(
    checkpoint: Path, prompt: str, instruction: Any, *, negative: bool = False
) -> torch.Tensor:
    """The embeddings that a stock pipeline's transformer would attend to, (L, D)."""
    encoded = stock_pipeline(checkpoint, "t2v").encode_prompt(
        "" if negative else prompt, negative_prompt=prompt, complex_human_instruction=instruction
    )
    embeds, mask = encoded[2:] if negative else encoded[:2]
    real: torch.Tensor = embeds[mask.bool()]
    return real


def encoded(checkpoint: Path, *requests: TextRequest, **settings: Any) -> list[torch.Tensor]:
    """The embeddings of some captions, (L, D) each."""
    encoder = make_sana_adapter(checkpoint, **settings).load_text_encoder(CPU, torch.float32)
    return [embeds["prompt_embeds"] for embeds in encoder.encode(requests)]


def test_both_sana_pipelines_have_the_same_instruction() -> None:
    parameters = inspect.signature(SanaImageToVideoPipeline.__call__).parameters

    assert pipeline_instruction() == parameters["complex_human_instruction"].default


@pytest.mark.parametrize("caption", CAPTIONS)
def test_captions_are_encoded_as_in_the_pipeline(sana_checkpoint: Path, caption: str) -> None:
    (embeds,) = encoded(sana_checkpoint, TextRequest(caption))
    expected = pipeline_text(sana_checkpoint, caption, pipeline_instruction())

    assert_close(embeds, expected, terms=MODEL)


@pytest.mark.parametrize("caption", ["", "Blurry, JITTER ", CAPTIONS[2]])
def test_negative_prompts_have_no_instruction(sana_checkpoint: Path, caption: str) -> None:
    (embeds,) = encoded(sana_checkpoint, TextRequest(caption, bare=True), sana_motion_score=30)
    expected = pipeline_text(sana_checkpoint, caption, pipeline_instruction(), negative=True)

    assert_close(embeds, expected, terms=MODEL)


def test_the_empty_caption_is_the_negative_one(sana_checkpoint: Path) -> None:
    dropped, negative, prompt = encoded(
        sana_checkpoint,
        TextRequest(" ", bare=True),
        TextRequest("", bare=True),
        TextRequest("x"),
        sana_motion_score=30,
    )

    assert torch.equal(dropped, negative)
    assert len(prompt) > len(dropped)


def test_an_empty_prompt_is_encoded_as_in_the_pipeline(sana_checkpoint: Path) -> None:
    """The unconditional preview: the pipeline puts the instruction before an empty prompt, too."""
    (embeds,) = encoded(sana_checkpoint, TextRequest(""), sana_motion_score=30)
    expected = pipeline_text(sana_checkpoint, "", pipeline_instruction())

    assert torch.equal(embeds, expected)
    assert len(embeds) > len(encoded(sana_checkpoint, TextRequest("", bare=True))[0])


def test_a_batch_equals_single_captions(sana_checkpoint: Path) -> None:
    requests = [
        TextRequest(caption, bare=index % 2 == 1) for index, caption in enumerate((*CAPTIONS, ""))
    ]
    batched = encoded(sana_checkpoint, *requests)

    for embeds, request in zip(batched, requests, strict=True):
        (expected,) = encoded(sana_checkpoint, request)
        assert_close(embeds, expected, terms=MODEL)


def test_the_motion_score_is_appended_once(sana_checkpoint: Path) -> None:
    """As users of the pipeline write it; a caption that ends with a score keeps it."""
    appended, kept = encoded(
        sana_checkpoint,
        TextRequest("A ball"),
        TextRequest("A ball motion score: 7."),
        sana_motion_score=30.0,
    )
    for embeds, score in ((appended, 30), (kept, 7)):
        expected = pipeline_text(
            sana_checkpoint, f"A ball motion score: {score}.", pipeline_instruction()
        )
        assert_close(embeds, expected, terms=MODEL)

    assert with_motion_score("", 30) == ""
    assert with_motion_score("a ball", 2.5) == "a ball motion score: 2.5."


@pytest.mark.parametrize("lines", [[], ["Describe it:", "Prompt: "]])
def test_another_instruction_is_encoded_as_in_the_pipeline(
    sana_checkpoint: Path, tmp_path: Path, lines: list[str]
) -> None:
    expected = pipeline_text(sana_checkpoint, "a ball", lines)
    file = tmp_path / "lines.json"
    file.write_text(json.dumps(lines))
    for value in (lines, str(file)):
        (embeds,) = encoded(
            sana_checkpoint, TextRequest("a ball"), sana_complex_human_instruction=value
        )
        assert_close(embeds, expected, terms=MODEL)


def test_the_instruction_may_be_a_flag_lines_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\ntwo: \n")
    key = "sana_complex_human_instruction"

    def read(value: Any) -> Any:
        return SanaOptions.model_validate({key: value}).sana_complex_human_instruction

    assert read(True) is read("true") is True
    assert read(False) == read("off") == []
    assert read(str(tmp_path / "lines.txt")) == ["one", "two: "]
    for wrong in ("nowhere.txt", 7, [1], {"a": "b"}):
        problems = Problems()
        layer = Layer("f", [("model_type", "lora"), ("model_family", "sanavideo"), (key, wrong)])
        assert (
            resolve([layer], problems).family.of(SanaOptions).sana_complex_human_instruction is True
        )
        assert [problem.where for problem in problems] == [key], wrong


def test_the_truncated_end_of_a_caption_is_reported(sana_checkpoint: Path) -> None:
    encoder = make_sana_adapter(sana_checkpoint).load_text_encoder(CPU, torch.float32)
    assert encoder.truncated("a ball") is None
    assert encoder.truncated("") is None
    truncated = encoder.truncated("x " * 400 + "the end")
    assert truncated is not None
    assert truncated.endswith("the end")


def test_captions_are_truncated_to_the_maximum_length(sana_checkpoint: Path) -> None:
    assert len(encoded(sana_checkpoint, TextRequest("x " * 400))[0]) == 300
    assert len(encoded(sana_checkpoint, TextRequest("x " * 400), tokenizer_max_length=77)[0]) == 77


def test_instruction_and_motion_score_change_the_fingerprint(sana_checkpoint: Path) -> None:
    flavour = SANA_VIDEO.flavour(None)
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"sana_motion_score": 3},
        {"sana_complex_human_instruction": False},
    )
    configs = [make_sana_config(sana_checkpoint, **settings) for settings in variants]

    fingerprints = {text_fingerprint(config.family, flavour) for config in configs}

    assert len({*fingerprints, SANA_VIDEO.captions.bare_fingerprint}) == 4


def test_masked_padding_does_not_change_the_prediction(sana_checkpoint: Path) -> None:
    """Zeros in place of Gemma's states of padding change no bit of the prediction."""
    theirs = record_pipeline(stock_pipeline(sana_checkpoint, "t2v"))[0]
    adapter = make_sana_adapter(sana_checkpoint)
    transformer = adapter.load_transformer(torch.float32).eval()
    mask = theirs["encoder_attention_mask"].bool()
    embeds = [{"prompt_embeds": theirs["encoder_hidden_states"][mask]}]
    latents = theirs["hidden_states"]
    noisy = make_noisy(Batch(torch.zeros_like(latents), embeds, ["x"]), torch.ones(1), latents)
    with torch.no_grad():
        prediction = adapter.predict(transformer, noisy)
        inputs = {**theirs, "timestep": torch.tensor([1000.0]), "return_dict": False}
        stock = transformer(**inputs)[0]

    assert theirs["encoder_hidden_states"][~mask].abs().max() > 0.1
    assert torch.equal(prediction, stock)


def test_captions_of_different_lengths_do_not_affect_each_other(sana_checkpoint: Path) -> None:
    adapter = make_sana_adapter(sana_checkpoint)
    encoder = adapter.load_text_encoder(CPU, torch.float32)
    embeds = encoder.encode(
        [TextRequest(caption, bare=not caption) for caption in ("a ball", CAPTIONS[1], "")]
    )
    transformer = adapter.load_transformer(torch.float32)
    latents = torch.randn(3, 16, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    noise = torch.randn_like(latents)
    sigmas = torch.tensor([0.3, 0.6, 0.9])
    batch = make_noisy(Batch(latents, embeds, list("abc")), sigmas, noise)

    batched = adapter.predict(transformer, batch)

    for index in range(3):
        row = slice(index, index + 1)
        single = make_noisy(Batch(latents[row], embeds[row], ["x"]), sigmas[row], noise[row])
        expected = adapter.predict(transformer, single)
        assert_close(batched[row], expected, terms=MODEL)
