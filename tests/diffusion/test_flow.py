"""Sigmas follow their distributions, the shift its formula, and batches the flow's definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from simpletuner.config.loss import LossConfig
from simpletuner.config.schema import FlowConfig
from simpletuner.diffusion.batch import Batch
from simpletuner.diffusion.flow import (
    beta_cdf,
    beta_quantile,
    choose_shift,
    law_quantiles,
    make_noisy,
    sample_noise,
    sample_sigmas,
    shift_sigmas,
)
from simpletuner.diffusion.seeds import Place
from simpletuner.models.spec import AutoShift
from tests.tools.tolerances import ELEMENTWISE, assert_close

DISTRIBUTIONS = {
    "logit_normal": FlowConfig(),
    "wide": FlowConfig(flow_sigmoid_scale=2.5),
    "uniform": FlowConfig(flow_use_uniform_schedule=True),
    "beta": FlowConfig(
        flow_use_beta_schedule=True, flow_beta_schedule_alpha=2, flow_beta_schedule_beta=3
    ),
}


def places(group: int) -> Iterator[Place]:
    """The micro-batches of one process, step by step."""
    return (Place(5, step, 0, range(group), group) for step in itertools.count())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def cdf(name: str, sigmas: Tensor) -> Tensor:
    """A distribution function, written down independently of the sampler."""
    s = sigmas.double()
    if name == "uniform":
        return s
    if name == "beta":  # Beta(2, 3) has the density 12 s (1 - s)^2
        return 6 * s**2 - 8 * s**3 + 3 * s**4
    scale = 2.5 if name == "wide" else 1.0
    return normal_cdf(torch.log(s / (1 - s)) / scale)


# A quantile takes half a millisecond, and both shifts need the same ones.
cached_quantile = cache(beta_quantile)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("segmented", [True, False])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sigmas_follow_their_distribution(
    monkeypatch: pytest.MonkeyPatch, name: str, segmented: bool, shift: float
) -> None:
    """By the Kolmogorov-Smirnov distance of 100 batches of 40."""
    monkeypatch.setattr("simpletuner.diffusion.flow.beta_quantile", cached_quantile)
    change = {"disable_segmented_timestep_sampling": not segmented}
    flow = DISTRIBUTIONS[name].model_copy(update=change)

    batches = [sample_sigmas(place, flow, shift) for place in itertools.islice(places(40), 100)]

    sigmas = torch.cat(batches)
    unshifted = sigmas / (shift - (shift - 1) * sigmas)
    shares = cdf(name, unshifted).sort().values
    distance = (shares - torch.linspace(0, 1, len(shares), dtype=torch.float64)).abs().max()
    assert distance < 0.03  # by chance, 4000 draws exceed it once in a thousand tries


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_segmented_batch_has_one_sample_in_each_slice_in_shuffled_order(name: str) -> None:
    orders = set()
    for place in itertools.islice(places(8), 20):
        sigmas = sample_sigmas(place, DISTRIBUTIONS[name], 1.0)
        slices = (cdf(name, sigmas) * 8).floor().int().tolist()
        assert sorted(slices) == list(range(8))
        orders.add(tuple(slices))

    assert len(orders) > 15


def test_independent_draws_may_share_slices() -> None:
    flow = FlowConfig(disable_segmented_timestep_sampling=True, flow_use_uniform_schedule=True)

    sigmas = sample_sigmas(next(places(8)), flow, 1.0)

    slices = (sigmas * 8).floor()
    assert len(set(slices.tolist())) < 8


def test_a_position_of_a_segmented_batch_follows_the_whole_distribution() -> None:
    flow = DISTRIBUTIONS["uniform"]

    batches = [sample_sigmas(place, flow, 1.0) for place in itertools.islice(places(4), 2000)]

    first = torch.stack([sigmas[0] for sigmas in batches])
    distance = (first.sort().values - torch.linspace(0, 1, 2000)).abs().max()
    assert distance < 0.05


def beta_schedule(alpha: float, beta: float) -> FlowConfig:
    return FlowConfig(
        flow_use_beta_schedule=True, flow_beta_schedule_alpha=alpha, flow_beta_schedule_beta=beta
    )


@pytest.mark.parametrize(
    "flow",
    [
        FlowConfig(flow_sigmoid_scale=100.0),
        FlowConfig(flow_use_uniform_schedule=True),
        beta_schedule(0.01, 0.01),
        beta_schedule(300, 0.5),
    ],
)
@pytest.mark.parametrize("shift", [1e-9, 1.0, 1e9])
def test_sigmas_stay_between_0_and_1(flow: FlowConfig, shift: float) -> None:
    sigmas = sample_sigmas(next(places(200)), flow, shift)

    assert sigmas.dtype == torch.float32
    assert sigmas.shape == (200,)
    assert torch.isfinite(sigmas).all()
    assert (sigmas > 0).all()
    assert (sigmas <= 1).all()


def test_a_draw_of_exactly_0_gives_a_positive_sigma(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(size: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    monkeypatch.setattr(torch, "rand", zeros)

    for flow in DISTRIBUTIONS.values():
        sigmas = sample_sigmas(next(places(1)), flow, 1.0)
        assert 0 < float(sigmas) < 1e-5


def test_an_offset_moves_the_logits_and_0_changes_no_bit() -> None:
    place = next(places(8))
    flow = DISTRIBUTIONS["wide"]
    shares = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    plain = law_quantiles(shares, flow)
    moved = law_quantiles(shares, flow, offset=0.7)

    difference = torch.logit(moved) - torch.logit(plain)
    assert_close(difference, torch.full_like(shares, 0.7), terms=ELEMENTWISE)
    sigmas = sample_sigmas(place, flow, 1.0)
    assert (sample_sigmas(place, flow, 1.0, offset=0.7) > sigmas).all()
    assert torch.equal(sample_sigmas(place, flow, 1.0, offset=0.0), sigmas)


def test_a_share_of_the_samples_has_the_noise_offset() -> None:
    """The draws of the samples decide whether they get the offset, not what it is."""
    batch = Batch(torch.zeros(64, 2, 1, 4, 4), [], [""] * 64)
    place = next(places(64))

    def noise_with_probability(probability: float) -> Tensor:
        loss = LossConfig(noise_offset=0.5, noise_offset_probability=probability)
        noise = torch.zeros_like(batch.latents)
        return make_noisy(batch, torch.ones(64), noise, loss, place=place).noise

    always, half, never = map(noise_with_probability, (1.0, 0.5, 0.0))

    assert not never.any()
    shifted = half.flatten(1).any(1)
    assert 16 < int(shifted.sum()) < 48
    assert torch.equal(half[shifted], always[shifted])


def test_input_perturbation_falls_in_a_straight_line() -> None:
    loss = LossConfig(input_perturbation=0.2, input_perturbation_steps=10)

    assert [loss.input_perturbation_at(step) for step in (0, 5, 10, 11)] == [0.2, 0.1, 0.0, 0.0]
    assert LossConfig(input_perturbation=0.2).input_perturbation_at(99) == 0.2


def test_the_shift_of_sigmas_in_closed_form() -> None:
    sigmas = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)

    assert torch.equal(shift_sigmas(sigmas, 1.0), sigmas)
    assert shift_sigmas(sigmas, 3.0).tolist() == [0.0, 0.5, 0.75, 1.0]


def test_auto_shift_is_constant_outside_its_points() -> None:
    assert AutoShift()(256) == AutoShift()(1) == pytest.approx(math.exp(0.5))
    assert AutoShift()(4096) == AutoShift()(90000) == pytest.approx(math.exp(1.15))
    half_way = (256 + 4096) // 2
    assert AutoShift()(half_way) == pytest.approx(math.exp((0.5 + 1.15) / 2))


def test_an_explicit_shift_overrides_auto_shift() -> None:
    both = FlowConfig(flow_schedule_shift=2.0, flow_schedule_auto_shift=True)

    def shift(flow: FlowConfig, *, is_explicit: bool) -> float:
        return choose_shift(flow, 4096, AutoShift(), shift_is_explicit=is_explicit)

    assert shift(both, is_explicit=True) == 2.0
    assert shift(both, is_explicit=False) == pytest.approx(math.exp(1.15))


def test_without_auto_shift_the_configured_shift_or_1_is_used() -> None:
    configured = FlowConfig(flow_schedule_shift=5.0)

    assert choose_shift(configured, 4096, AutoShift(), shift_is_explicit=False) == 5.0
    assert choose_shift(FlowConfig(), 4096, AutoShift(), shift_is_explicit=False) == 1.0


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2, 2), (0.5, 0.5), (3, 1), (1, 4)])
def test_beta_distribution_in_closed_form(alpha: float, beta: float) -> None:
    closed = {
        (1, 1): lambda x: x,
        (2, 2): lambda x: 3 * x**2 - 2 * x**3,
        (0.5, 0.5): lambda x: 2 / math.pi * math.asin(math.sqrt(x)),
        (3, 1): lambda x: x**3,
        (1, 4): lambda x: 1 - (1 - x) ** 4,
    }[alpha, beta]
    for x in (0.0, 1e-4, 0.1, 0.37, 0.5, 0.81, 0.999, 1.0):
        assert beta_cdf(x, alpha, beta) == pytest.approx(closed(x), abs=1e-13)
        # At the ends the density can vanish, and many x have the same share to the last digit.
        if 0.05 < x < 0.95:
            assert beta_quantile(closed(x), alpha, beta) == pytest.approx(x, abs=1e-12)


def batch(shape: tuple[int, ...] = (2, 4, 1, 6, 5), dtype: torch.dtype = torch.float32) -> Batch:
    latents = torch.randn(shape, generator=generator(9)).to(dtype)
    return Batch(latents=latents, embeds=[{} for _ in range(shape[0])], names=["a"] * shape[0])


def test_a_noisy_batch_is_the_definition_of_the_flow() -> None:
    clean = batch()
    noise = sample_noise(clean.latents, [generator()] * 2)
    sigmas = torch.tensor([0.25, 1.0])
    noisy = make_noisy(clean, sigmas, noise)

    assert torch.equal(noisy.noisy_latents[0], 0.75 * clean.latents[0] + 0.25 * noise[0])
    assert torch.equal(noisy.noisy_latents[1], noise[1])
    assert torch.equal(noisy.target, noise - clean.latents)
    assert torch.equal(noisy.timesteps, torch.tensor([250.0, 1000.0]))
    assert noisy.batch is clean


def test_everything_is_float32_even_from_bf16_latents() -> None:
    sigmas = torch.rand(2, dtype=torch.float64)

    noisy = make_noisy(batch(dtype=torch.bfloat16), sigmas, torch.randn(2, 4, 1, 6, 5))

    tensors = (noisy.noise, noisy.sigmas, noisy.noisy_latents, noisy.timesteps, noisy.target)
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


def test_the_true_velocity_leads_back_to_the_latents() -> None:
    noise = sample_noise(batch().latents, [generator()] * 2)
    noisy = make_noisy(batch(), torch.tensor([0.3, 0.9]), noise)

    back = noisy.noisy_latents - noisy.sigmas.view(-1, 1, 1, 1, 1) * noisy.target

    assert_close(back, batch().latents, terms=ELEMENTWISE)


def test_input_perturbation_changes_the_input_only() -> None:
    clean = batch((1, 8, 1, 64, 64))
    noise = sample_noise(clean.latents, [generator()])
    sigmas = torch.tensor([0.5])
    loss = LossConfig(input_perturbation=0.1)

    plain = make_noisy(clean, sigmas, noise)
    perturbed = make_noisy(clean, sigmas, noise, loss, place=next(places(1)))

    assert torch.equal(perturbed.target, plain.target)
    added = perturbed.noisy_latents - plain.noisy_latents
    assert float(added.std()) == pytest.approx(0.5 * 0.1, rel=0.02)
    assert float(added.mean()) == pytest.approx(0, abs=1e-3)


def test_noise_offset_shifts_each_channel_in_input_and_target_alike() -> None:
    clean = batch((2, 4, 3, 6, 5))
    noise = sample_noise(clean.latents, [generator()] * 2)
    sigmas = torch.tensor([0.5, 0.5])
    place = next(places(2))

    plain = make_noisy(clean, sigmas, noise)
    offset = make_noisy(clean, sigmas, noise, LossConfig(noise_offset=0.2), place=place)

    draws = [
        torch.randn(4, 1, 1, 1, generator=generator)
        for generator in place.generators("perturbation")
    ]
    shift = 0.2 * torch.stack(draws)
    assert_close(offset.target, plain.target + shift, terms=ELEMENTWISE)
    assert_close(offset.noisy_latents, plain.noisy_latents + 0.5 * shift, terms=ELEMENTWISE)


def test_extra_noise_without_a_position_in_the_run_is_refused() -> None:
    sigmas = torch.tensor([0.5, 0.5])
    noise = torch.zeros(2, 4, 1, 6, 5)

    with pytest.raises(ValueError, match="position in the run"):
        make_noisy(batch(), sigmas, noise, LossConfig(noise_offset=0.1))
