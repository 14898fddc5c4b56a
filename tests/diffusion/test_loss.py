"""Losses in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from simpletuner.config.loss import LossConfig
from simpletuner.config.option import options_of
from simpletuner.diffusion.batch import Batch, NoisyBatch
from simpletuner.diffusion.flow import diffusion_loss, huber_scales, make_noisy

OPTIONS = options_of(LossConfig)
KINDS = OPTIONS["loss_type"].choices


def noisy_batch(sigmas: list[float], loss_mask: Tensor | None = None) -> NoisyBatch:
    count = len(sigmas)
    latents = torch.zeros(count, 4, 1, 2, 3)
    batch = Batch(latents=latents, embeds=[{}] * count, names=[""] * count, loss_mask=loss_mask)
    return make_noisy(batch, torch.tensor(sigmas), torch.zeros_like(latents))


def constant_error(errors: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(errors, dtype=dtype).view(-1, 1, 1, 1, 1).expand(-1, 4, 1, 2, 3)


def test_l2_is_one_mean_per_sample_in_float32() -> None:
    loss = diffusion_loss(
        constant_error([0.5, -2.0], torch.bfloat16), noisy_batch([0.1, 0.9]), LossConfig()
    )

    assert loss.dtype == torch.float32
    assert loss.tolist() == [0.25, 4.0]


def test_a_perfect_prediction_has_no_loss() -> None:
    batch = Batch(latents=torch.randn(2, 4, 1, 2, 3), embeds=[{}] * 2, names=[""] * 2)
    noisy = make_noisy(batch, torch.rand(2), torch.randn(2, 4, 1, 2, 3))

    for kind in KINDS:
        loss = diffusion_loss(noisy.target, noisy, LossConfig(loss_type=kind))
        assert loss.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_keys_of_huber_require_the_kinds_that_read_them(kind: str) -> None:
    losses = []
    for scale in (0.1, 1.0):
        config = LossConfig(loss_type=kind, huber_schedule="constant", huber_c=scale)
        losses.append(float(diffusion_loss(constant_error([0.5]), noisy_batch([0.5]), config)))

    is_read = losses[0] != losses[1]

    assert OPTIONS["huber_c"].has_effect({"loss_type": kind}) == is_read
    assert OPTIONS["huber_schedule"].has_effect({"loss_type": kind}) == is_read


@pytest.mark.parametrize("error", [1e-4, 0.1, 3.0])
def test_huber_and_smooth_l1_in_closed_form(error: float) -> None:
    c = 0.1
    noisy = noisy_batch([0.5])
    huber_config = LossConfig(loss_type="huber", huber_schedule="constant", huber_c=c)
    smooth_config = huber_config.model_copy(update={"loss_type": "smooth_l1"})

    huber = diffusion_loss(constant_error([error]), noisy, huber_config)
    smooth = diffusion_loss(constant_error([error]), noisy, smooth_config)

    rise = math.sqrt(error**2 + c**2) - c

    assert float(huber) == pytest.approx(2 * c * rise, rel=1e-5)
    assert float(smooth) == pytest.approx(2 * rise, rel=1e-5)


def test_huber_is_quadratic_for_small_errors_and_linear_for_large_ones() -> None:
    config = LossConfig(loss_type="huber", huber_schedule="constant", huber_c=0.5)
    losses = diffusion_loss(constant_error([1e-4, 1e4]), noisy_batch([0.5, 0.5]), config)

    small, large = losses.tolist()
    assert small == pytest.approx(1e-8, rel=1e-4)
    assert large == pytest.approx(2 * 0.5 * 1e4, rel=1e-3)


def test_the_schedules_of_the_huber_scale_in_closed_form() -> None:
    sigmas = torch.tensor([0.0, 0.5, 1.0])

    def scales(schedule: str) -> list[float]:
        return huber_scales(sigmas, LossConfig(huber_schedule=schedule, huber_c=0.01)).tolist()

    assert scales("constant") == pytest.approx([0.01, 0.01, 0.01])
    assert scales("exponential") == pytest.approx([1.0, 0.1, 0.01])  # 0.01 ** sigma
    # (1 - 0.01) (1 - sigma)² + 0.01
    assert scales("snr") == pytest.approx([1.0, 0.99 / 4 + 0.01, 0.01])


def test_every_sample_has_the_huber_scale_of_its_sigma() -> None:
    config = LossConfig(loss_type="smooth_l1", huber_schedule="exponential", huber_c=0.01)
    losses = diffusion_loss(constant_error([1.0, 1.0]), noisy_batch([0.5, 1.0]), config)

    scales = (0.1, 0.01)  # 0.01 ** sigma
    expected = [2 * (math.sqrt(1 + scale**2) - scale) for scale in scales]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_mask_weighs_positions() -> None:
    mask = torch.zeros(2, 1, 1, 2, 3)
    mask[0, 0, 0, 0, 0] = 1.0
    mask[0, 0, 0, 1, 2] = 0.5
    error = torch.randn(2, 4, 1, 2, 3)

    loss = diffusion_loss(error, noisy_batch([0.5, 0.5], mask), LossConfig())

    squares = error[0, :, 0].square()
    weighed = squares[:, 0, 0].sum() + 0.5 * squares[:, 1, 2].sum()
    positions = 4 * 2 * 3  # the mean is over all of them
    assert float(loss[0]) == pytest.approx(float(weighed / positions), rel=1e-5)
    assert float(loss[1]) == 0.0


def test_a_mask_of_ones_changes_no_bit() -> None:
    error = torch.randn(2, 4, 1, 2, 3)

    masked = noisy_batch([0.5, 0.5], torch.ones(2, 1, 1, 2, 3))

    plain = noisy_batch([0.5, 0.5])
    expected = diffusion_loss(error, plain, LossConfig())
    assert torch.equal(diffusion_loss(error, masked, LossConfig()), expected)


def test_masked_positions_get_no_gradient() -> None:
    mask = torch.zeros(1, 1, 1, 2, 3)
    mask[..., 0, 1] = 1
    prediction = torch.randn(1, 4, 1, 2, 3, requires_grad=True)
    for kind in KINDS:
        config = LossConfig(loss_type=kind)
        loss = diffusion_loss(prediction, noisy_batch([0.5], mask), config)
        (gradient,) = torch.autograd.grad(loss.sum(), prediction)
        has_gradient = (gradient != 0).all(dim=1).squeeze()
        assert has_gradient.tolist() == [[False, True, False], [False, False, False]]
