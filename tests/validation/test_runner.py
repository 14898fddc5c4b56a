"""Previews free their memory on a GPU, change no random state, and may not have one colour."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from simpletuner.config.types import Size
from simpletuner.distributed.world import World
from simpletuner.models.adapter import PreviewRequest
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.planning.prompts import ValidationPrompt
from simpletuner.reporting.events import EventStream
from simpletuner.training.state import TrainState, random_states, restore_random_states
from simpletuner.validation import quiet, renderer, runner
from simpletuner.validation.background import DecodingThread
from simpletuner.validation.encoded_prompt import EncodedPrompt
from tests.tools.assembly import make_assembly
from tests.tools.families import CPU, make_config


class Pipeline:
    """Renders black. Its VAE refers to itself, like one whose methods were replaced."""

    vae: Any

    def __init__(self) -> None:
        self.vae = nn.Identity()
        self.vae.itself = [self.vae]

    def render(self, request: Any) -> list[Image.Image]:
        return [Image.new("RGB", (request.width, request.height))]


@pytest.mark.warns
@pytest.mark.parametrize("rehearsed", [False, True])
def test_release_drops_the_vae_before_emptying_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearsed: bool
) -> None:
    loaded: list[weakref.ref[nn.Module]] = []
    alive: list[bool] = []

    def load(*arguments: Any) -> Pipeline:
        pipeline = Pipeline()
        loaded.append(weakref.ref(pipeline.vae))
        return pipeline

    def empty_cache() -> None:
        alive.append(any(vae() is not None for vae in loaded))

    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=empty_cache)
    monkeypatch.setattr(
        renderer, "torch", SimpleNamespace(cuda=cuda, no_grad=torch.no_grad, device=torch.device)
    )
    settings = {
        "validation_guidance": 1.0,
        "validation_num_inference_steps": 2,
        "validation_seed_source": "cpu",
    }
    config = make_config(tmp_path, **settings)
    catalogue: Any = SimpleNamespace(text=lambda *caption, negative: caption)
    reader: Any = SimpleNamespace(read=lambda entry: {})
    validation = runner.ValidationRunner(
        renderer.RenderSettings(config.validation, config.offload),
        "none",
        [EncodedPrompt(ValidationPrompt("a", "a", "a star"), "", None, catalogue, reader)],
        [Size(16, 16)],
        tmp_path,
        EventStream(),
    )
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, device=CPU)
    assembly: Any = SimpleNamespace(
        accelerator=accelerator,
        adapter=SimpleNamespace(load_preview_pipeline=load, spec=KANDINSKY5_IMAGE),
        transformer=nn.Identity(),
        trained=SimpleNamespace(ema=None),
        sampling_weights=nullcontext,
        averaged=nullcontext,
        world=World(),
        is_sharded=False,
        all_parameters={},
        settings=SimpleNamespace(total_steps=9, seed=0),
    )
    for step in range(2):
        if rehearsed:
            validation.rehearse(assembly)
        else:
            validation.render(assembly, TrainState(step))

    assert len(loaded) == 2
    assert alive == [False, False]


class Latents(Pipeline):
    """Samples and decodes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def sample(self, request: PreviewRequest) -> Callable[[], list[Image.Image]]:
        self.events.append(f"sampled in {threading.current_thread().name}")
        return self._decode

    def _decode(self) -> list[Image.Image]:
        self.events.append(f"decoded in {threading.current_thread().name}")
        return []


def test_a_rehearsal_decodes_in_the_background_beside_what_holds_a_steps_memory(
    tmp_path: Path,
) -> None:
    pipeline = Latents()
    events = pipeline.events

    @contextmanager
    def held() -> Iterator[None]:
        events.append("held")
        yield
        events.append("free")

    validation = make_runner(tmp_path, ValidationPrompt("a", "a", "a star"))
    validation.renderer._pipeline = pipeline  # type: ignore[assignment]
    assembly: Any = SimpleNamespace(
        accelerator=SimpleNamespace(unwrap_model=lambda model: model, device=CPU),
        adapter=None,
        transformer=nn.Identity(),
        sampling_weights=nullcontext,
        settings=SimpleNamespace(seed=0),
    )
    with ThreadPoolExecutor(1, "decoder") as thread:
        validation.decoding = DecodingThread(thread, CPU)
        validation.rehearse(assembly, held)

    assert events == ["sampled in MainThread", "held", "decoded in decoder_0", "free"]


