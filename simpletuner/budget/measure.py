"""A short benchmark of a device: the rates of a large matmul, and of copies from pinned memory.

It uses a separate random generator and frees all memory, so it does not affect training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from simpletuner.budget.device import DeviceRates, read_rates, write_rates

# Large enough to saturate any GPU; the three matrices take 0.4 GB in bfloat16.
SIDE = 8192
COPIED_BYTES = 1 << 28
# On a CPU, the larger matmul is measured only if the smaller one takes less than this.
SMALL_SIDE, MEDIUM_SIDE = 256, 512
AFFORDABLE_SECONDS = 0.01
SMALL_TRIES = 3  # another program may interrupt one of them
ROUNDS = 5


def device_rates(folder: Path, device: torch.device, dtype: torch.dtype) -> DeviceRates | None:
    """The rates of the device at the precision of training, measured once per output folder and device.

    None for devices other than CUDA and CPU.
    """
    known = read_rates(folder)
    if known is not None and (known.device, known.dtype) == (device_name(device), _name(dtype)):
        return known
    if device.type not in ("cuda", "cpu"):
        return None
    rates = _measure_cuda(device, dtype) if device.type == "cuda" else _measure_cpu(dtype)
    write_rates(folder, rates)
    return rates


def device_name(device: torch.device) -> str:
    """User-facing name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def matmul_flops(device: torch.device, dtype: torch.dtype, side: int, rounds: int = ROUNDS) -> float:
    """FLOP/s of a square matmul of `2 side^3` FLOPs; the fastest of several rounds."""
    generator = torch.Generator(device).manual_seed(0)
    # Random values, since multiplying zeros takes less power, and a GPU would run at an unsustainable clock.
    left, right = (torch.randn(side, side, device=device, dtype=dtype, generator=generator) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / fastest(lambda: torch.mm(left, right, out=out), device, rounds)


def host_to_device_bytes(device: torch.device, count: int = COPIED_BYTES, rounds: int = ROUNDS) -> float:
    """Bytes per second from pinned host memory to a GPU."""
    host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count, dtype=torch.uint8, device=device)
    return count / fastest(lambda: there.copy_(host, non_blocking=True), device, rounds)


def fastest(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of the fastest round, after a warm-up round."""
    seconds = []
    for _ in range(rounds + 1):
        started = _now(device)
        work()
        seconds.append(_now(device) - started)
    return min(seconds[1:])


def _measure_cuda(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    rate = matmul_flops(device, dtype, SIDE)
    rates = DeviceRates(device_name(device), rate, host_to_device_bytes(device), _name(dtype))
    # The peak memory that a run reports must not include the benchmark.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return rates


def _measure_cpu(dtype: torch.dtype) -> DeviceRates:
    """Measure a CPU; starts small, since CPUs that emulate bfloat16 are a thousand times slower."""
    device = torch.device("cpu")
    rate = 0.0
    for _ in range(SMALL_TRIES):
        rate = max(rate, matmul_flops(device, dtype, SMALL_SIDE, rounds=1))
        if 2 * SMALL_SIDE**3 / rate < AFFORDABLE_SECONDS:
            rate = matmul_flops(device, dtype, MEDIUM_SIDE, rounds=3)
            break
    return DeviceRates(device_name(device), rate, dtype=_name(dtype))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
