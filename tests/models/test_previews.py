"""Sizes and source pictures of previews: fitted as training fits them, and a hint where the stock
pipeline differs.
"""

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
    assert sample.fitted(Size(64, 64)) is sample, "a crop of its own stays"
    assert sample.fitted(Size(128, 64)).geometry == Geometry(
        "1.0", Size(128, 64), Size(192, 64), (32, 0)
    )
    assert sample.fitted(Size(128, 128)).geometry == Geometry(
        "1.0", Size(128, 128), Size(384, 128), (128, 0)
    )


@pytest.mark.parametrize("task", ["i2i", "i2v"])
def test_a_source_of_another_ratio_is_cropped(
    tmp_path: Path, i2i_checkpoint: Path, task: str
) -> None:
    """The stock pipelines would stretch it."""
    if task == "i2i":
        adapter: Any = make_adapter(i2i_checkpoint, task)
    else:
        adapter = make_video_adapter(make_checkpoint(tmp_path / "i2v", "i2v"), task)
    source = picture(64, 192)
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode(
        [TextRequest("", source if task == "i2i" else None)]
    )[0]
    stock = adapter.load_preview_pipeline(adapter.load_transformer(torch.float32).eval(), CPU, None)
    processor = getattr(stock.pipeline, "image_processor" if task == "i2i" else "video_processor")
    seen = []
    preprocess = processor.preprocess
    processor.preprocess = lambda image, **size: (
        seen.append(image.size),
        preprocess(image, **size),
    )[1]
    preview = PreviewRequest(embeds, embeds, 96, 64, 1, 1.0, 5, source=source, num_frames=17)
    with torch.no_grad():
        assert {frame.size for frame in stock.render(preview)} == {(96, 64)}
    assert seen == [(96, 64)]


def family(kind: str, folder: Path) -> tuple[RunConfig, FamilyAdapter]:
    """The config and the adapter of a tiny checkpoint of Flux's, HunyuanVideo's, Wan's or LTX-2's
    VAE.
    """
    if kind in ("2b-480p", "2b-720p"):
        checkpoint = make_sana_checkpoint(folder, flavour=kind)
        return make_sana_config(checkpoint), make_sana_adapter(checkpoint)
    checkpoint = make_checkpoint(folder, kind)
    adapter: Any = (
        make_adapter(checkpoint) if kind == "t2i" else make_video_adapter(checkpoint, kind)
    )
    return make_config(checkpoint), adapter


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
    found = {}
    for how in ("whole", "strips", "tiles"):
        validation = config.validation.model_copy(update={"validation_decoding": how})
        renderer = Renderer(RenderSettings(validation, config.offload))
        frames = renderer.open(adapter, transformer, CPU).render(preview)
        assert [frame.size for frame in frames] == [(96, 64)] * length
        found[how] = np.stack([np.asarray(frame) for frame in frames]).astype(int)
    assert (found["whole"] == np.stack(stock)).all(), "byte for byte"
    assert abs(found["strips"] - found["whole"]).max() <= 1
    assert abs(found["tiles"] - found["whole"]).max() > 1


