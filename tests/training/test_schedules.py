"""Learning rates in closed form."""

from __future__ import annotations

import math
from itertools import product
from typing import get_args

import pytest

from simpletuner.config.load import Layer, resolve
from simpletuner.config.optimizers import peak_learning_rate
from simpletuner.config.rates import learning_rate_at
from simpletuner.config.schema import OptimizerConfig
from simpletuner.errors import Problems

SCHEDULERS = get_args(OptimizerConfig.model_fields["lr_scheduler"].annotation)
PEAK = 1e-3
END = 1e-5


def rates(total: int, **keys: object) -> list[float]:
    config = OptimizerConfig(**{"lr_end": END, **keys})
    return [learning_rate_at(step, config, PEAK, total) for step in range(total)]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_ramps_up_in_a_straight_line_from_0(scheduler: str) -> None:
    result = rates(40, lr_scheduler=scheduler, lr_warmup_steps=10, lr_num_cycles=2)
    assert result[:10] == pytest.approx([PEAK * number / 10 for number in range(1, 11)])
    assert max(result) == pytest.approx(PEAK)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_rates_stay_between_the_ends_whatever_the_lengths(scheduler: str) -> None:
    for total, warmup in product([1, 2, 3, 50], [0, 1, 2, 50, 51, 1000]):
        results = rates(total, lr_scheduler=scheduler, lr_warmup_steps=warmup)
        assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in results), (total, warmup)
        if warmup >= total:
            assert results == pytest.approx(
                [PEAK * number / warmup for number in range(1, total + 1)]
            ), (total, warmup)
        elif warmup == 0:
            assert results[0] == PEAK, total


@pytest.mark.parametrize(
    "scheduler", ["linear", "cosine", "cosine_with_warmup", "cosine_with_restarts", "polynomial"]
)
@pytest.mark.parametrize("warmup", [0, 5])
def test_decays_reach_their_end_in_the_last_step_and_stay_there(
    scheduler: str, warmup: int
) -> None:
    config = OptimizerConfig(lr_end=END, lr_scheduler=scheduler, lr_warmup_steps=warmup)
    assert learning_rate_at(29, config, PEAK, 30) == pytest.approx(END)
    assert learning_rate_at(300, config, PEAK, 30) == pytest.approx(END)


def test_rates_at_a_quarter_and_half_of_the_decay() -> None:
    """41 steps: 40 intervals between the peak in the first step and the end in the last."""

    def shares(scheduler: str, **keys: object) -> list[float]:
        result = rates(41, lr_scheduler=scheduler, **keys)
        return [(result[step] - END) / (PEAK - END) for step in (10, 20, 30)]

    assert shares("constant") == pytest.approx([1, 1, 1])
    assert shares("constant_with_warmup") == pytest.approx([1, 1, 1])
    assert shares("linear") == pytest.approx([0.75, 0.5, 0.25])

    half = math.sqrt(0.5)
    assert shares("cosine") == pytest.approx([(1 + half) / 2, 0.5, (1 - half) / 2])
    assert shares("cosine_with_restarts", lr_num_cycles=2) == pytest.approx([0.5, 1.0, 0.5])
    assert shares("polynomial", lr_power=2.0) == pytest.approx([0.5625, 0.25, 0.0625])
    assert shares("sine") == pytest.approx([0.5, 0.0, 0.5], abs=1e-12)


def test_one_cycle_with_restarts_is_the_cosine() -> None:
    cosine = rates(30, lr_scheduler="cosine", lr_warmup_steps=3)
    assert rates(30, lr_scheduler="cosine_with_restarts", lr_warmup_steps=3) == pytest.approx(
        cosine
    )


def test_the_decay_starts_after_the_warmup() -> None:
    """Warm-up 10 of 30: the peak is in step 10, the middle in step 20, the end in step 30."""
    results = rates(30, lr_scheduler="linear", lr_warmup_steps=10)

    assert results[9] == pytest.approx(PEAK)
    assert results[19] == pytest.approx((PEAK + END) / 2)
    assert results[29] == pytest.approx(END)


def test_schedule_free_optimizers_keep_the_rate_after_the_warmup() -> None:
    result = rates(30, optimizer="adamw_schedulefree", lr_scheduler="cosine", lr_warmup_steps=10)
    assert result == pytest.approx([PEAK * min(number / 10, 1) for number in range(1, 31)])


@pytest.mark.parametrize(
    ("key", "rate"), [("lr_warmup_steps", 1e-4), ("lr_scale", 1.6e-3), ("lr_scale_sqrt", 4e-4)]
)
def test_lr_scale_multiplies_by_the_samples_of_a_step(key: str, rate: float) -> None:
    step = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "num_processes": 4, key: 1}
    values = {"model_type": "lora", "model_family": "sanavideo", "learning_rate": 1e-4, **step}
    # Processes that share the tokens of samples count once.
    for shared in ({}, {"num_processes": 8, "sequence_parallel_size": 2}):
        config = resolve([Layer("config.json", list((values | shared).items()))], Problems())
        assert peak_learning_rate(config) == pytest.approx(rate)
