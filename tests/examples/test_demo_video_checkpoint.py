"""The checkpoint of the video demo is small and whole, and cannot render the hop it teaches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Kandinsky5T2VPipeline

from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.templates import OFFICIAL
from tests.tools.motion import path_of, read_clip, rise

DEMO = Path(__file__).parents[2] / "simpletuner" / "examples" / "demo-video"
CHECKPOINT = DEMO / "checkpoint"


@pytest.fixture(scope="module")
def pipe() -> Kandinsky5T2VPipeline:
    pipe = Kandinsky5T2VPipeline.from_pretrained(
        CHECKPOINT, tokenizer=load_processor(CHECKPOINT), dtype=torch.float32
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.prompt_template = OFFICIAL["video"].text
    pipe.prompt_template_encode_start_idx = OFFICIAL["video"].crop
    return pipe


@pytest.fixture(scope="module")
def hops() -> np.ndarray:
    """The clips of the concept: B F H W 3."""
    return np.stack([read_clip(path) for path in sorted((DEMO / "clips").glob("*.mp4"))])


def render_path(pipe: Kandinsky5T2VPipeline, prompt: str) -> np.ndarray:
    """Where the shape goes: 17 2."""
    settings = {
        "height": 64,
        "width": 64,
        "num_frames": 17,
        "num_inference_steps": 25,
        "guidance_scale": 4.0,
    }
    generator = torch.Generator().manual_seed(0)
    clip = pipe(
        prompt, negative_prompt="", generator=generator, output_type="np", **settings
    ).frames[0]
    return path_of(np.asarray(clip) * 255)


def test_demo_video_files_take_at_most_twelve_megabytes() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= 12_000_000


def test_every_clip_has_a_caption_and_a_hop(hops: np.ndarray) -> None:
    captions = [
        path.read_text(encoding="utf-8").strip() for path in sorted((DEMO / "clips").glob("*.txt"))
    ]

    assert len(captions) == len(hops) >= 8
    assert all("hops" in caption for caption in captions)
    assert hops.shape[1:] == (17, 64, 64, 3)
    assert [rise(path_of(clip)) for clip in hops] == pytest.approx([14.0] * len(hops), abs=1)


@pytest.mark.slow
def test_demo_video_latents_have_unit_variance_and_decode_to_the_clip(
    pipe: Kandinsky5T2VPipeline, hops: np.ndarray
) -> None:
    pixels = torch.from_numpy(hops[:4]).permute(0, 4, 1, 2, 3).float() / 127.5 - 1

    with torch.no_grad():
        posterior = pipe.vae.encode(pixels).latent_dist
        restored = pipe.vae.decode(posterior.mode()).sample.clamp(-1, 1)
    latents = posterior.sample(torch.Generator().manual_seed(0)) * pipe.vae.config.scaling_factor
    decibels = 10 * torch.log10(4 / (restored - pixels).square().mean())

    assert latents.shape == (4, 16, 5, 8, 8)
    assert latents.std() == pytest.approx(1.0, abs=0.2)
    assert decibels > 27


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "start", "end"),
    [
        (
            "a big red circle moves from the left to the right on a white background",
            (18, 32),
            (46, 32),
        ),
        (
            "a small white star moves from the bottom to the middle on a navy background",
            (32, 46),
            (32, 32),
        ),
    ],
)
def test_demo_video_base_moves_as_the_caption_describes(
    pipe: Kandinsky5T2VPipeline, prompt: str, start: tuple[int, int], end: tuple[int, int]
) -> None:
    path = render_path(pipe, prompt)

    assert path[0] == pytest.approx(start, abs=5)
    assert path[-1] == pytest.approx(end, abs=5)
    assert abs(rise(path)) < 4


@pytest.mark.slow
def test_demo_video_base_cannot_hop(pipe: Kandinsky5T2VPipeline) -> None:
    prompt = json.loads((DEMO / "config.json").read_text())["validation_prompt"]

    assert rise(render_path(pipe, prompt)) < 5