@pytest.mark.slow(1)
@pytest.mark.parametrize("task", ["t2i", "i2i", "i2v", "nabla"])
@torch.no_grad()
def test_batched_guidance_equals_two_passes(
    tmp_path: Path, i2i_checkpoint: Path, task: str
) -> None:
    """Half the calls, and the same picture but for rounding; prompts of unequal lengths are padded
    and masked.
    """
    kind = "t2v" if task == "nabla" else task
    source = picture(96, 64) if task in ("i2i", "i2v") else None
    checkpoint = (
        i2i_checkpoint if task == "i2i" else make_checkpoint(tmp_path, kind, nabla=task == "nabla")
    )
    adapter: Any = (make_adapter if kind in ("t2i", "i2i") else make_video_adapter)(
        checkpoint, kind
    )
    seen = source if task == "i2i" else None
    texts = [
        TextRequest("a red ball", seen),
        TextRequest("blurry, cropped, ugly: all that is not wanted", seen),
    ]
    embeds, negative = adapter.load_text_encoder(CPU, torch.float32).encode(texts)
    transformer = adapter.load_transformer(torch.float32).eval()
    stock = adapter.load_preview_pipeline(transformer, CPU, None)
    sizes: list[int] = []
    transformer.visual_transformer_blocks[0].register_forward_pre_hook(
        lambda _, inputs: sizes.append(len(inputs[0]))
    )
    width, height = (128, 128) if task == "nabla" else (96, 64)
    frames = 1 if kind[-1] == "i" else 5
    preview = PreviewRequest(
        embeds, negative, width, height, 3, 4.0, 5, source=source, num_frames=frames
    )
    alone = stock.render(preview)
    together = stock.render(replace(preview, batched=True))
    assert sizes == [1] * 6 + [2] * 3
    assert "forward" not in vars(transformer), "no trace is left"
    for one, other in zip(alone, together, strict=True):
        assert abs(np.asarray(one, dtype=int) - np.asarray(other, dtype=int)).max() <= 1
    plain = replace(preview, guidance_scale=1.0)
    assert stock.render(replace(plain, batched=True)) == stock.render(plain), "there is one branch"


def test_cached_latents_do_not_depend_on_the_decoding_of_previews(workspace: Workspace) -> None:
    def entries() -> dict[Path, int]:
        folder = workspace.path("cache")
        return {
            path: path.stat().st_mtime_ns
            for path in folder.rglob("*")
            if ".safetensors" in path.name
        }

    seen = []
    for how in ("whole", "tiles"):
        assert workspace.run("cache", "fill", f"validation_decoding={how}") == 0
        seen.append(entries())
    assert seen[0]
    assert seen[0] == seen[1]


def test_a_preview_size_that_the_stock_pipeline_rounds_is_warned_about() -> None:
    published = KANDINSKY5_IMAGE.flavours[0].repository

    def told(*sizes: tuple[int, int], checkpoint: str = published, **settings: Any) -> list[str]:
        config = make_config(Path(checkpoint), **settings)
        found = found_by(
            KANDINSKY5_IMAGE.checks.sizes,
            config,
            KANDINSKY5_IMAGE.flavours[0],
            [Size(*size) for size in sizes],
            {},
        )
        assert not any(each.fatal for each in found)
        return [str(each) for each in found]

    assert told((1024, 1024), (896, 1152)) == []
    (message,) = told((1024, 1024), (768, 768))
    assert message.startswith(
        "validation_resolution: the stock pipeline cannot repeat previews of 768x768: "
    )
    assert "resolutions" in message
    assert told((768, 768), checkpoint="models/tiny") == [], (
        "of another name, it may have sizes of its own"
    )
    assert told((768, 768), validation_disable=True) == []


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize(
    "own",
    [
        FlowMatchEulerDiscreteScheduler(shift=5.0),
        DPMSolverMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0
        ),
    ],
)
def test_every_solver_samples_along_the_straight_path(name: str, own: Any) -> None:
    """For a model that predicts noise - z, all of them end at z, by the same shifted sigmas as
    Euler.
    """
    noise, z = torch.randn(2, 1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    euler = FlowMatchEulerDiscreteScheduler(shift=5.0)
    scheduler = with_solver(own, name)
    latents = noise
    for each in (euler, scheduler):
        each.set_timesteps(8)
    for timestep in scheduler.timesteps:
        latents = scheduler.step(noise - z, timestep, latents, return_dict=False)[0]
    assert (latents - z).abs().max() < 0.005, "multi-step solvers start just below sigma 1"
    begin = slice(
        0, 4
    )  # diffusers' classes end their grids differently; without a shift the fourth is 0.625
    assert (scheduler.sigmas[begin] - euler.sigmas[begin]).abs().max() < 0.03


def test_the_default_solver_is_the_pipelines_scheduler() -> None:
    own = FlowMatchEulerDiscreteScheduler(shift=5.0)
    assert with_solver(own, None) is own
    assert with_solver(own, "euler") is own
