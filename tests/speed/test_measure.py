"""The benchmark of a device: quick, stored, and without effect on training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from simpletuner import timing
from simpletuner.budget.device import RATES_FILE, DeviceRates, read_rates, write_rates
from simpletuner.speed import measure
from simpletuner.speed.measure import device_rates

CPU = torch.device("cpu")


def test_a_cpu_is_measured_plausibly(tmp_path: Path) -> None:
    rates = device_rates(tmp_path, CPU, torch.float32)
    assert rates is not None

    assert (rates.device, rates.dtype, rates.host_to_device_bytes) == ("cpu", "float32", None)
    assert 1e8 < rates.matmul_flops < 1e14
    assert json.loads((tmp_path / RATES_FILE).read_text())["matmul_flops"] == rates.matmul_flops


@pytest.mark.parametrize(
    ("rate", "sides"), [(1e9, [256] * measure.SMALL_TRIES), (1e11, [256, 512])]
)
def test_a_cpu_that_emulates_a_precision_is_measured_with_a_small_matmul(
    monkeypatch: pytest.MonkeyPatch, rate: float, sides: list[int]
) -> None:
    results = []

    def product(device: torch.device, dtype: torch.dtype, side: int, rounds: int = 1) -> float:
        results.append(side)
        return rate

    monkeypatch.setattr(measure, "matmul_flops", product)
    monkeypatch.setattr(measure, "AFFORDABLE_SECONDS", 0.01)

    assert measure._measure_cpu(torch.bfloat16).matmul_flops == rate
    assert results == sides


def test_one_interrupted_measurement_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([1e9, 1e11, 2e11])
    monkeypatch.setattr(measure, "matmul_flops", lambda *given, **named: next(rates))
    monkeypatch.setattr(measure, "AFFORDABLE_SECONDS", 0.01)

    assert measure._measure_cpu(torch.float32).matmul_flops == 2e11


def test_rates_are_measured_once_per_device_and_precision(tmp_path: Path) -> None:
    known = DeviceRates("cpu", 123.0, None, "float32")
    write_rates(tmp_path, known)

    assert device_rates(tmp_path, CPU, torch.float32) == known

    other = device_rates(tmp_path, CPU, torch.bfloat16)
    assert other is not None

    assert other.matmul_flops != 123.0
    assert read_rates(tmp_path) == other


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"device": "cpu"}',
        '{"unknown": 1}',
        '{"device": "cpu", "matmul_flops": "fast", "dtype": "float32"}',
    ],
)
def test_an_unreadable_file_of_rates_is_measured_again(tmp_path: Path, content: str) -> None:
    (tmp_path / RATES_FILE).write_text(content)
    assert read_rates(tmp_path) is None
    assert device_rates(tmp_path, CPU, torch.float32) == read_rates(tmp_path)


def test_measuring_draws_no_global_random_number(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    device_rates(tmp_path, CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_operations_are_counted_as_two_per_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 1.0, 1.5, 1.5, 2.5])
    monkeypatch.setattr(timing, "_now", lambda device: next(seconds))
    assert measure.matmul_flops(CPU, torch.float32, 16, rounds=2) == 2 * 16**3 / 0.5
