"""Finds the device without torch, and its speed, as measured by an earlier run or assumed."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import psutil
from pydantic import PositiveFloat

from simpletuner.atomic import write_json
from simpletuner.config.schema import Card
from simpletuner.config.values import read_stored, read_toml
from simpletuner.distributed.world import compute_threads, launched
from simpletuner.plan.environment import driver
from simpletuner.reporting.pace import size_text

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


QUERY_SECONDS = 5  # a hung driver must not block the plan
# Lines of `nvidia-smi -L`: "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-...)" followed by "MIG 3g.40gb  Device 0: (...)".
WHOLE = re.compile(r"GPU (?P<index>\d+): (?P<name>.+?) \(UUID")
SLICE = re.compile(r"MIG (?P<sevenths>\d)g\.(?P<gigabytes>\d+)gb")
SLICE_SHARE = 0.97  # usable share of the memory in the name of a MIG slice
# Device memory lost to the driver and libraries (bytes), and to fragmentation (share).
DEVICE_OVERHEAD, FRAGMENTS = 0.6e9, 0.03
# Host memory of the process before any weight is loaded: the interpreter, torch, diffusers and transformers; less
# without CUDA's libraries (measured: 0.5 GB, and 0.1 in the first step).
HOST_BASE, CPU_BASE = 1.2e9, 0.7e9
# Bytes that the driver uses on an idle device, part of DEVICE_OVERHEAD; they differ slightly between machines.
IDLE = 0.5e9
# NCCL's buffers per device (bytes), not measured: 16 channels with four connections (ring and tree), with 4, 4.7 and
# 0.5 MiB for its protocols. Sizes are the defaults in NCCL's source; the number of channels depends on the links.
NCCL_BUFFERS = 16 * 4 * 9.2 * 2**20
# Rate of softmax attention, forward and backward, relative to matmuls: dense, and block-sparse by flex attention.
ATTENTION_SHARE, SPARSE_SHARE = 0.55, 0.55


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matmuls, dense attention and block-sparse attention; bytes/s of device memory, of copies from the host,
    and to another GPU of the machine."""

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
        is_gpu: has separate memory; otherwise it uses the host's.
        rates: assumed or measured rates.
        note: which rates are assumed or measured, for the plan.
        taken: bytes of device memory that other programs use now.
        users: these programs, as named by the driver.
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
    idle: str = ""
    buffers: float = 0.0

    @property
    def process_memory(self) -> float:
        """Bytes of host memory of a process before it loads a weight."""
        return HOST_BASE if self.is_gpu else CPU_BASE

    @property
    def usable(self) -> float | None:
        """Bytes that a run can use; None if unknown."""
        if self.memory is None or not self.is_gpu:
            return self.memory
        return self.memory * (1 - FRAGMENTS) - DEVICE_OVERHEAD - self.taken - self.buffers

    @property
    def taken_by_others(self) -> str:
        """A phrase about the memory that other programs use; empty if none."""
        return f"{gigabytes(self.taken)} in use by {self.users or 'other programs'}" if self.taken else ""


def gigabytes(number: float) -> str:
    """Bytes as text: in GB (10^9 bytes), or in a smaller unit below a tenth of a GB."""
    return size_text(round(number)) if number < 0.95e8 else f"{number / 1e9:.1f} GB"


def compared(number: float, limit: float) -> tuple[str, str]:
    """Two numbers of bytes as text, with enough digits to show which is larger: 16.14 GB and 16.06 GB."""
    texts = gigabytes(number), gigabytes(limit)
    return (f"{number / 1e9:.3f} GB", f"{limit / 1e9:.3f} GB") if texts[0] == texts[1] else texts


def _rates(
    tflops: float, memory_tb: float, transfer_gb: float, *, nvlink_gb: float = 0.0, sparse: float = SPARSE_SHARE
) -> Rates:
    flops, transfer = tflops * 1e12, transfer_gb * 1e9
    # GPUs without NVLink communicate over the host's bus.
    link = nvlink_gb * 1e9 or transfer
    return Rates(flops, ATTENTION_SHARE * flops, sparse * flops, memory_tb * 1e12, transfer, link)


class KnownCard(NamedTuple):
    """A card: the part of the driver's device name that identifies it, its memory in GiB, and its rates."""

    name: str
    gibibytes: float
    rates: Rates


def _card(name: str, gibibytes: float, **rates: float) -> KnownCard:
    return KnownCard(name, gibibytes, _rates(**rates))


