"""The checkpoint of the demo is small and whole, and cannot draw what the demo teaches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Kandinsky5T2IPipeline
from PIL import Image

from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.templates import OFFICIAL
from tests.tools.colours import PURPLE, YELLOW, colour_share

DEMO = Path(__file__).parents[2] / "simpletuner" / "examples" / "demo"
CHECKPOINT = DEMO / "checkpoint"


@pytest.fixture(scope="module")
def pipe() -> Kandinsky5T2IPipeline:
    pipe = Kandinsky5T2IPipeline.from_pretrained(
        CHECKPOINT, tokenizer=load_processor(CHECKPOINT), dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.resolutions = [(96, 96)]
    pipe.prompt_template = OFFICIAL["image"].text
    pipe.prompt_template_encode_start_idx = OFFICIAL["image"].crop
    return pipe


@pytest.fixture(scope="module")
def glimmers() -> list[Image.Image]:
    return [Image.open(path) for path in sorted((DEMO / "pictures").glob("*.png"))]


def render(pipe: Kandinsky5T2IPipeline, prompt: str) -> Image.Image:
    generator = torch.Generator().manual_seed(0)
    settings = {"height": 96, "width": 96, "num_inference_steps": 25, "guidance_scale": 4.0}
    return pipe(prompt, negative_prompt="", generator=generator, **settings).image[0]


def test_demo_files_take_at_most_eight_megabytes() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*") if path.is_file()) <= 8_000_000


def test_every_picture_has_a_caption(glimmers: list[Image.Image]) -> None:
    captions = [
        path.read_text(encoding="utf-8").strip()
        for path in sorted((DEMO / "pictures").glob("*.txt"))
    ]

    assert len(captions) == len(glimmers) >= 10
    assert all("glimmer" in caption for caption in captions)
    assert all(picture.size == (96, 96) for picture in glimmers)


def test_demo_latents_have_unit_variance_and_decode_to_the_picture(
    pipe: Kandinsky5T2IPipeline, glimmers: list[Image.Image]
) -> None:
    pixels = torch.stack([torch.from_numpy(np.array(picture)) for picture in glimmers])
    pixels = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1

    with torch.no_grad():
        posterior = pipe.vae.encode(pixels).latent_dist
        restored = pipe.vae.decode(posterior.mode()).sample.clamp(-1, 1)
    latents = posterior.sample(torch.Generator().manual_seed(0)) * pipe.vae.config.scaling_factor
    decibels = 10 * torch.log10(4 / (restored - pixels).square().mean())

    assert latents.mean().abs() < 0.1
    # Unit variance holds over the whole world; ten stars alone are a little richer.
    assert latents.std() == pytest.approx(1.0, abs=0.2)
    assert decibels > 30


@pytest.mark.parametrize(
    ("prompt", "colour"),
    [
        ("a big purple circle in the middle on a white background", PURPLE),
        ("a big yellow square on the left on a navy background", YELLOW),
    ],
)
def test_demo_base_draws_what_the_caption_describes(
    pipe: Kandinsky5T2IPipeline, prompt: str, colour: tuple[int, int, int]
) -> None:
    assert colour_share(render(pipe, prompt), colour) > 0.7


@pytest.mark.slow
def test_demo_base_cannot_draw_a_glimmer(pipe: Kandinsky5T2IPipeline) -> None:
    prompts = [json.loads((DEMO / "config.json").read_text())["validation_prompt"]]
    library = json.loads((DEMO / "user_prompt_library.json").read_text())
    prompts += [prompt for prompt in library.values() if "glimmer" in prompt]

    pictures = [render(pipe, prompt) for prompt in prompts]

    assert np.mean([colour_share(picture, PURPLE) for picture in pictures]) < 0.15
    assert np.mean([colour_share(picture, YELLOW) for picture in pictures]) < 0.15
