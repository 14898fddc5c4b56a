"""A model that predicts `noise - z` has a loss of 0, and the stock pipeline samples z with it.

So signs, scales, the direction of time and the layout of both sides agree.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from simpletuner.config.loss import LossConfig
from simpletuner.config.schema import FlowConfig
from simpletuner.diffusion.batch import Batch
from simpletuner.diffusion.flow import diffusion_loss, make_noisy, sample_noise, sample_sigmas
from simpletuner.diffusion.seeds import Place
from simpletuner.encoding.fill import to_pixels
from simpletuner.models.adapter import PreviewRequest, TextRequest
from tests.tools.families import CPU, Recorder, make_adapter, picture
from tests.tools.tolerances import SAMPLING, limit

SIZE = (96, 64)


@pytest.fixture(params=["t2i", "i2i"])
def oracle(
    request: pytest.FixtureRequest, t2i_checkpoint: Path, i2i_checkpoint: Path
) -> SimpleNamespace:
    """An adapter, the latents of a picture, and the embeddings of a prompt."""
    task = request.param
    adapter = make_adapter({"t2i": t2i_checkpoint, "i2i": i2i_checkpoint}[task], task)
    source = picture(*SIZE, seed=3) if task == "i2i" else None
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode([TextRequest("a star", source)])
    encoder = adapter.load_latent_encoder(CPU, torch.float32)
    latents = encoder.encode(to_pixels(np.array(picture(*SIZE)))[None], [4])
    transformer = adapter.load_transformer(torch.float32)
    return SimpleNamespace(
        adapter=adapter, source=source, embeds=embeds, latents=latents, transformer=transformer
    )


def test_an_oracle_has_no_loss(oracle: SimpleNamespace) -> None:
    latents = oracle.latents
    condition = None if oracle.source is None else latents
    batch = Batch(latents, oracle.embeds, ["x"], condition=condition)
    noise = sample_noise(latents, [torch.Generator().manual_seed(1)])
    sigmas = sample_sigmas(Place(2, 0, 0, range(1), 1), FlowConfig(), 1.0)
    noisy = make_noisy(batch, sigmas, noise)
    target = (noise - latents).permute(0, 2, 3, 4, 1)
    Recorder(oracle.transformer, lambda inputs: target)

    loss = diffusion_loss(oracle.adapter.predict(oracle.transformer, noisy), noisy, LossConfig())

    assert loss.item() == 0.0


def test_an_oracle_samples_the_clean_latents(oracle: SimpleNamespace) -> None:
    clean = oracle.latents.permute(0, 2, 3, 4, 1)

    def velocity(inputs: dict[str, Any]) -> torch.Tensor:
        """noise - z, from where the pipeline is: x = z + sigma (noise - z)."""
        sigma = inputs["timestep"].view(-1, 1, 1, 1, 1) / 1000
        return (inputs["hidden_states"][..., :16] - clean) / sigma

    Recorder(oracle.transformer, velocity)
    pipeline = oracle.adapter.load_preview_pipeline(oracle.transformer, CPU, None)
    decoded: list[torch.Tensor] = []
    decode = pipeline.vae.decode

    def noted(z: torch.Tensor, **settings: Any) -> Any:
        decoded.append(z)
        return decode(z, **settings)

    pipeline.vae.decode = noted
    (embeds,) = oracle.embeds
    request = PreviewRequest(
        embeds,
        embeds,
        *SIZE,
        num_inference_steps=7,
        guidance_scale=3.0,
        seed=9,
        source=oracle.source,
    )

    (frame,) = pipeline.render(request)

    assert frame.size == SIZE
    assert pipeline.vae.config.shift_factor != 0, "else it would not show that it is not applied"
    expected = oracle.latents[:, :, 0] / pipeline.vae.config.scaling_factor
    error = (decoded[-1] - expected).norm() / expected.norm()
    assert error < limit(SAMPLING)
