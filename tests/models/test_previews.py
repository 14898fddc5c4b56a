"""Previews have the requested size and length, fitted sources, and the chosen solver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from simpletuner.config.schema import RunConfig
from simpletuner.config.types import Size
from simpletuner.data.buckets import Geometry
from simpletuner.data.sample import Sample
from simpletuner.models import decoding
from simpletuner.models.adapter import FamilyAdapter, PreviewRequest, TextRequest
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.loading import with_solver
from simpletuner.models.usage import SOLVERS
from simpletuner.validation.renderer import Renderer, RenderSettings
from tests.tools.families import CPU, make_adapter, make_config, make_video_adapter, picture
from tests.tools.reports import found_by
from tests.tools.sana_family import make_sana_adapter, make_sana_config
from tests.tools.tiny import make_checkpoint
from tests.tools.tiny_sana import make_sana_checkpoint
from tests.tools.workspace import Workspace


def test_a_sample_is_cropped_in_the_centre_for_another_size() -> None:
    trained = Geometry("1.0", Size(64, 64), Size(192, 64), (7, 0))
    sample = Sample("photos", "a.png", Path(), "", (300, 100), trained)

    # Resized to cover the size, then cropped by half of what is too much: (192 - 128) / 2.
    wide = Geometry("1.0", Size(128, 64), Size(192, 64), (32, 0))
    square = Geometry("1.0", Size(128, 128), Size(384, 128), (128, 0))
    assert sample.fitted(Size(64, 64)) is sample, "the crop of training stays"
    assert sample.fitted(Size(128, 64)).geometry == wide
    assert sample.fitted(Size(128, 128)).geometry == square


@pytest.mark.parametrize("task", ["i2i", "i2v"])
def test_a_source_of_another_ratio_is_cropped(
    tmp_path: Path, i2i_checkpoint: Path, task: str
) -> None:
    """The stock pipelines would stretch it."""
    source = picture(64, 192)
    if task == "i2i":
        adapter: Any = make_adapter(i2i_checkpoint, task)
        prompt = TextRequest("", source)
    else:
        adapter = make_video_adapter(make_checkpoint(tmp_path / "i2v", "i2v"), task)
        prompt = TextRequest("")
    (embeds,) = adapter.load_text_encoder(CPU, torch.float32).encode([prompt])
    stock = adapter.load_preview_pipeline(adapter.load_transformer(torch.float32).eval(), CPU, None)
    processor = getattr(stock.pipeline, "image_processor" if task == "i2i" else "video_processor")
    preprocess = processor.preprocess
    source_sizes = []

    def noted(image: Any, **size: Any) -> Any:
        source_sizes.append(image.size)
        return preprocess(image, **size)

    processor.preprocess = noted
    preview = PreviewRequest(embeds, embeds, 96, 64, 1, 1.0, 5, source=source, num_frames=17)

    with torch.no_grad():
        frames = stock.render(preview)

    assert {frame.size for frame in frames} == {(96, 64)}
    assert source_sizes == [(96, 64)]


def family(kind: str, folder: Path) -> tuple[RunConfig, FamilyAdapter]:
    """The config and the adapter of a tiny checkpoint: of a task of Kandinsky, or flavour of Sana.

    Their VAEs are those of Flux, HunyuanVideo, Wan and LTX-2.
    """
    if kind in ("2b-480p", "2b-720p"):
        checkpoint = make_sana_checkpoint(folder, flavour=kind)
        return make_sana_config(checkpoint), make_sana_adapter(checkpoint)
    checkpoint = make_checkpoint(folder, kind)
    if kind == "t2i":
        return make_config(checkpoint), make_adapter(checkpoint)
    return make_config(checkpoint), make_video_adapter(checkpoint, kind)


@pytest.mark.parametrize("kind", ["t2i", "t2v", "2b-480p", "2b-720p"])
@torch.no_grad()
def test_every_decoding_keeps_size_and_length_of_previews(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(decoding, "TILE", 64)
    monkeypatch.setattr(decoding, "OVERLAP", 32)
    config, adapter = family(kind, tmp_path)
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode([TextRequest("a red ball")])[0]
    transformer = adapter.load_transformer(torch.float32).eval()
    length = 1 if kind == "t2i" else 9
    preview = PreviewRequest(embeds, embeds, 96, 64, 2, 1.0, 5, num_frames=length)
    stock = adapter.load_preview_pipeline(transformer, CPU, None).render(preview)

    rendered = {}
    for decoding_mode in ("whole", "strips", "tiles"):
        change = {"validation_decoding": decoding_mode}
        validation = config.validation.model_copy(update=change)
        renderer = Renderer(RenderSettings(validation, config.offload))
        frames = renderer.open(adapter, transformer, CPU).render(preview)
        assert [frame.size for frame in frames] == [(96, 64)] * length
        rendered[decoding_mode] = np.stack([np.asarray(frame) for frame in frames]).astype(int)

    whole = rendered["whole"]
    assert (whole == np.stack(stock)).all(), "byte for byte"
    assert abs(rendered["strips"] - whole).max() <= 1
    assert abs(rendered["tiles"] - whole).max() > 1


@pytest.mark.slow(1)
@pytest.mark.parametrize("task", ["t2i", "i2i", "i2v", "nabla"])
@torch.no_grad()
def test_batched_guidance_equals_two_passes(
    tmp_path: Path, i2i_checkpoint: Path, task: str
) -> None:
    """Up to rounding, with half the calls; prompts of unequal lengths are padded and masked."""
    kind: Any = "t2v" if task == "nabla" else task
    source = picture(96, 64) if task in ("i2i", "i2v") else None
    checkpoint = i2i_checkpoint
    if task != "i2i":
        checkpoint = make_checkpoint(tmp_path, kind, nabla=task == "nabla")
    make = make_adapter if kind in ("t2i", "i2i") else make_video_adapter
    adapter: Any = make(checkpoint, kind)
    in_prompt = source if task == "i2i" else None
    texts = [
        TextRequest("a red ball", in_prompt),
        TextRequest("blurry, cropped, ugly: all that is not wanted", in_prompt),
    ]
    embeds, negative = adapter.load_text_encoder(CPU, torch.float32).encode(texts)
    transformer = adapter.load_transformer(torch.float32).eval()
    stock = adapter.load_preview_pipeline(transformer, CPU, None)
    batch_sizes: list[int] = []
    transformer.visual_transformer_blocks[0].register_forward_pre_hook(
        lambda _, inputs: batch_sizes.append(len(inputs[0]))
    )
    width, height = (128, 128) if task == "nabla" else (96, 64)
    frames = 1 if kind[-1] == "i" else 5
    preview = PreviewRequest(
        embeds, negative, width, height, 3, 4.0, 5, source=source, num_frames=frames
    )
    in_turn = stock.render(preview)
    batched = stock.render(replace(preview, batched=True))

    assert batch_sizes == [1] * 6 + [2] * 3, "three steps"
    assert "forward" not in vars(transformer), "the forward is restored"
    for expected, frame in zip(in_turn, batched, strict=True):
        difference = np.asarray(frame, dtype=int) - np.asarray(expected, dtype=int)
        assert abs(difference).max() <= 1
    unguided = replace(preview, guidance_scale=1.0)
    assert stock.render(replace(unguided, batched=True)) == stock.render(unguided)


def test_cached_latents_do_not_depend_on_the_decoding_of_previews(workspace: Workspace) -> None:
    def entries() -> dict[Path, int]:
        """Times of modification of the cache entries."""
        paths = workspace.path("cache").rglob("*.safetensors*")
        return {path: path.stat().st_mtime_ns for path in paths}

    assert workspace.run("cache", "fill", "validation_decoding=whole") == 0
    filled = entries()

    assert workspace.run("cache", "fill", "validation_decoding=tiles") == 0

    assert filled
    assert entries() == filled


def test_a_preview_size_that_the_stock_pipeline_rounds_is_warned_about() -> None:
    published = KANDINSKY5_IMAGE.flavours[0].repository

    def warnings(*sizes: Size, checkpoint: str = published, **settings: Any) -> list[str]:
        config = make_config(Path(checkpoint), **settings)
        flavour = KANDINSKY5_IMAGE.flavours[0]
        problems = found_by(KANDINSKY5_IMAGE.checks.sizes, config, flavour, sizes, {})
        assert not any(problem.fatal for problem in problems)
        return [str(problem) for problem in problems]

    assert warnings(Size(1024, 1024), Size(896, 1152)) == []
    (message,) = warnings(Size(1024, 1024), Size(768, 768))
    start = "validation_resolution: the stock pipeline cannot repeat previews of 768x768: "
    assert message.startswith(start)
    assert "resolutions" in message
    assert warnings(Size(768, 768), checkpoint="models/tiny") == [], (
        "a checkpoint of another name may support other sizes"
    )
    assert warnings(Size(768, 768), validation_disable=True) == []


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(
    "pipeline_scheduler",
    [
        FlowMatchEulerDiscreteScheduler(shift=5.0),
        DPMSolverMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0
        ),
    ],
)
def test_every_solver_samples_along_the_straight_path(name: str, pipeline_scheduler: Any) -> None:
    """With a model that predicts noise - z, all end at z, by the same shifted sigmas as Euler."""
    noise, z = torch.randn(2, 1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    euler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    euler.set_timesteps(8)

    scheduler = with_solver(pipeline_scheduler, name)

    scheduler.set_timesteps(8)
    latents = noise
    for timestep in scheduler.timesteps:
        latents = scheduler.step(noise - z, timestep, latents, return_dict=False)[0]
    assert (latents - z).abs().max() < 0.005, "multi-step solvers start just below sigma 1"
    # diffusers' classes end their grids differently. Without a shift, the fourth sigma is 0.625.
    start = slice(0, 4)
    assert (scheduler.sigmas[start] - euler.sigmas[start]).abs().max() < 0.03


def test_the_default_solver_is_the_pipelines_scheduler() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=5.0)

    assert with_solver(scheduler, None) is scheduler
    assert with_solver(scheduler, "euler") is scheduler
