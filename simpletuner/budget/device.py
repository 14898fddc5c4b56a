"""The device that trains, and its speed, as measured by an earlier run or assumed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
from pydantic import PositiveFloat

from simpletuner.atomic import write_json
from simpletuner.budget.drivers import (
    SLICE,
    TITLES,
    Backend,
    Gpu,
    is_for_torch,
    query_gpu,
    query_users,
    torch_uses_gpus,
)
from simpletuner.config.device import Card
from simpletuner.config.json_reader import read_stored, read_toml
from simpletuner.distributed.world import compute_threads, world_from_launcher
from simpletuner.reporting.wording import size_text

RATES_FILE = "device_rates.json"


@dataclass(frozen=True)
class DeviceRates:
    """Measured speed of a device.

    Attributes:
        device: name of the device.
        matmul_flops: FLOP/s of a large matmul.
        host_to_device_bytes: bytes/s of copies from pinned memory; None without a GPU.
        dtype: dtype of the matrices, such as `bfloat16`.
    """

    device: str
    matmul_flops: PositiveFloat
    host_to_device_bytes: PositiveFloat | None = None
    dtype: str = ""


def read_rates(folder: Path) -> DeviceRates | None:
    """The rates measured by an earlier session; None if the file is missing or invalid."""
    return read_stored(folder / RATES_FILE, DeviceRates)


def write_rates(folder: Path, rates: DeviceRates) -> None:
    """Save measured rates in an output folder.

    Raises:
        DiskFullError: no space left.
    """
    write_json(folder / RATES_FILE, asdict(rates), durable=False)


# Device memory lost to the driver and libraries (bytes), and to fragmentation (share).
DEVICE_OVERHEAD = 0.6e9
FRAGMENTS = 0.03
# Host memory of the process before any weight is loaded: the interpreter, torch, diffusers and
# transformers; less without CUDA's libraries (measured: 0.5 GB, and 0.1 in the first step).
HOST_BASE = 1.2e9
CPU_BASE = 0.7e9
# NCCL's buffers per device (bytes), not measured: 16 channels with four connections (ring and
# tree), with 4, 4.7 and 0.5 MiB for its protocols. Sizes are the defaults in NCCL's source; the
# number of channels depends on the links.
NCCL_BUFFERS = 16 * 4 * 9.2 * 2**20
# Rate of softmax attention, forward and backward, relative to matmuls: dense, and block-sparse by
# flex attention.
ATTENTION_SHARE = 0.55
SPARSE_SHARE = 0.55


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matmuls, dense attention and block-sparse attention; bytes/s of device memory, of
    copies from the host, and to another GPU of the machine."""

    matmul: float
    attention: float
    sparse: float
    memory: float
    transfer: float
    link: float


