"""Masked loss: hand-computed weights, and neutral settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from simpletuner.config.loss import LossConfig
from simpletuner.config.techniques.masked_loss import MaskedLossConfig
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import diffusion_loss, hold_first_frame, make_noisy
from simpletuner.diffusion.seeds import Place
from simpletuner.planning.techniques.masked_loss import MaskedLossSpec
from simpletuner.techniques.masked_loss import MaskedLoss
from simpletuner.techniques.tread import Tread
from simpletuner.training import step
from simpletuner.training.losses import Losses
from simpletuner.training.noise import NoiseSource
from simpletuner.training.state import Assembly
from tests.techniques.test_preservation import moved
from tests.tools.assembly import fixed_noise, make_assembly, make_batch, no_forward
from tests.tools.tolerances import ROTATION, distance
from tests.training.test_step import Batches

PLACE = Place(seed=3, global_step=4, micro_step=1, slots=range(2), group=2)
SHAPE = (2, 4, 5, 4, 6)


def half(width: int = 6) -> Tensor:
    """A mask whose left half is white, `1 1 1 1 W`."""
    return (torch.arange(width) < width // 2).float().view(1, 1, 1, 1, -1)


def noisy_batch(mask: Tensor | None, *, i2v: bool = False) -> NoisyBatch:
    """A batch with a constant error of 1 for a prediction of 0."""
    latents = torch.full(SHAPE, -1.0)
    batch = Batch(
        latents, [{}] * 2, ["a", "b"], condition=latents[:, :, :1] if i2v else None, loss_mask=mask
    )
    noisy = make_noisy(batch, torch.tensor([0.5, 0.5]), torch.zeros(SHAPE), place=PLACE)
    return hold_first_frame(noisy) if i2v else noisy


def loss_of(noisy: NoisyBatch, **settings: float) -> list[float]:
    changed = MaskedLoss(MaskedLossSpec(MaskedLossConfig(**settings))).before_forward(
        noisy, no_forward
    )
    losses: list[float] = diffusion_loss(torch.zeros(SHAPE), changed, LossConfig()).tolist()
    return losses


@pytest.mark.parametrize("i2v", [False, True])
def test_half_a_mask_halves_the_loss_unless_normalised(i2v: bool) -> None:
    mask = half().expand(2, 1, 5, 4, 6)
    noisy = noisy_batch(mask, i2v=i2v)

    assert loss_of(noisy) == pytest.approx([0.5, 0.5])
    assert loss_of(noisy, masked_loss_normalise=True) == pytest.approx([1, 1])
    assert loss_of(noisy, masked_loss_floor=0.2) == pytest.approx([0.6, 0.6])
    assert loss_of(noisy, masked_loss_floor=0.2, masked_loss_normalise=True) == pytest.approx(
        [1, 1]
    )
    assert loss_of(noisy, masked_loss_probability=0) == pytest.approx([1, 1])


@pytest.mark.parametrize(
    "settings", [{}, {"masked_loss_normalise": True}, {"masked_loss_prior": 0.5}]
)
def test_unequal_masked_batches_of_a_step_equal_one_batch(
    t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, float]
) -> None:
    """All samples have the same weight, whatever their masks are."""
    monkeypatch.setattr(
        NoiseSource, "add", lambda source, batch, *place: replace(fixed_noise(batch), place=PLACE)
    )
    batch = make_batch(t2i_checkpoint, ["a star", "two blue circles", "a hill", "x"], 8)
    mask = (
        (torch.arange(8) < torch.tensor([2, 8, 5, 1])[:, None])
        .float()
        .view(4, 1, 1, 1, 8)
        .expand(-1, -1, -1, 8, -1)
    )
    whole = replace(batch, loss_mask=mask)
    parts = [
        Batch(
            whole.latents[samples],
            whole.embeds[samples],
            whole.names[samples],
            loss_mask=mask[samples],
        )
        for samples in (slice(3), slice(3, 4))
    ]
    results: list[dict[str, Tensor]] = []
    for window in ([whole], parts):
        technique = MaskedLoss(MaskedLossSpec(MaskedLossConfig(**settings)))
        assembly = moved(
            t2i_checkpoint, technique, gradient_accumulation_steps=len(window), max_grad_norm=0
        )

        def note(*given: object, assembly: Assembly = assembly) -> None:
            results.append(gradients_of(assembly))

        look = assembly.optimizer.register_step_pre_hook(note)
        step.optimizer_step(assembly, Batches(*window), 0)
        look.remove()

    assert max(gradient.abs().max() for gradient in results[0].values()) > 1e-3
    assert distance(results[1], results[0]) < ROTATION


def gradients_of(assembly: Assembly) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in assembly.parameters.items()
        if parameter.grad is not None
    }


def test_the_weight_of_a_tiny_mask_is_limited() -> None:
    mask = torch.zeros(2, 1, 5, 4, 6)
    mask[0, 0, 0, 0, 0] = 1
    assert loss_of(noisy_batch(mask), masked_loss_normalise=True) == pytest.approx(
        [1 / 120 / 0.05, 0]
    )


def test_masks_are_used_in_a_share_of_the_batches() -> None:
    noisy = noisy_batch(half().expand(2, 1, 5, 4, 6))
    places = [replace(PLACE, global_step=number) for number in range(200)]
    losses = [loss_of(replace(noisy, place=place), masked_loss_probability=0.3) for place in places]

    assert {tuple(loss) for loss in losses} == {(0.5, 0.5), (1.0, 1.0)}, (
        "all samples of a batch or none"
    )
    assert 0.2 < sum(loss[0] == 0.5 for loss in losses) / 200 < 0.4
    assert losses == [
        loss_of(replace(noisy, place=place), masked_loss_probability=0.3) for place in places
    ]


def gradients(
    checkpoint: Path, batch: Batch, *techniques: MaskedLoss | Tread
) -> tuple[float, dict[str, Tensor]]:
    """The total loss of one micro-step and the gradients of a LoRA that is not 0."""
    assembly = make_assembly(checkpoint, *techniques)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in assembly.parameters.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    losses = Losses()
    total = step.micro_loss(assembly, step.noisy_batch(assembly, batch, 0, 0), losses)
    total.backward()
    return total.item(), {
        name: parameter.grad
        for name, parameter in assembly.parameters.items()
        if parameter.grad is not None
    }


def test_neutral_masks_equal_plain_training(t2i_checkpoint: Path) -> None:
    batch = make_batch(t2i_checkpoint, ["a star", "a circle"])
    plain = gradients(t2i_checkpoint, batch)
    white = replace(batch, loss_mask=torch.ones(2, 1, 1, 4, 4))
    settings = {"masked_loss_normalise": True, "masked_loss_floor": 0.3}
    cases = [
        (batch, MaskedLossConfig(masked_loss_prior=1.0)),
        (white, MaskedLossConfig(masked_loss_prior=0.0)),
        (white, MaskedLossConfig.model_validate(settings)),
    ]
    for case, config in cases:
        loss, result = gradients(t2i_checkpoint, case, MaskedLoss(MaskedLossSpec(config)))
        assert loss == plain[0]
        assert all(torch.equal(gradient, plain[1][name]) for name, gradient in result.items())


def test_the_prior_keeps_the_base_prediction_in_black_areas(t2i_checkpoint: Path) -> None:
    """The gradient is that of the distance to the base's prediction in the black half."""
    batch = make_batch(t2i_checkpoint, ["a star", "a circle"])
    mask = half(4).expand(2, 1, 1, 4, 4)
    totals = {}
    for weight in (0.0, 1.0, 3.0):
        config = MaskedLossConfig(masked_loss_prior=weight)
        totals[weight], _ = gradients(
            t2i_checkpoint, replace(batch, loss_mask=mask), MaskedLoss(MaskedLossSpec(config))
        )
    prior = totals[1.0] - totals[0.0]

    assert prior > 0
    assert totals[3.0] - totals[0.0] == pytest.approx(3 * prior, rel=1e-4)

    assembly = make_assembly(t2i_checkpoint)  # its LoRA is 0: it predicts what the base does
    noisy = step.noisy_batch(assembly, batch, 0, 0)
    base = step.predict_now(assembly, noisy)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in assembly.parameters.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    distance = (step.predict_now(assembly, noisy) - base).square() * (1 - mask)

    assert prior == pytest.approx(distance.mean().item(), rel=1e-4)
