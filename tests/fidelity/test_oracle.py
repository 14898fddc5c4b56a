"""With a model that answers `noise - z` the training loss is 0 and the stock pipeline lands on z:
signs, scales, time direction and layout of both sides agree."""

from __future__ import annotations

from pathlib import Path
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


@pytest.mark.parametrize("task", ["t2i", "i2i"])
def test_an_oracle_samples_the_clean_latents(
    task: str, t2i_checkpoint: Path, i2i_checkpoint: Path
) -> None:
    adapter = make_adapter({"t2i": t2i_checkpoint, "i2i": i2i_checkpoint}[task], task)
    source = picture(*SIZE, seed=3) if task == "i2i" else None
    embeds = adapter.load_text_encoder(CPU, torch.float32).encode([TextRequest("a star", source)])
    encoder = adapter.load_latent_encoder(CPU, torch.float32)
    latents = encoder.encode(to_pixels(np.array(picture(*SIZE)))[None], [4])
    transformer = adapter.load_transformer(torch.float32)

    # Training: the oracle knows this batch's noise.
    batch = Batch(latents, embeds, ["x"], condition=latents if source else None)
    noise = sample_noise(latents, [torch.Generator().manual_seed(1)])
    sigmas = sample_sigmas(Place(2, 0, 0, range(1), 1), FlowConfig(), 1.0)
    noisy = make_noisy(batch, sigmas, noise)
    target = (noise - latents).permute(0, 2, 3, 4, 1)
    Recorder(transformer, lambda inputs: target)
    loss = diffusion_loss(adapter.predict(transformer, noisy), noisy, LossConfig())
    assert loss.item() == 0.0

    # Sampling: the oracle infers z's velocity from where the pipeline is.
    clean = latents.permute(0, 2, 3, 4, 1)

    def velocity(inputs: dict[str, Any]) -> torch.Tensor:
        sigma = inputs["timestep"].view(-1, 1, 1, 1, 1) / 1000
        return (inputs["hidden_states"][..., :16] - clean) / sigma

    Recorder(transformer, velocity)
    pipeline = adapter.load_preview_pipeline(transformer, CPU, None)
    landed: list[torch.Tensor] = []
    decode = pipeline.vae.decode
    pipeline.vae.decode = lambda z, **kwargs: (landed.append(z), decode(z, **kwargs))[1]
    request = PreviewRequest(
        embeds[0],
        embeds[0],
        *SIZE,
        num_inference_steps=7,
        guidance_scale=3.0,
        seed=9,
        source=source,
    )
    assert pipeline.render(request)[0].size == SIZE
    ours = latents[:, :, 0] / adapter_scaling(pipeline)
    error = (landed[-1] - ours).norm() / ours.norm()
    assert error < limit(SAMPLING)


def adapter_scaling(pipeline: Any) -> float:
    scaling: float = pipeline.vae.config.scaling_factor
    assert pipeline.vae.config.shift_factor != 0, (
        "a shift that is not 0 shows that it is not applied"
    )
    return scaling