def make_runner(tmp_path: Path, *prompts: ValidationPrompt, **more: Any) -> runner.ValidationRunner:
    """Renders prompts at two sizes, with guidance 1 and the seed of the run."""
    settings = {
        **more,
        "validation_guidance": 1.0,
        "validation_num_inference_steps": 2,
        "num_validation_images": 2,
    }
    config = make_config(tmp_path, **settings)
    catalogue: Any = SimpleNamespace(text=lambda *caption, negative: caption)
    reader: Any = SimpleNamespace(read=lambda entry: {})
    return runner.ValidationRunner(
        renderer.RenderSettings(config.validation, config.offload),
        "none",
        [EncodedPrompt(prompt, "", None, catalogue, reader) for prompt in prompts],
        [Size(16, 16), Size(32, 16)],
        tmp_path,
        EventStream(),
    )


def requests_of(validation: runner.ValidationRunner) -> list[tuple[int, int, int, float]]:
    """(width, height, seed, guidance) of all previews of a round."""
    requests = []
    for preview in validation._previews(None, 100, 5, "validation"):
        request = validation.renderer.request(preview.prompt, preview.size, preview.seed)
        requests.append((request.width, request.height, request.seed, request.guidance_scale))
    return requests


def test_preview_requests_hold_the_settings_of_their_prompt(tmp_path: Path) -> None:
    own = ValidationPrompt("b", "b", "two", seed=7, guidance=4.0, size=Size(64, 48))

    requests = requests_of(make_runner(tmp_path, ValidationPrompt("a", "a", "one"), own))

    assert requests == [
        (16, 16, 100, 1.0),
        (16, 16, 101, 1.0),
        (32, 16, 100, 1.0),
        (32, 16, 101, 1.0),
        (64, 48, 7, 4.0),
        (64, 48, 8, 4.0),
    ]


def test_a_seed_of_a_prompt_is_kept_where_seeds_are_drawn_anew(tmp_path: Path) -> None:
    prompt = ValidationPrompt("a", "a", "one", seed=7)
    validation = make_runner(tmp_path, prompt, validation_randomize=True)

    assert {seed for _, _, seed, _ in requests_of(validation)} == {7, 8}


def test_random_states_are_restored_after_sampling(t2i_checkpoint: Path) -> None:
    assembly = make_assembly(t2i_checkpoint)

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    states = random_states()
    expected = draw()
    restore_random_states(states)

    with quiet.quiet(assembly):
        assert not assembly.transformer.training
        draw()

    assert draw() == expected
    assert assembly.transformer.training


def test_training_mode_is_restored_after_an_error(t2i_checkpoint: Path) -> None:
    assembly = make_assembly(t2i_checkpoint)

    with pytest.raises(RuntimeError, match="out of paint"), quiet.quiet(assembly):
        raise RuntimeError("out of paint")

    assert assembly.transformer.training


@pytest.mark.parametrize(("colours", "warns"), [((0, 0), True), ((7, 8), True), ((7, 9), False)])
def test_a_preview_of_one_colour_is_warned_about(
    colours: tuple[int, int], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [Image.new("RGB", (2, 1), (7, 7, 7)) for _ in range(3)]
    first, second = colours
    frames[-1].putdata([(0, first, 0), (0, second, 0)])

    renderer.warn_of_one_colour(frames, Path("step_3_validation.mp4"))

    assert ("step_3_validation.mp4 shows one colour only" in caplog.text) == warns