@dataclass(frozen=True)
class Device:
    """The device that trains.

    Attributes:
        name: as reported by the driver.
        memory: bytes of device memory; None if unknown.
        host_memory: bytes of host memory; None if unknown.
        is_gpu: whether it is not the CPU.
        backend: what torch needs to use a GPU; of no meaning for a CPU.
        rates: assumed or measured rates.
        note: which rates are assumed or measured, for the plan.
        taken: bytes of device memory that other programs use now.
        users: these programs, as named by the driver.
        hint: how to name another device on the command line.
        idle: a GPU of this machine that torch cannot use.
        buffers: bytes of NCCL's buffers; 0 for one process.
    """

    name: str
    memory: float | None
    host_memory: float | None
    is_gpu: bool
    rates: Rates
    note: str
    taken: float = 0.0
    users: str = ""
    hint: str = ""
    idle: str = ""
    buffers: float = 0.0
    backend: Backend = "cuda"

    @property
    def torch_type(self) -> str:
        """The type of the device in torch."""
        if not self.is_gpu:
            return "cpu"
        return "cuda" if self.backend == "rocm" else self.backend

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is not the host's: Apple's GPUs and CPUs have none of their own."""
        return self.is_gpu and self.backend != "mps"

    @property
    def process_memory(self) -> float:
        """Bytes of host memory of a process before it loads a weight."""
        return HOST_BASE if self.has_own_memory else CPU_BASE

    @property
    def usable(self) -> float | None:
        """Bytes that a run can use; None if unknown."""
        if self.memory is None or not self.has_own_memory:
            return self.memory
        return self.memory * (1 - FRAGMENTS) - DEVICE_OVERHEAD - self.taken - self.buffers

    @property
    def taken_by_others(self) -> str:
        """A phrase about the memory that other programs use; empty if none."""
        return (
            f"{gigabytes(self.taken)} in use by {self.users or 'other programs'}"
            if self.taken
            else ""
        )


def gigabytes(number: float) -> str:
    """Bytes as text: in GB (10^9 bytes), or in a smaller unit below a tenth of a GB."""
    return size_text(round(number)) if number < 0.95e8 else f"{number / 1e9:.1f} GB"


def compared(number: float, limit: float) -> tuple[str, str]:
    """Two numbers of bytes as text, with enough digits to show which is larger: 16.14 GB and 16.06
    GB.
    """
    texts = gigabytes(number), gigabytes(limit)
    return (f"{number / 1e9:.3f} GB", f"{limit / 1e9:.3f} GB") if texts[0] == texts[1] else texts


def _rates(
    tflops: float,
    memory_tb: float,
    transfer_gb: float,
    *,
    nvlink_gb: float = 0.0,
    sparse: float = SPARSE_SHARE,
) -> Rates:
    flops = tflops * 1e12
    transfer = transfer_gb * 1e9
    # GPUs without NVLink communicate over the host's bus.
    link = nvlink_gb * 1e9 or transfer
    return Rates(flops, ATTENTION_SHARE * flops, sparse * flops, memory_tb * 1e12, transfer, link)


class KnownCard(NamedTuple):
    """A card: the part of the driver's device name that identifies it, its memory in GiB, and its
    rates.
    """

    name: str
    gibibytes: float
    rates: Rates


def _card(name: str, gibibytes: float, **rates: float) -> KnownCard:
    return KnownCard(name, gibibytes, _rates(**rates))


TABLE = cast("dict[Card, Any]", read_toml("simpletuner.budget", "cards.toml"))
CARDS: Mapping[Card, KnownCard] = {card: _card(**row) for card, row in TABLE.items()}
UNKNOWN_GPU = _rates(50, 0.5, 11)
# Of a middling Apple chip, until a run has measured its own.
APPLE_GPU = _rates(10, 0.2, 50)
# The typical card by minimum GiB, whose rates `--device-memory` assumes without `--device`.
USUAL: Mapping[float, Card] = {
    0: "3060",
    15: "4080",
    20: "4090",
    30: "5090",
    40: "a100",
    120: "h200",
}
# float32 FLOP/s of a core, by the widest vector instructions that /proc/cpuinfo lists: 60 to 90 %
# of two fused multiply-adds of a vector a cycle at 2.6 GHz; and bytes/s of the memory that small
# tensors are in.
CORE_FLOPS: Mapping[str, float] = {"avx512f": 150e9, "avx2": 60e9, "": 20e9}
CPU_BYTES = 20e9


def find_device(
    gibibytes: float | None = None, output_dir: Path | None = None, card: Card | None = None
) -> Device:
    """The device that a run on this machine would use, or the one that a plan is asked about.

    Args:
        gibibytes: memory of a GPU to plan for, instead of this machine's device.
        output_dir: folder that may hold measured rates.
        card: a card to plan for.
    """
    gpu = query_gpu()
    if card is not None or gibibytes is not None:
        return planned_device(gibibytes, card, gpu)
    device = this_gpu(gpu) if gpu and torch_uses_gpus() and is_for_torch(gpu) else this_cpu(gpu)
    return with_measured(device, output_dir) if output_dir else device


def this_gpu(gpu: Gpu) -> Device:
    """The first GPU of this machine."""
    # Launched processes must decide alike, and already hold device memory themselves.
    taken = gpu.taken if world_from_launcher(os.environ) is None else 0.0
    return Device(
        name=gpu.name,
        memory=gpu.memory,
        host_memory=host_memory(),
        is_gpu=True,
        rates=APPLE_GPU if gpu.backend == "mps" else rates_of(gpu.name),
        note="rates assumed",
        taken=taken,
        users=query_users() if taken else "",
        backend=gpu.backend,
    )


def planned_device(gibibytes: float | None, card: Card | None, gpu: Gpu | None) -> Device:
    """A GPU to plan for: a card by name, or a GPU with this much memory."""
    # Without a GPU here, the run will be on another machine with unknown host memory.
    host = host_memory() if gpu else None
    if card is not None:
        known = CARDS[card]
        memory = gibibytes or known.gibibytes
        return Device(
            f"{known.name} with {memory:g} GiB",
            memory * 2**30,
            host,
            True,
            known.rates,
            "rates assumed",
        )
    assert gibibytes is not None
    usual = [name for least, name in USUAL.items() if gibibytes >= least][-1]
    like, rates = (
        (gpu.name, rates_of(gpu.name)) if gpu else (f"an {CARDS[usual].name}", CARDS[usual].rates)
    )
    note = f"as fast as {like}, assumed"
    hint = "" if gpu else "--device names another card"
    return Device(
        f"a GPU with {gibibytes:g} GiB", gibibytes * 2**30, host, True, rates, note, hint=hint
    )


def this_cpu(gpu: Gpu | None = None) -> Device:
    """The CPU of this machine, with a GPU that torch cannot use, if any."""
    host = host_memory()
    flops = compute_threads() * core_flops()
    rates = Rates(flops, flops, flops, CPU_BYTES, CPU_BYTES, CPU_BYTES)
    if gpu is None:
        return Device("CPU", host, host, False, rates, "rates assumed")
    return Device(
        "CPU", host, host, False, rates, "rates assumed", idle=gpu.name, backend=gpu.backend
    )


def core_flops() -> float:
    """float32 FLOP/s of a core, assumed from its instructions."""
    try:
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        listed = ""
    return next(flops for instructions, flops in CORE_FLOPS.items() if instructions in listed)


def one_of_several(device: Device) -> Device:
    """The device of one of several processes, where NCCL's buffers take memory."""
    return replace(device, buffers=NCCL_BUFFERS)


