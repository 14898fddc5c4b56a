"""A technique chooses the noise before offsets are added, ahead of a step as within it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from simpletuner.diffusion.batch import Batch
from simpletuner.diffusion.flow import sample_noise
from tests.techniques.facing import Facing, FacingSpec
from tests.tools.assembly import make_assembly, make_batch


@pytest.fixture(scope="module")
def batch(t2i_checkpoint: Path) -> Batch:
    return make_batch(t2i_checkpoint, ["a", "b", "c", "d"], side=8)


def facing(batch: Batch, noise: Tensor) -> Tensor:
    """The noise of each sample, or its opposite if that is nearer to the sample."""
    nearer = []
    for latent, drawn in zip(batch.latents, noise, strict=True):
        is_near = float((drawn * latent).sum()) >= 0
        nearer.append(drawn if is_near else -drawn)
    return torch.stack(nearer)


def test_a_technique_chooses_the_noise_before_its_offset_is_added(
    t2i_checkpoint: Path, batch: Batch
) -> None:
    assembly = make_assembly(t2i_checkpoint, Facing(FacingSpec()), noise_offset=0.5)
    place = assembly.noise.place(4, 2, 0)
    drawn = sample_noise(batch.latents, place.generators("noise"))

    noisy = assembly.noise.add(batch, 2, 0)

    chosen = facing(batch, drawn)
    assert not torch.equal(chosen, drawn)
    offset = noisy.noise - chosen  # one number per sample and channel
    assert offset.abs().max() > 0.1
    assert (offset - offset[..., :1, :1, :1]).abs().max() < 1e-6


def test_noise_chosen_ahead_equals_that_of_the_step(t2i_checkpoint: Path, batch: Batch) -> None:
    assembly = make_assembly(t2i_checkpoint, Facing(FacingSpec()), gradient_accumulation_steps=2)

    ahead = assembly.noise.draw_ahead(batch, number=5)  # step 2, micro-step 1 of 2

    assert ahead.noise is not None
    assert torch.equal(ahead.noise, assembly.noise.add(batch, 2, 1).noise)
