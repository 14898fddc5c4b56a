"""Finding the device and its rates."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from simpletuner.budget import device as module
from simpletuner.budget.device import (
    CARDS,
    DeviceRates,
    compared,
    find_device,
    host_memory,
    rates_of,
    write_rates,
)
from simpletuner.budget.drivers import Gpu, compute_capability, query_gpu
from simpletuner.budget.phases import PhasePeak
from simpletuner.config.device import Card, parse_card, read_asked_device
from simpletuner.errors import Problems


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A program called nvidia-smi and nothing else on the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpu_is_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, "echo 'NVIDIA GeForce RTX 4090, 24564, 2'")
    assert query_gpu() == Gpu("NVIDIA GeForce RTX 4090", 24564 * 2**20)


def test_memory_used_by_other_programs_is_subtracted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A desktop or another job; what the driver of an idle card holds is no news."""
    apps = "case $1 in *apps*) echo '4711, /usr/bin/python3'; exit;; esac"
    fake_smi(tmp_path, monkeypatch, f"{apps}; echo 'NVIDIA GeForce RTX 3060, 12288, 3072'")
    monkeypatch.setattr(module, "query_gpu", query_gpu)  # instead of that of all tests
    device = find_device()
    whole = find_device(12)
    assert device.usable is not None
    assert whole.usable is not None
    assert whole.usable - device.usable == 3 * 2**30
    assert device.taken_by_others == "3.2 GB in use by python3 (process 4711)"
    assert whole.taken_by_others == ""
    message = PhasePeak("training", 11e9, 0.0).shortage(device)
    assert message is not None
    assert "3.2 GB in use by python3 (process 4711)" in message
    assert PhasePeak("training", 11e9, 0.0).shortage(whole) is None


def test_a_card_that_other_programs_fill_has_no_memory_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, monkeypatch, "echo 'NVIDIA GeForce RTX 3060, 12288, 12200'")
    monkeypatch.setattr(module, "query_gpu", query_gpu)  # instead of that of all tests

    assert find_device().usable == 0.0


def test_visible_gpu_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, 'echo "asked for $2, 1, 0"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert query_gpu() == Gpu("asked for 3", 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert query_gpu() is None


@pytest.mark.parametrize(
    ("says", "expected"), [("8.9", (8, 9)), ("10.0", (10, 0)), ("[N/A]", None)]
)
def test_compute_capability_is_read_from_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, expected: tuple[int, int] | None
) -> None:
    fake_smi(tmp_path, monkeypatch, f"test $1 = --query-gpu=compute_cap && echo '{says}'")
    assert compute_capability() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert compute_capability() is None


LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb)
  MIG 3g.40gb     Device  0: (UUID: MIG-cc)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-dd)"""
WHOLE = "NVIDIA H100 80GB HBM3"
LARGE = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
SMALL = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


@pytest.mark.parametrize(
    ("visible", "name", "gigabytes"),
    [
        (None, WHOLE, 80),
        ("0", WHOLE, 80),
        ("1", LARGE, 38.8),
        ("GPU-bb", LARGE, 38.8),
        ("MIG-dd,MIG-cc", SMALL, 9.7),
    ],
)
def test_mig_slice_is_used_where_cuda_would_use_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    name: str,
    gigabytes: float,
) -> None:
    answer = 'case "$*" in *MIG*) exit 6;; esac; echo "NVIDIA H100 80GB HBM3, 81920, 0"'
    fake_smi(tmp_path, monkeypatch, f"if [ $1 = -L ]; then echo '{LISTED}'; else {answer}; fi")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu = query_gpu()

    assert gpu is not None
    assert gpu[0] == name
    assert gpu[1] == pytest.approx(gigabytes * 2**30)


def test_launched_processes_plan_for_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "query_gpu", lambda: Gpu(WHOLE, 80e9, 6e8))
    monkeypatch.setattr(module, "query_users", lambda: "python (process 7)")
    assert find_device().taken > 0
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (find_device().taken, find_device().users) == (0, "")


def test_mig_slice_has_its_share_of_the_rates() -> None:
    assert rates_of(LARGE).matmul == pytest.approx(3 / 7 * rates_of(WHOLE).matmul)
    assert rates_of(LARGE).transfer == rates_of(WHOLE).transfer


def test_similar_card_names_are_distinguished() -> None:
    assert rates_of("NVIDIA H200").matmul == rates_of("NVIDIA H100 80GB HBM3").matmul == 600e12
    assert (rates_of("NVIDIA H200").memory, rates_of("NVIDIA H100 80GB HBM3").memory) == (
        4.0e12,
        2.6e12,
    )


@pytest.mark.parametrize(
    "script", ["exit 9", "echo nonsense", "true", "echo 'NVIDIA GB10, [N/A], [N/A]'"]
)
def test_driver_that_does_not_respond_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    fake_smi(tmp_path, monkeypatch, script)
    assert query_gpu() is None


def test_memory_of_the_machine_is_the_limit_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "host_memory", lambda: 16e9)
    device = find_device()
    assert (device.is_gpu, device.usable) == (False, 16e9)


def test_plan_may_be_for_a_gpu_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "host_memory", lambda: 16e9)
    device = find_device(24)
    assert device.is_gpu
    assert device.memory == 24 * 2**30
    assert device.usable is not None
    assert 23e9 < device.usable < 25e9
    assert device.host_memory is None, "that machine's is not known"
    monkeypatch.setattr(module, "query_gpu", lambda: None)
    devices = [find_device(gigabytes) for gigabytes in (12, 24, 80)]
    assert [device.note for device in devices] == [
        f"as fast as an {card}, assumed" for card in ("RTX 3060", "RTX 4090", "A100")
    ]
    assert {device.hint for device in devices} == {"--device names another card"}
    assert find_device(80).rates == rates_of("NVIDIA A100-SXM4-80GB")


def test_plan_may_be_for_a_card_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "query_gpu", lambda: None)
    card = find_device(card="h100")
    assert (card.name, card.memory) == ("H100 with 80 GiB", 80 * 2**30)
    assert card.rates == rates_of("NVIDIA H100 80GB HBM3")
    smaller = find_device(40, card="a100")
    assert (smaller.memory, smaller.rates) == (40 * 2**30, rates_of("NVIDIA A100-SXM4-40GB"))


def test_every_card_has_rates() -> None:
    assert sorted(CARDS) == sorted(get_args(get_args(Card)[0]))
    rates = [rates_of(f"NVIDIA GeForce {card.name}") for card in CARDS.values()]
    assert rates == [card.rates for card in CARDS.values()], "no name hides a longer one"


@pytest.mark.parametrize(
    "written", ["4090", 4090, "RTX 4090", "NVIDIA GeForce RTX 4090", "rtx-4090"]
)
def test_card_may_be_written_with_its_series(written: object) -> None:
    assert parse_card(written) == "4090"


@pytest.mark.parametrize(
    ("written", "card", "memory"),
    [
        ("rtx5090", "5090", None),
        ("geforce-rtx-4090", "4090", None),
        ("4070tisuper", "4070-ti-super", None),
        ("rtxa6000", "a6000", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "pro-6000", None),
        ("NVIDIA H100 PCIe", "h100-pcie", None),
        ("A100 80GB", "a100", 80),
        ("NVIDIA A100-SXM4-40GB", "a100", 40),
        ("4060 ti 8 gb", "4060-ti", 8),
        ("L40S 48GB", "l40s", None),  # as on its label; its driver reports less
        ("24gb", None, 24),
    ],
)
def test_card_is_understood_as_shops_and_drivers_write_it(
    written: str, card: str | None, memory: float | None
) -> None:
    report = Problems()

    asked = read_asked_device(report, written)

    assert not report
    assert (asked.device, asked.device_memory) == (card, memory)


@pytest.mark.parametrize(
    ("written", "suggestion"),
    [
        ("4090ti", "Did you mean '4090', "),
        ("5090ti", "Did you mean '5090', "),
        ("4080 super", "Did you mean '4080', "),
        ("v100", "Did you mean 'h100', "),
        ("7900xtx", "Known are: b200, "),
        ("", "Known are: b200, "),
    ],
)
def test_unknown_card_is_answered_with_the_nearest_ones(written: str, suggestion: str) -> None:
    report = Problems()

    read_asked_device(report, written)

    [problem] = report
    assert str(problem).startswith(f"--device: {written!r} is not a known card. {suggestion}")
    assert "--device-memory takes its GB" in problem.message


def test_memory_on_the_command_line_wins_over_that_in_a_name() -> None:
    assert read_asked_device(Problems(), "a100 80gb", 40).device_memory == 40


def test_measured_rates_of_a_cpu_count_for_any_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "query_gpu", lambda: None)
    write_rates(tmp_path, DeviceRates("cpu", 1e11, None, "float32"))
    device = find_device(output_dir=tmp_path)

    assert (device.rates.matmul, device.note) == (1e11, "matmul, attention measured")


def test_measured_rates_count_only_for_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "query_gpu", lambda: Gpu("NVIDIA H100 80GB HBM3", 80e9))
    assumed = find_device(output_dir=tmp_path).rates

    write_rates(tmp_path, DeviceRates("NVIDIA H100 80GB HBM3", 300e12, None, "bfloat16"))
    rates = find_device(output_dir=tmp_path).rates
    assert rates.matmul == 300e12
    assert rates.attention / rates.matmul == assumed.attention / assumed.matmul
    assert (rates.memory, rates.transfer) == (assumed.memory, assumed.transfer)

    write_rates(tmp_path, DeviceRates("another", 300e12, None, "bfloat16"))
    assert find_device(output_dir=tmp_path).rates == assumed


def test_a_matmul_rate_in_float32_does_not_count_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "query_gpu", lambda: Gpu("NVIDIA H100 80GB HBM3", 80e9))
    assumed = find_device(output_dir=tmp_path).rates

    write_rates(tmp_path, DeviceRates("NVIDIA H100 80GB HBM3", 30e12, 20e9, "float32"))

    rates = find_device(output_dir=tmp_path).rates
    assert (rates.matmul, rates.transfer) == (assumed.matmul, 20e9)


def test_a_damaged_file_of_rates_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "query_gpu", lambda: Gpu("NVIDIA H100 80GB HBM3", 80e9))
    assumed = find_device(output_dir=tmp_path).rates

    (tmp_path / "device_rates.json").write_text("{")

    assert find_device(output_dir=tmp_path).rates == assumed


def test_longer_card_name_wins() -> None:
    assert rates_of("NVIDIA H100 PCIe").matmul < rates_of("NVIDIA H100 80GB HBM3").matmul
    assert (
        rates_of("NVIDIA L40S").matmul
        > rates_of("NVIDIA L40").matmul
        > rates_of("NVIDIA L4").matmul
    )
    assert (
        rates_of("NVIDIA GeForce RTX 4070 Ti SUPER").matmul
        > rates_of("NVIDIA GeForce RTX 4070").matmul
    )
    assert rates_of("NVIDIA RTX A4000").matmul < rates_of("NVIDIA A40").matmul
    assert rates_of("GeForce GTX 1") == rates_of("something else")


def test_host_memory_of_this_machine_is_known() -> None:
    memory = host_memory()
    assert memory is None or memory > 1e9


def test_compared_numbers_have_enough_digits_to_differ() -> None:
    assert compared(16.1e9, 12e9) == ("16.1 GB", "12.0 GB")
    assert compared(16.14e9, 16.06e9) == ("16.140 GB", "16.060 GB")
