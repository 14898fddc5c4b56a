"""Previews that are watched while they are sampled: what they show, when, and that they change
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from simpletuner.models.adapter import PreviewRequest, TextRequest
from simpletuner.models.kandinsky5.image import FluxLatentEncoder
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.reporting.events import Event, PreviewGrew
from simpletuner.reporting.metrics import MediaRecord
from simpletuner.validation.sketch import (
    IN_PROGRESS,
    ColourMap,
    GrowingPreview,
    discard_unfinished,
)
from tests.tools.families import CPU, make_adapter, make_video_adapter, picture
from tests.tools.runs import PREVIEWED, train_with_subscribers
from tests.tools.sana_family import make_sana_adapter
from tests.tools.tiny import TOKENIZERS, make_checkpoint
from tests.tools.tiny_sana import make_sana_checkpoint
from tests.tools.tolerances import SAMPLING, assert_close
from tests.tools.workspace import Workspace, read_events

DEMO = TOKENIZERS.parent
# Of a colour, on average. Noise would be off by a third.
LARGEST_ERROR = 0.1


def test_sketches_are_close_to_the_colours_of_the_vae() -> None:
    vae = AutoencoderKL.from_pretrained(DEMO / "checkpoint" / "vae").eval()
    encoder = FluxLatentEncoder(vae, CPU, torch.float32)
    colours = ColourMap.fit(encoder, KANDINSKY5_IMAGE)
    sketches = []
    pictures = []
    for file in sorted((DEMO / "pictures").glob("*.png"))[:6]:
        array = np.asarray(Image.open(file).convert("RGB").resize((128, 128)), dtype=np.float32)
        z = encoder.encode(torch.from_numpy(array).permute(2, 0, 1)[None, :, None] / 127.5 - 1, [0])
        (sketch,) = colours(z)
        assert sketch.size == (16, 16)
        sketches.append(torch.from_numpy(np.asarray(sketch).copy()).permute(2, 0, 1) / 255)
        with torch.no_grad():
            pictures.append(
                (interpolate(encoder.decode(z)[:, :, 0], size=(16, 16), mode="area")[0] + 1) / 2
            )
    shown = torch.stack(sketches)
    decoded = torch.stack(pictures)

    assert (shown - decoded).abs().mean() < LARGEST_ERROR
    assert torch.corrcoef(torch.stack([shown.flatten(), decoded.flatten()]))[0, 1] > 0.8


@dataclass
class Watched:
    """Records what a pipeline passes to sketches at its sampling steps."""

    steps: list[tuple[int, float, float, Tensor]]

    def __call__(self, done: int, timestep: float, sigma: float, z: Tensor) -> None:
        self.steps.append((done, timestep, sigma, z.clone()))


@pytest.mark.parametrize("task", ["t2i", "i2i", "t2v", "sana", "sana i2v"])
def test_every_pipeline_passes_its_latents_to_sketches(tmp_path: Path, task: str) -> None:
    """The latents after the last step are those that the pipeline decodes."""
    frames = 1 if task in ("t2i", "i2i") else 5
    if frames == 1:
        adapter: Any = make_adapter(make_checkpoint(tmp_path / task, task), task)
    elif task == "t2v":
        adapter = make_video_adapter(make_checkpoint(tmp_path / task, task), task)
    else:
        adapter = make_sana_adapter(make_sana_checkpoint(tmp_path / "sana"))
    source = picture(64, 64) if task in ("i2i", "sana i2v") else None
    prompt = TextRequest("a star", source if task == "i2i" else None)
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode([prompt])[0]
    stock = adapter.load_preview_pipeline(adapter.load_transformer(torch.float32).eval(), CPU, None)
    watched = Watched([])
    request = PreviewRequest(
        embeds, embeds, 64, 64, 4, 1.0, 5, source=source, num_frames=frames, watch=watched
    )
    with torch.no_grad():
        watched_frames = np.stack([np.asarray(frame) for frame in stock.render(request)])
        unwatched = stock.render(replace(request, watch=None))

    assert np.array_equal(watched_frames, np.stack([np.asarray(frame) for frame in unwatched]))
    done, timesteps, sigmas, latents = map(list, zip(*watched.steps, strict=True))
    assert done == [1, 2, 3, 4]
    assert timesteps == sorted(timesteps, reverse=True)
    assert sigmas == sorted(sigmas, reverse=True)
    assert sigmas[-1] == 0
    with torch.no_grad():
        decoded = stock.encoder.decode(latents[-1])
    rendered = torch.from_numpy(watched_frames).permute(3, 0, 1, 2)
    assert (rendered - (decoded[0] + 1) * 127.5).abs().max() <= 1.01


@pytest.fixture
def previewed(workspace: Workspace) -> Workspace:
    workspace.write_config(
        max_train_steps=2, checkpoint_step_interval=2, validation_num_inference_steps=6, **PREVIEWED
    )
    return workspace


@pytest.mark.slow(1)
def test_sketches_do_not_change_the_previews_of_a_run(previewed: Workspace) -> None:
    events: list[Event] = []
    train_with_subscribers(previewed, events.append)
    plain = pictures_in(previewed.path("output/validation_images"))
    assert not any(isinstance(event, PreviewGrew) for event in events)
    settings = ["validation_preview=true", "validation_preview_steps=2", "output_dir=watched"]
    assert previewed.run("train", *settings) == 0
    folder = previewed.path("watched")
    assert pictures_in(folder / "validation_images") == plain
    sketches = [
        event
        for event in read_events(folder / "events.jsonl")
        if event["type"] == "validation.image"
    ]
    labels = [event["data"]["step_label"] for event in sketches]
    assert labels == ["2/6", "4/6", "6/6"] * len(plain)
    for event in sketches:
        (path,) = event["images"]
        with Image.open(folder / path) as sketch:
            assert sketch.size == (16, 16)

    assert len(list((folder / IN_PROGRESS).iterdir())) == len(sketches)


def pictures_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def test_the_sketched_latents_are_exact_for_a_constant_velocity(tmp_path: Path) -> None:
    events: list[PreviewGrew] = []
    drawn: list[Tensor] = []

    class Drawing(ColourMap):
        def __call__(self, z: Tensor) -> list[Image.Image]:
            drawn.append(z)
            return super().__call__(z)

    clean = torch.randn(1, 4, 2, 3, 5)
    noise = torch.randn(1, 4, 2, 3, 5)
    growing = GrowingPreview(
        colours=Drawing(torch.rand(5, 3, dtype=torch.float64)),
        every=1,
        total=3,
        media=MediaRecord(7, "bird", "", "", 40, 24),
        seconds=0.5,
        output_dir=tmp_path,
        publish=events.append,
    )

    for done, sigma in ((1, 0.8), (2, 0.5), (3, 0.0)):
        growing(done, 1000 * sigma, sigma, (1 - sigma) * clean + sigma * noise)

    for estimate in drawn[1:]:
        assert_close(estimate, clean, terms=SAMPLING)
    assert [event.done for event in events] == [1, 2, 3]
    with Image.open(tmp_path / events[0].media.path) as clip:
        assert clip.size == (5, 3)
        assert clip.n_frames == 2  # type: ignore[attr-defined]
        assert clip.info["duration"] == 250  # ms, half of 0.5 s


def test_sketches_of_an_earlier_round_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / IN_PROGRESS
    folder.mkdir(parents=True)
    for name in ("step_4_a.png", "step_4_a.gif", "mine.png"):
        (folder / name).touch()

    discard_unfinished(tmp_path)

    assert [path.name for path in folder.iterdir()] == ["mine.png"]
