"""A technique deals the noise before offsets are added, and equally ahead of a step and in it."""

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
    for sample, own in zip(batch.latents, noise, strict=True):
        nearer.append(own if float((own * sample).sum()) >= 0 else -own)
    return torch.stack(nearer)


def test_noise_is_dealt_before_its_offset_is_added(t2i_checkpoint: Path, batch: Batch) -> None:
    assembly = make_assembly(t2i_checkpoint, Facing(FacingSpec()), noise_offset=0.5)
    place = assembly.noise.place(4, 2, 0)
    drawn = sample_noise(batch.latents, place.generators("noise"))

    noisy = assembly.noise.add(batch, 2, 0)

    dealt = facing(batch, drawn)

    assert not torch.equal(dealt, drawn)

    offset = noisy.noise - dealt  # one number per sample and channel
    assert offset.abs().max() > 0.1
    assert (offset - offset[..., :1, :1, :1]).abs().max() < 1e-6


def test_noise_dealt_ahead_equals_that_of_the_step(t2i_checkpoint: Path, batch: Batch) -> None:
    assembly = make_assembly(t2i_checkpoint, Facing(FacingSpec()), gradient_accumulation_steps=2)

    ahead = assembly.noise.draw_ahead(batch, number=5)

    assert ahead.noise is not None

    assert torch.equal(ahead.noise, assembly.noise.add(batch, 2, 1).noise)