TABLE = cast("dict[Card, Any]", read_toml("simpletuner.budget", "cards.toml"))
CARDS: Mapping[Card, KnownCard] = {card: _card(**row) for card, row in TABLE.items()}
UNKNOWN_GPU = _rates(50, 0.5, 11)
# The typical card by minimum GiB, whose rates `--device-memory` assumes without `--device`.
USUAL: Mapping[float, Card] = {0: "3060", 15: "4080", 20: "4090", 30: "5090", 40: "a100", 120: "h200"}
# float32 FLOP/s of a core, by the widest vector instructions that /proc/cpuinfo lists: 60 to 90 % of two fused
# multiply-adds of a vector a cycle at 2.6 GHz; and bytes/s of the memory that small tensors are in.
CORE_FLOPS: Mapping[str, float] = {"avx512f": 150e9, "avx2": 60e9, "": 20e9}
CPU_BYTES = 20e9
NVLINK_BYTES = 18e9  # bytes/s of one NVLink that exchanges reach, of 25 (second to fourth generation)


def find_device(gibibytes: float | None = None, output_dir: Path | None = None, card: Card | None = None) -> Device:
    """The device that a run on this machine would use, or the one that the plan's keys select.

    Args:
        gibibytes: `plan_device_memory_gb`, memory of a GPU to plan for instead of this machine's device.
        output_dir: folder that may hold measured rates.
        card: `plan_device`, likewise.
    """
    gpu = query_gpu()
    if card is not None or gibibytes is not None:
        return planned_device(gibibytes, card, gpu)
    if gpu and torch_uses_gpus():
        # Launched processes must decide alike, and already hold device memory themselves.
        taken = gpu.taken if launched(os.environ) is None else 0.0
        users = query_users() if taken else ""
        device = Device(gpu.name, gpu.memory, host_memory(), True, rates_of(gpu.name), "rates assumed", taken, users)
    else:
        device = this_cpu(idle=gpu.name if gpu else "")
    return with_measured(device, output_dir) if output_dir else device


def planned_device(gibibytes: float | None, card: Card | None, gpu: Gpu | None) -> Device:
    """A GPU to plan for: a card by name, or a GPU with this much memory."""
    # Without a GPU here, the run will be on another machine with unknown host memory.
    host = host_memory() if gpu else None
    if card is not None:
        known = CARDS[card]
        memory = gibibytes or known.gibibytes
        return Device(f"{known.name} with {memory:g} GiB", memory * 2**30, host, True, known.rates, "rates assumed")
    assert gibibytes is not None
    usual = [name for least, name in USUAL.items() if gibibytes >= least][-1]
    like, rates = (gpu.name, rates_of(gpu.name)) if gpu else (f"an {CARDS[usual].name}", CARDS[usual].rates)
    note = f"as fast as {like}, assumed" + ("" if gpu else "; --device names another card")
    return Device(f"a GPU with {gibibytes:g} GiB", gibibytes * 2**30, host, True, rates, note)


def this_cpu(idle: str = "") -> Device:
    """The CPU of this machine, with the name of a GPU that torch cannot use, if any."""
    host, flops = host_memory(), compute_threads() * core_flops()
    rates = Rates(flops, flops, flops, CPU_BYTES, CPU_BYTES, CPU_BYTES)
    return Device("CPU", host, host, False, rates, "rates assumed", idle=idle)


def core_flops() -> float:
    """float32 FLOP/s of a core, assumed from its instructions."""
    try:
        listed = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        listed = ""
    return next(flops for instructions, flops in CORE_FLOPS.items() if instructions in listed)


def one_of_several(device: Device, *, is_planned: bool) -> Device:
    """The device of one of several processes: with NCCL's buffers, and with this machine's links.

    Args:
        is_planned: the device may not be in this machine.
    """
    links = linked() if device.is_gpu and not is_planned else {}
    return replace(device, buffers=NCCL_BUFFERS, rates=replace(device.rates, **links))


def linked() -> dict[str, float]:
    """The rate of the NVLinks between this machine's GPUs, as `link` of `Rates`; empty if unknown.

    In the matrix of `nvidia-smi topo -m`, NV18 in the row of GPU0 means 18 links to another GPU; PIX, PHB, NODE and SYS
    are paths through the host.
    """
    row = next((line.split() for line in ask_driver("topo", "-m") if line.split()[:2] == ["GPU0", "X"]), [])
    links = [int(cell[2:]) for cell in row if re.fullmatch(r"NV\d+", cell)]
    return {"link": max(links) * NVLINK_BYTES} if links else {}


def torch_uses_gpus() -> bool:
    """Whether the installed torch is built for GPUs, read from its version.py without an import; True if unknown."""
    torch = importlib.util.find_spec("torch")
    file = Path(torch.origin).with_name("version.py") if torch and torch.origin else Path()
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    values = re.findall(r"^(?:cuda|hip|xpu)\b.*= (.+)", text, re.MULTILINE)
    # Lines such as `cuda: Optional[str] = '12.8'`; a CPU build has None in all of them.
    return not values or set(values) != {"None"}


