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
    """Speeds of a device.

    Attributes:
        matmul, attention, sparse: FLOP/s of matmuls, dense attention and block-sparse attention.
        memory: bytes/s of device memory.
        transfer: bytes/s of copies from the host.
        link: bytes/s to another GPU of the machine.
    """

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
        usable = self.memory * (1 - FRAGMENTS) - DEVICE_OVERHEAD - self.taken - self.buffers
        return max(0.0, usable)  # other programs may have taken nearly all of it

    @property
    def taken_by_others(self) -> str:
        """A phrase about the memory that other programs use; empty if none."""
        if not self.taken:
            return ""
        return f"{gigabytes(self.taken)} in use by {self.users or 'other programs'}"


def gigabytes(number: float) -> str:
    """Bytes as text: in GB (10^9 bytes), or in a smaller unit below a tenth of a GB."""
    if number < 0.95e8:
        return size_text(round(number))
    return f"{number / 1e9:.1f} GB"


def compared(number: float, limit: float) -> tuple[str, str]:
    """Two numbers of bytes as text, with enough digits to show which is larger."""
    texts = gigabytes(number), gigabytes(limit)
    if texts[0] != texts[1]:
        return texts
    return f"{number / 1e9:.3f} GB", f"{limit / 1e9:.3f} GB"


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
    return Rates(
        matmul=flops,
        attention=ATTENTION_SHARE * flops,
        sparse=sparse * flops,
        memory=memory_tb * 1e12,
        transfer=transfer,
        # GPUs without NVLink communicate over the host's bus.
        link=nvlink_gb * 1e9 or transfer,
    )


class KnownCard(NamedTuple):
    """A card of the table.

    Attributes:
        name: the part of the driver's device name that identifies it.
    """

    name: str
    gibibytes: float
    rates: Rates


def _card(name: str, gibibytes: float, **rates: float) -> KnownCard:
    return KnownCard(name, gibibytes, _rates(**rates))


TABLE = cast("dict[Card, Any]", read_toml("simpletuner.budget", "cards.toml"))
CARDS: Mapping[Card, KnownCard] = {card: _card(**row) for card, row in TABLE.items()}
UNKNOWN_GPU = _rates(tflops=50, memory_tb=0.5, transfer_gb=11)
# A middling Apple chip, until a run has measured its own.
APPLE_GPU = _rates(tflops=10, memory_tb=0.2, transfer_gb=50)
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
    if gpu and torch_uses_gpus() and is_for_torch(gpu):
        device = this_gpu(gpu)
    else:
        device = this_cpu(gpu)
    return with_measured(device, output_dir) if output_dir else device


def this_gpu(gpu: Gpu) -> Device:
    """The first GPU of this machine."""
    taken = gpu.taken
    if world_from_launcher(os.environ) is not None:
        # Launched processes must decide alike, and already hold device memory themselves.
        taken = 0.0
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
            name=f"{known.name} with {memory:g} GiB",
            memory=memory * 2**30,
            host_memory=host,
            is_gpu=True,
            rates=known.rates,
            note="rates assumed",
        )
    assert gibibytes is not None
    if gpu is not None:
        model = gpu.name
        rates = rates_of(gpu.name)
        hint = ""
    else:
        usual = [name for least, name in USUAL.items() if gibibytes >= least][-1]
        model = f"an {CARDS[usual].name}"
        rates = CARDS[usual].rates
        hint = "--device names another card"
    return Device(
        name=f"a GPU with {gibibytes:g} GiB",
        memory=gibibytes * 2**30,
        host_memory=host,
        is_gpu=True,
        rates=rates,
        note=f"as fast as {model}, assumed",
        hint=hint,
    )


def this_cpu(gpu: Gpu | None = None) -> Device:
    """The CPU of this machine, with a GPU that torch cannot use, if any."""
    memory = host_memory()
    flops = compute_threads() * core_flops()
    device = Device(
        name="CPU",
        memory=memory,
        host_memory=memory,
        is_gpu=False,
        rates=Rates(
            matmul=flops,
            attention=flops,
            sparse=flops,
            memory=CPU_BYTES,
            transfer=CPU_BYTES,
            link=CPU_BYTES,
        ),
        note="rates assumed",
    )
    if gpu is None:
        return device
    return replace(device, idle=gpu.name, backend=gpu.backend)


def core_flops() -> float:
    """float32 FLOP/s of a core, assumed from its instructions."""
    try:
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        listed = ""
    # The empty name comes last and is part of any text.
    return next(flops for instructions, flops in CORE_FLOPS.items() if instructions in listed)


def one_of_several(device: Device) -> Device:
    """The device of one of several processes, where NCCL's buffers take memory."""
    return replace(device, buffers=NCCL_BUFFERS)


def rates_of(name: str) -> Rates:
    """Assumed rates of a GPU by name; a MIG slice gets its share in sevenths."""
    rates = UNKNOWN_GPU
    for card in CARDS.values():
        if card.name in name:
            rates = card.rates
            break
    mig_slice = SLICE.search(name)
    if mig_slice is None:
        return rates
    share = int(mig_slice["sevenths"]) / 7
    return replace(  # slices do not divide the bus
        rates,
        matmul=share * rates.matmul,
        attention=share * rates.attention,
        sparse=share * rates.sparse,
        memory=share * rates.memory,
    )


def with_measured(device: Device, folder: Path) -> Device:
    """The device with the rates in a folder, if they were measured on it.

    For a GPU, rates of float32 matmuls are ignored, since the assumed rates are for 16 bits.
    """
    rates = read_rates(folder)
    if rates is None or rates.device != measured_name(device):
        return device
    measured = device.rates
    titles = []
    if rates.dtype in ("bfloat16", "float16", "") or not device.is_gpu:
        # Only matmuls are measured; attention is assumed to be as much faster.
        faster = rates.matmul_flops / measured.matmul
        measured = replace(
            measured,
            matmul=faster * measured.matmul,
            attention=faster * measured.attention,
            sparse=faster * measured.sparse,
        )
        titles += ["matmul", "attention"]
    if rates.host_to_device_bytes is not None:
        measured = replace(measured, transfer=rates.host_to_device_bytes)
        titles.append("transfer")
    note = f"{', '.join(titles)} measured" if titles else device.note
    return replace(device, rates=measured, note=note)


def measured_name(device: Device) -> str:
    """The device's name in a file of measured rates."""
    if not device.is_gpu:
        return "cpu"
    # The programs of AMD's and Intel's drivers use other names than torch.
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
