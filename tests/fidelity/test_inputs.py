"""Kandinsky 5 Image: training passes to the transformer what the stock pipelines pass to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL.Image import Image

from simpletuner.diffusion.batch import Batch
from simpletuner.diffusion.flow import make_noisy
from simpletuner.encoding.fill import to_pixels
from simpletuner.models.adapter import TextRequest
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.kandinsky5.text import select_template
from tests.tools.families import CPU, Recorder, make_adapter, picture, stock_pipeline, zeros
from tests.tools.tolerances import ELEMENTWISE, MODEL, VAE, assert_close

SIZE = (96, 64)  # width, height
PROMPT = "a red star &amp; a  blue circle"
SEED = 5


@pytest.fixture(params=["t2i", "i2i"])
def task(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(task: str, t2i_checkpoint: Path, i2i_checkpoint: Path) -> Path:
    return {"t2i": t2i_checkpoint, "i2i": i2i_checkpoint}[task]


def source_for(task: str) -> Image | None:
    return picture(*SIZE) if task == "i2i" else None


def pipeline_inputs(
    checkpoint: Path, task: str, guidance: float = 1.0, words: Any = "official"
) -> list[dict[str, Any]]:
    """Everything the stock pipeline passes to the transformer in two sampling steps."""
    template = select_template(words, "image_edit" if task == "i2i" else "image")
    pipeline = stock_pipeline(checkpoint, task, SIZE, template)
    recorder = Recorder(pipeline.transformer, zeros)
    source = {"image": source_for(task)} if task == "i2i" else {}
    pipeline(
        prompt=PROMPT,
        negative_prompt="",
        width=SIZE[0],
        height=SIZE[1],
        num_inference_steps=2,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(SEED),
        output_type="latent",
        **source,
    )
    return recorder.calls


def trainer_inputs(
    checkpoint: Path, task: str, theirs: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """What the adapter passes to the transformer for the same caption, noise and source."""
    adapter = make_adapter(checkpoint, task, **settings)
    encoder = adapter.load_text_encoder(CPU, torch.float32)
    embeds = encoder.encode([TextRequest(PROMPT, source_for(task))])
    transformer = adapter.load_transformer(torch.float32)
    recorder = Recorder(transformer, zeros)
    states = theirs["hidden_states"].permute(0, 4, 1, 2, 3)
    noise = states[:, :16]
    condition = states[:, 16:32] if task == "i2i" else None
    batch = Batch(latents=torch.zeros_like(noise), embeds=embeds, names=["x"], condition=condition)
    adapter.predict(transformer, make_noisy(batch, theirs["timestep"] / 1000, noise))
    return recorder.calls[0]


def assert_same_inputs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name in (
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "timestep",
        "text_rope_pos",
    ):
        assert ours[name].shape == theirs[name].shape, name
        assert_close(ours[name], theirs[name], terms=MODEL)
    axes = zip(ours["visual_rope_pos"], theirs["visual_rope_pos"], strict=True)
    assert all(torch.equal(positions, expected) for positions, expected in axes)
    assert tuple(theirs["scale_factor"]) == (1.0, 1.0, 1.0)
    assert tuple(ours["scale_factor"]) == (1.0, 1.0, 1.0)
    assert theirs["sparse_params"] is None
    assert ours.get("sparse_params") is None


def test_training_equals_the_first_sampling_step(checkpoint: Path, task: str) -> None:
    theirs = pipeline_inputs(checkpoint, task)[0]
    ours = trainer_inputs(checkpoint, task, theirs)

    assert theirs["timestep"].item() == 1000.0
    assert ours["hidden_states"].shape[-1] == (33 if task == "i2i" else 16)
    assert_same_inputs(ours, theirs)


def test_training_equals_a_later_sampling_step(checkpoint: Path, task: str) -> None:
    calls = pipeline_inputs(checkpoint, task)
    assert calls[1]["timestep"].item() < 1000.0
    ours = trainer_inputs(checkpoint, task, calls[1])

    assert torch.equal(ours["timestep"], calls[1]["timestep"])
    assert ours["timestep"].dtype == torch.float32


def test_dropped_captions_equal_the_pipelines_negative_prompt(checkpoint: Path, task: str) -> None:
    unconditional = pipeline_inputs(checkpoint, task, guidance=3.0)[1]
    encoder = make_adapter(checkpoint, task).load_text_encoder(CPU, torch.float32)
    ours = encoder.encode([TextRequest("", source_for(task))])[0]

    assert_close(ours["prompt_embeds"], unconditional["encoder_hidden_states"][0], terms=MODEL)
    assert_close(ours["pooled_prompt_embeds"], unconditional["pooled_projections"][0], terms=MODEL)


def test_the_diffusers_template_equals_the_pipelines(checkpoint: Path, task: str) -> None:
    theirs = pipeline_inputs(checkpoint, task, words="diffusers")[0]
    ours = trainer_inputs(checkpoint, task, theirs, text_template="diffusers")

    assert_same_inputs(ours, theirs)
    text = ours["encoder_hidden_states"]
    official = trainer_inputs(checkpoint, task, theirs)["encoder_hidden_states"]
    assert official.shape != text.shape or not torch.allclose(official, text, atol=1e-3)


def posterior_of(encoder: Any, pixels: torch.Tensor) -> Any:
    with torch.no_grad():
        return encoder.vae.encode(pixels[:, :, 0]).latent_dist


SCALING = 0.3611  # of the tiny VAE


def test_the_pipeline_scales_source_latents_and_does_not_shift_them(i2i_checkpoint: Path) -> None:
    encoder = make_adapter(i2i_checkpoint, "i2i").load_latent_encoder(CPU, torch.float32)
    posterior = posterior_of(encoder, to_pixels(np.array(picture(*SIZE)))[None])

    channels = pipeline_inputs(i2i_checkpoint, "i2i")[0]["hidden_states"]

    # The pipeline draws the starting noise first, then the posterior's sample, with one generator.
    generator = torch.Generator().manual_seed(SEED)
    torch.randn((1, 1, SIZE[1] // 8, SIZE[0] // 8, 16), generator=generator)
    noise = torch.randn(posterior.mean.shape, generator=generator)
    expected = (posterior.mean + posterior.std * noise) * SCALING
    source = channels[..., 16:32]
    # Two loads of one VAE may differ in the last bit of a convolution, by the alignment of their
    # weights.
    assert_close(source[:, 0].permute(0, 3, 1, 2), expected, terms=VAE)
    mask = channels[..., 32:]
    assert torch.equal(mask, torch.ones_like(mask))


def test_source_latents_of_i2i_are_scaled_and_not_shifted(i2i_checkpoint: Path) -> None:
    encoder = make_adapter(i2i_checkpoint, "i2i").load_latent_encoder(CPU, torch.float32)
    pixels = to_pixels(np.array(picture(*SIZE)))[None]
    posterior = posterior_of(encoder, pixels)

    latents = encoder.encode(pixels, [11])

    noise = torch.randn(posterior.mean.shape[1:], generator=torch.Generator().manual_seed(11))
    expected = (posterior.mean[0] + posterior.std[0] * noise) * SCALING
    assert_close(latents[0, :, 0], expected, terms=ELEMENTWISE)


def test_latents_decode_to_the_pixels_of_the_pipeline(t2i_checkpoint: Path) -> None:
    encoder = make_adapter(t2i_checkpoint).load_latent_encoder(CPU, torch.float32)
    latents = encoder.encode(to_pixels(np.array(picture(*SIZE)))[None], [1])
    vae = AutoencoderKL.from_pretrained(t2i_checkpoint / "vae")

    with torch.no_grad():
        decoded = encoder.decode(latents)
        stock = vae.decode(latents[:, :, 0] / SCALING).sample

    assert decoded.shape == (1, 3, 1, SIZE[1], SIZE[0])
    assert_close(decoded[:, :, 0], stock.clamp(-1, 1), terms=VAE)


def test_latents_do_not_depend_on_the_batch(t2i_checkpoint: Path) -> None:
    encoder = make_adapter(t2i_checkpoint).load_latent_encoder(CPU, torch.float32)
    pixels = torch.stack([to_pixels(np.array(picture(64, 64, seed))) for seed in range(3)])
    batched = encoder.encode(pixels, [1, 2, 3])

    for index in range(3):
        (single,) = encoder.encode(pixels[index : index + 1], [index + 1])
        assert_close(batched[index], single, terms=VAE)


def test_captions_are_truncated_where_the_plan_says(t2i_checkpoint: Path) -> None:
    """The family's limit is part of the cache key, and may not be exceeded."""
    longest = KANDINSKY5_IMAGE.captions.longest
    for setting, length in ((None, longest), (77, 77), (longest + 100, longest)):
        adapter = make_adapter(t2i_checkpoint, tokenizer_max_length=setting)
        encoder = adapter.load_text_encoder(CPU, torch.float32)
        (embeds,) = encoder.encode([TextRequest("word " * 2 * longest)])
        assert len(embeds["prompt_embeds"]) == length, setting
