"""Sigmas follow their laws, the shift its formula, and the mix the definition of the flow."""

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

LAWS = {
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
    """The law's distribution function, written down independently of the sampler."""
    s = sigmas.double()
    if name == "uniform":
        return s
    if name == "beta":  # Beta(2, 3) has the density 12 s (1 - s)^2
        return 6 * s**2 - 8 * s**3 + 3 * s**4
    return normal_cdf(torch.log(s / (1 - s)) / (2.5 if name == "wide" else 1.0))


once = cache(beta_quantile)  # which takes half a millisecond; both shifts ask for the same ones


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("segmented", [True, False])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sigmas_follow_their_distribution(
    monkeypatch: pytest.MonkeyPatch, name: str, segmented: bool, shift: float
) -> None:
    """Kolmogorov-Smirnov distance of 4000 draws; 0.03 would be exceeded by chance once in a
    thousand tries.
    """
    monkeypatch.setattr("simpletuner.diffusion.flow.beta_quantile", once)
    flow = LAWS[name].model_copy(update={"disable_segmented_timestep_sampling": not segmented})
    sigmas = torch.cat(
        [sample_sigmas(place, flow, shift) for place in itertools.islice(places(40), 100)]
    )
    unshifted = sigmas / (shift - (shift - 1) * sigmas)
    shares = cdf(name, unshifted).sort().values
    distance = (shares - torch.linspace(0, 1, len(shares), dtype=torch.float64)).abs().max()
    assert distance < 0.03


@pytest.mark.parametrize("name", LAWS)
def test_a_segmented_batch_has_one_sample_in_each_slice_in_shuffled_order(name: str) -> None:
    orders = set()
    for place in itertools.islice(places(8), 20):
        slices = (cdf(name, sample_sigmas(place, LAWS[name], 1.0)) * 8).floor().int().tolist()
        assert sorted(slices) == list(range(8))
        orders.add(tuple(slices))
    assert len(orders) > 15


def test_independent_draws_may_share_slices() -> None:
    flow = FlowConfig(disable_segmented_timestep_sampling=True, flow_use_uniform_schedule=True)
    slices = (sample_sigmas(next(places(8)), flow, 1.0) * 8).floor()
    assert len(set(slices.tolist())) < 8


def test_a_position_of_a_segmented_batch_follows_the_whole_distribution() -> None:
    first = torch.stack(
        [sample_sigmas(each, LAWS["uniform"], 1.0)[0] for each in itertools.islice(places(4), 2000)]
    )
    distance = (first.sort().values - torch.linspace(0, 1, 2000)).abs().max()
    assert distance < 0.05


@pytest.mark.parametrize(
    "flow",
    [
        FlowConfig(flow_sigmoid_scale=100.0),
        FlowConfig(flow_use_uniform_schedule=True),
        FlowConfig(
            flow_use_beta_schedule=True, flow_beta_schedule_alpha=0.01, flow_beta_schedule_beta=0.01
        ),
        FlowConfig(
            flow_use_beta_schedule=True, flow_beta_schedule_alpha=300, flow_beta_schedule_beta=0.5
        ),
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
    monkeypatch.setattr(
        torch, "rand", lambda size, generator, dtype: torch.zeros(size, dtype=dtype)
    )
    for flow in LAWS.values():
        sigmas = sample_sigmas(next(places(1)), flow, 1.0)
        assert 0 < float(sigmas) < 1e-5


def test_an_offset_moves_the_logits_and_0_changes_no_bit() -> None:
    place = next(places(8))
    flow = LAWS["wide"]
    shares = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    plain = law_quantiles(shares, flow)
    moved = law_quantiles(shares, flow, 0.7)
    assert_close(
        torch.logit(moved) - torch.logit(plain), torch.full_like(shares, 0.7), terms=ELEMENTWISE
    )
    assert (sample_sigmas(place, flow, 1.0, 0.7) > sample_sigmas(place, flow, 1.0)).all()
    assert torch.equal(sample_sigmas(place, flow, 1.0, 0.0), sample_sigmas(place, flow, 1.0))


def test_a_share_of_the_samples_has_the_noise_offset() -> None:
    """Per sample of the batch; 1 changes no bit of the offset itself."""
    batch = Batch(torch.zeros(64, 2, 1, 4, 4), [], [""] * 64)
    noise = torch.zeros_like(batch.latents)
    ones = torch.ones(64)
    place = next(places(64))
    always, half, never = (
        make_noisy(
            batch,
            ones,
            noise,
            LossConfig(noise_offset=0.5, noise_offset_probability=share),
            place=place,
        ).noise
        for share in (1.0, 0.5, 0.0)
    )
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
    assert AutoShift()(2176) == pytest.approx(math.exp(0.825))


def test_an_explicit_shift_overrides_auto_shift() -> None:
    flow = FlowConfig(flow_schedule_shift=2.0, flow_schedule_auto_shift=True)
    assert choose_shift(flow, 4096, AutoShift(), shift_is_explicit=True) == 2.0
    assert choose_shift(flow, 4096, AutoShift(), shift_is_explicit=False) == pytest.approx(
        math.exp(1.15)
    )
    assert (
        choose_shift(
            FlowConfig(flow_schedule_shift=5.0), 4096, AutoShift(), shift_is_explicit=False
        )
        == 5.0
    )
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
    noisy = make_noisy(
        batch(dtype=torch.bfloat16), torch.rand(2, dtype=torch.float64), torch.randn(2, 4, 1, 6, 5)
    )
    tensors = (noisy.noise, noisy.sigmas, noisy.noisy_latents, noisy.timesteps, noisy.target)
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


def test_the_true_velocity_leads_back_to_the_latents() -> None:
    noisy = make_noisy(
        batch(), torch.tensor([0.3, 0.9]), sample_noise(batch().latents, [generator()] * 2)
    )
    back = noisy.noisy_latents - noisy.sigmas.view(-1, 1, 1, 1, 1) * noisy.target
    assert_close(back, batch().latents, terms=ELEMENTWISE)


def test_input_perturbation_changes_the_input_only() -> None:
    noise = sample_noise(batch((1, 8, 1, 64, 64)).latents, [generator()])
    sigmas = torch.tensor([0.5])
    plain = make_noisy(batch((1, 8, 1, 64, 64)), sigmas, noise)
    shaken = make_noisy(
        batch((1, 8, 1, 64, 64)),
        sigmas,
        noise,
        LossConfig(input_perturbation=0.1),
        place=next(places(1)),
    )
    assert torch.equal(shaken.target, plain.target)
    added = shaken.noisy_latents - plain.noisy_latents
    assert float(added.std()) == pytest.approx(0.5 * 0.1, rel=0.02)
    assert float(added.mean()) == pytest.approx(0, abs=1e-3)


def test_noise_offset_shifts_each_channel_in_input_and_target_alike() -> None:
    clean = batch((2, 4, 3, 6, 5))
    noise = sample_noise(clean.latents, [generator()] * 2)
    plain = make_noisy(clean, torch.tensor([0.5, 0.5]), noise)
    offset = make_noisy(
        clean, torch.tensor([0.5, 0.5]), noise, LossConfig(noise_offset=0.2), place=next(places(2))
    )
    shift = offset.target - plain.target
    drawn = [
        torch.randn(4, 1, 1, 1, generator=each)
        for each in next(places(2)).generators("perturbation")
    ]
    expected = 0.2 * torch.stack(drawn)
    assert_close(offset.target, plain.target + expected, terms=ELEMENTWISE)
    assert_close(offset.noisy_latents, plain.noisy_latents + 0.5 * shift, terms=ELEMENTWISE)


def test_extra_noise_without_a_position_in_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="position in the run"):
        make_noisy(
            batch(),
            torch.tensor([0.5, 0.5]),
            torch.zeros(2, 4, 1, 6, 5),
            LossConfig(noise_offset=0.1),
        )