def rates_of(name: str) -> Rates:
    """Assumed rates of a GPU by name; a MIG slice gets its share in sevenths."""
    whole = next((card.rates for card in CARDS.values() if card.name in name), UNKNOWN_GPU)
    part = SLICE.search(name)
    if part is None:
        return whole
    share = int(part["sevenths"]) / 7
    # Slices do not divide the bus.
    flops = {key: share * rate for key, rate in asdict(whole).items() if key not in ("transfer", "link")}
    return replace(whole, **flops)


def with_measured(device: Device, folder: Path) -> Device:
    """The device with the rates in a folder, if they were measured on it.

    For a GPU, rates of float32 matmuls are ignored, since the assumed rates are for 16 bits.
    """
    rates = read_rates(folder)
    measured: dict[str, float] = {}
    if rates is not None and rates.device == (device.name if device.is_gpu else "cpu"):
        if rates.dtype in ("bfloat16", "float16", "") or not device.is_gpu:
            faster = rates.matmul_flops / device.rates.matmul
            measured |= {key: faster * asdict(device.rates)[key] for key in ("matmul", "attention", "sparse")}
        if rates.host_to_device_bytes is not None:
            measured["transfer"] = rates.host_to_device_bytes
    note = f"{', '.join(each for each in measured if each != 'sparse')} measured" if measured else device.note
    return replace(device, rates=replace(device.rates, **measured), note=note)


class Gpu(NamedTuple):
    """A GPU or a MIG slice: name, bytes of memory, and bytes in use, which are unknown for a slice."""

    name: str
    memory: float
    taken: float = 0.0


def query_gpu() -> Gpu | None:
    """The first NVIDIA GPU visible to this process, from nvidia-smi; None if there is none, or the driver is broken,
    which torch reports later."""
    if part := _slice(ask_driver("-L") if driver() else [], _first_visible()):
        return part
    try:
        # Split from the right, since the name may contain commas.
        name, total, used = _ask_about("gpu=name,memory.total,memory.used", _first_visible())[0].rsplit(",", 2)
        taken = float(used) * 2**20
        return Gpu(name.strip(), float(total) * 2**20, taken if taken > IDLE else 0.0)
    except (ValueError, IndexError):
        return None


def query_users() -> str:
    """The programs that compute on that GPU, such as "python (process 4711)"; excludes desktops."""
    rows = (line.partition(",") for line in _ask_about("compute-apps=pid,process_name", _first_visible()))
    return ", ".join(f"{Path(name.strip()).name} (process {pid})" for pid, _, name in rows)


def compute_capability() -> tuple[int, int] | None:
    """CUDA compute capability of that GPU; None if unknown."""
    first = _first_visible()
    # Queries answer for whole GPUs only, see `_slice`; assumes that a machine's GPUs are alike.
    answer = "".join(_ask_about("gpu=compute_cap", "" if first.startswith("MIG-") else first)[:1])
    numbers = re.fullmatch(r"(\d+)\.(\d+)", answer)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def count_gpus() -> int:
    """Number of NVIDIA GPUs visible to this process; 0 if the driver does not answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and shutil.which("nvidia-smi"):
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return sum(WHOLE.match(line) is not None for line in ask_driver("-L"))


def _first_visible() -> str:
    """The index or UUID of the first visible GPU; empty if all are visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()


def _ask_about(what: str, gpu: str) -> list[str]:
    """The answer of nvidia-smi about a GPU or the programs on it; empty if no GPU is visible."""
    words = ["-i", gpu] if gpu else []
    return ask_driver(*words, f"--query-{what}", "--format=csv,noheader,nounits") if driver() else []


def ask_driver(*words: str) -> list[str]:
    """The output lines of nvidia-smi; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _slice(listed: Sequence[str], chosen: str) -> Gpu | None:
    """The MIG slice that CUDA would use; None if it uses a whole GPU.

    nvidia-smi lists slices below their GPU, but its queries answer for whole GPUs only. CUDA uses one slice: the slice
    whose UUID is in CUDA_VISIBLE_DEVICES, else the first slice of the chosen GPU.

    Args:
        listed: output of `nvidia-smi -L`.
        chosen: an index or a UUID; empty for the first GPU.
    """
    gpu, is_meant = "", False
    for line in listed:
        whole, part = WHOLE.match(line), SLICE.search(line)
        if whole is not None:
            gpu = whole["name"]
            # CUDA also accepts the beginning of a UUID.
            is_meant = (chosen or "0") == whole["index"] or (chosen.startswith("GPU-") and chosen in line)
        elif part is not None and (chosen in line if chosen.startswith("MIG-") else is_meant):
            return Gpu(f"{gpu} {part[0]}", float(part["gigabytes"]) * SLICE_SHARE * 2**30)
    return None


def host_memory() -> float:
    """Memory of the machine in bytes, or the container's limit."""
    try:
        # cgroup v2, where "max" stands for no limit.
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    total = float(psutil.virtual_memory().total)
    return min(total, float(limit)) if limit.isdecimal() else total