def rates_of(name: str) -> Rates:
    """Assumed rates of a GPU by name; a MIG slice gets its share in sevenths."""
    whole = next((card.rates for card in CARDS.values() if card.name in name), UNKNOWN_GPU)
    part = SLICE.search(name)
    if part is None:
        return whole
    share = int(part["sevenths"]) / 7
    # Slices do not divide the bus.
    flops = {
        key: share * rate for key, rate in asdict(whole).items() if key not in ("transfer", "link")
    }
    return replace(whole, **flops)


def with_measured(device: Device, folder: Path) -> Device:
    """The device with the rates in a folder, if they were measured on it.

    For a GPU, rates of float32 matmuls are ignored, since the assumed rates are for 16 bits.
    """
    rates = read_rates(folder)
    measured: dict[str, float] = {}
    if rates is not None and rates.device == measured_name(device):
        if rates.dtype in ("bfloat16", "float16", "") or not device.is_gpu:
            faster = rates.matmul_flops / device.rates.matmul
            measured |= {
                key: faster * asdict(device.rates)[key] for key in ("matmul", "attention", "sparse")
            }
        if rates.host_to_device_bytes is not None:
            measured["transfer"] = rates.host_to_device_bytes
    note = (
        f"{', '.join(each for each in measured if each != 'sparse')} measured"
        if measured
        else device.note
    )
    return replace(device, rates=replace(device.rates, **measured), note=note)


def measured_name(device: Device) -> str:
    """The device's name in a file of measured rates. AMD's and Intel's programs use other names
    than torch.
    """
    if not device.is_gpu:
        return "cpu"
    return device.name if device.backend == "cuda" else TITLES[device.backend]


def host_memory() -> float:
    """Memory of the machine in bytes, or the container's limit."""
    try:
        # cgroup v2, where "max" stands for no limit.
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    total = float(psutil.virtual_memory().total)
    return min(total, float(limit)) if limit.isdecimal() else total
