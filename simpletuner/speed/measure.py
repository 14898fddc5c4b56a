"""A short benchmark of a device: the rates of a large matmul, and of copies from pinned memory.

It uses a separate random generator and frees all memory, so it does not affect training.
"""

from __future__ import annotations

from pathlib import Path

import torch

from simpletuner.budget.device import DeviceRates, read_rates, write_rates
from simpletuner.budget.drivers import TITLES, Backend
from simpletuner.timing import fastest

# Large enough to saturate any GPU; the three matrices take 0.4 GB in bfloat16.
SIDE = 8192
APPLE_SIDE = 4096  # a tenth of a GB: the memory is the machine's
COPIED_BYTES = 1 << 28
# On a CPU, the larger matmul is measured only if the smaller one takes less than this.
SMALL_SIDE = 256
MEDIUM_SIDE = 512
AFFORDABLE_SECONDS = 0.01
SMALL_TRIES = 3  # another program may interrupt one of them
ROUNDS = 5


def device_rates(folder: Path, device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """The rates of the device at the precision of training.

    Measured once per output folder, device and precision. Without a GPU's own memory (Apple), there
    are no copies from the host to measure.
    """
    known = read_rates(folder)
    measured = (device_name(device), _dtype_name(dtype))
    if known is not None and (known.device, known.dtype) == measured:
        return known
    rates = _measure_cpu(dtype) if device.type == "cpu" else _measure_gpu(device, dtype)
    write_rates(folder, rates)
    return rates


def device_name(device: torch.device) -> str:
    """The name under which rates are stored, see `device.measured_name`."""
    if device.type == "cpu":
        return "cpu"
    backend = backend_of(device)
    if backend == "cuda":
        return torch.cuda.get_device_name(device)
    return TITLES[backend]


def backend_of(device: torch.device) -> Backend:
    """What torch needs to use a GPU."""
    if device.type == "cuda":
        return "rocm" if torch.version.hip else "cuda"
    return "mps" if device.type == "mps" else "xpu"


def matmul_flops(
    device: torch.device, dtype: torch.dtype, side: int, rounds: int = ROUNDS
) -> float:
    """FLOP/s of a square matmul of `2 side^3` FLOPs; the fastest of several rounds."""
    generator = torch.Generator(device).manual_seed(0)
    # Random values, since multiplying zeros takes less power, and a GPU would run at an
    # unsustainable clock.
    left = torch.randn(side, side, device=device, dtype=dtype, generator=generator)
    right = torch.randn(side, side, device=device, dtype=dtype, generator=generator)
    product = torch.empty_like(left)
    seconds = fastest(lambda: torch.mm(left, right, out=product), device, rounds)
    return 2 * side**3 / seconds


def host_to_device_bytes(
    device: torch.device, count: int = COPIED_BYTES, rounds: int = ROUNDS
) -> float:
    """Bytes per second from pinned host memory to a GPU."""
    on_host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(count, dtype=torch.uint8, device=device)
    seconds = fastest(lambda: on_device.copy_(on_host, non_blocking=True), device, rounds)
    return count / seconds


def _measure_gpu(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    side = APPLE_SIDE if device.type == "mps" else SIDE
    rate = matmul_flops(device, dtype, side)
    copies = None if device.type == "mps" else host_to_device_bytes(device)
    rates = DeviceRates(device_name(device), rate, copies, _dtype_name(dtype))
    # The peak memory that a run reports must not include the benchmark.
    torch.get_device_module(device).empty_cache()
    if device.type == "cuda":
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
    return DeviceRates(device_name(device), rate, dtype=_dtype_name(dtype))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
