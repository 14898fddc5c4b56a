"""Finds the device without torch, and its speed: measured by an earlier run, or assumed. Free of torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import PositiveFloat, TypeAdapter, ValidationError

from simpletuner.atomic import write_json
from simpletuner.distributed.world import launched, usable_cores
from simpletuner.plan.environment import driver

RATES_FILE = "device_rates.json"


@dataclass(frozen=True)
class DeviceRates:
    """Measured speed of a device.

    Attributes:
        device: its name.
        matmul_flops: FLOP/s of a large matrix product.
        host_to_device_bytes: bytes/s of copies from page-locked memory; None without a GPU.
        dtype: dtype of the matrices, such as `bfloat16`.
    """

    device: str
    matmul_flops: PositiveFloat
    host_to_device_bytes: PositiveFloat | None = None
    dtype: str = ""


_RATES = TypeAdapter(DeviceRates)


def read_rates(folder: Path) -> DeviceRates | None:
    """The rates that an earlier session measured; None if the file is absent or invalid."""
    try:
        return _RATES.validate_json((folder / RATES_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


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
# Bytes in use on an idle device are the driver's, and part of that; they differ a little from machine to machine.
IDLE = 0.5e9
# NCCL's buffers on a device (bytes), not measured: 16 channels with four connections, of a ring and a tree, with 4, 4.7
# and 0.5 MiB for its protocols. The sizes are the defaults in its source; the number of channels depends on the links.
NCCL_BUFFERS = 16 * 4 * 9.2 * 2**20
# Softmax attention, forward and backward, reaches about this share of the rate of matrix products.
ATTENTION_SHARE = 0.55


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matrix products and attention, bytes/s of device memory and of copies from the host."""

    matmul: float
    attention: float
    memory: float
    transfer: float


@dataclass(frozen=True)
class Device:
    """The device that trains.

    Attributes:
        name: as reported by the driver.
        memory: its bytes; None if unknown.
        host_memory: bytes of the machine; None if unknown.
        is_gpu: it has its own memory; otherwise it uses the host's.
        rates: assumed or measured.
        note: which of the rates are assumed or measured, for the plan.
        taken: bytes of its memory that other programs use now.
        users: these programs, as far as the driver names them.
        idle: the GPU of this machine that torch cannot use.
        buffers: bytes that NCCL takes; 0 for one process.
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
    def usable(self) -> float | None:
        """Bytes that a run can use; None if unknown."""
        if self.memory is None or not self.is_gpu:
            return self.memory
        return self.memory * (1 - FRAGMENTS) - DEVICE_OVERHEAD - self.taken - self.buffers

    @property
    def taken_by_others(self) -> str:
        """What other programs use of the memory, as a phrase; empty if they use none."""
        return f"{gigabytes(self.taken)} in use by {self.users or 'other programs'}" if self.taken else ""


def gigabytes(number: float) -> str:
    """Bytes as text, in GB or MB (10^9 or 10^6 bytes)."""
    return f"{number / 1e6:.3g} MB" if number < 0.95e8 else f"{number / 1e9:.1f} GB"


def compared(number: float, limit: float) -> tuple[str, str]:
    """Two numbers of bytes as text, with as many digits as show which is larger: 16.14 GB and 16.06 GB."""
    texts = gigabytes(number), gigabytes(limit)
    return (f"{number / 1e9:.3f} GB", f"{limit / 1e9:.3f} GB") if texts[0] == texts[1] else texts


def _rates(tflops: float, memory_tb: float, transfer_gb: float) -> Rates:
    return Rates(tflops * 1e12, ATTENTION_SHARE * tflops * 1e12, memory_tb * 1e12, transfer_gb * 1e9)


# Sustained bf16 matrix products (TFLOP/s), memory (TB/s) and copies from page-locked host memory (GB/s): 60 to 75 % of
# the data sheets' values for dense products. The first entry whose name occurs in the device's name is used, so longer
# names come before shorter ones.
KNOWN: tuple[tuple[str, Rates], ...] = (
    ("B200", _rates(1200, 6.0, 55)),
    ("H200", _rates(600, 4.0, 55)),
    ("H100 PCIe", _rates(400, 1.6, 55)),
    ("H100", _rates(600, 2.6, 55)),
    ("A100", _rates(220, 1.4, 24)),
    ("A30", _rates(100, 0.75, 24)),
    ("L40S", _rates(200, 0.7, 24)),
    ("L40", _rates(110, 0.7, 24)),
    ("RTX PRO 6000", _rates(320, 1.4, 50)),
    ("RTX 6000 Ada", _rates(180, 0.75, 24)),
    ("A6000", _rates(80, 0.6, 24)),
    ("A5000", _rates(60, 0.6, 24)),
    ("A4000", _rates(45, 0.35, 24)),
    ("A40", _rates(80, 0.55, 24)),
    ("RTX 5090", _rates(150, 1.4, 50)),
    ("RTX 5080", _rates(80, 0.75, 50)),
    ("RTX 5070 Ti", _rates(63, 0.7, 50)),
    ("RTX 5070", _rates(44, 0.52, 50)),
    ("RTX 5060 Ti", _rates(34, 0.35, 25)),
    ("RTX 5060", _rates(28, 0.35, 25)),
    ("RTX 4090", _rates(130, 0.8, 24)),
    ("RTX 4080", _rates(80, 0.55, 24)),
    ("RTX 4070 Ti SUPER", _rates(66, 0.52, 24)),
    ("RTX 4070 Ti", _rates(60, 0.39, 24)),
    ("RTX 4070 SUPER", _rates(53, 0.39, 24)),
    ("RTX 4070", _rates(44, 0.39, 24)),
    ("RTX 4060 Ti", _rates(33, 0.22, 12)),
    ("RTX 4060", _rates(23, 0.21, 12)),
    ("RTX 3090", _rates(55, 0.75, 24)),
    ("RTX 3080 Ti", _rates(51, 0.7, 24)),
    ("RTX 3080", _rates(45, 0.6, 24)),
    ("RTX 3070 Ti", _rates(33, 0.48, 24)),
    ("RTX 3070", _rates(31, 0.36, 24)),
    ("RTX 3060 Ti", _rates(25, 0.36, 24)),
    ("RTX 3060", _rates(19, 0.29, 24)),
    ("A10", _rates(60, 0.45, 24)),
    ("L4", _rates(55, 0.25, 20)),
    ("T4", _rates(25, 0.25, 11)),
)
UNKNOWN_GPU = _rates(50, 0.5, 11)
# (GiB, card): the usual card with at least that much memory, for `--device-memory`.
USUAL = ((0, "RTX 3060"), (15, "RTX 4080"), (20, "RTX 4090"), (30, "RTX 5090"), (40, "A100"), (120, "H200"))
CORE_FLOPS, CPU_BYTES = 20e9, 20e9  # conservative guesses: FLOP/s per core, bytes/s of memory


def find_device(planned_gigabytes: float | None = None, output_dir: Path | None = None) -> Device:
    """The device that a run on this machine would use, or the one that `plan_device_memory_gb` asks for.

    Args:
        planned_gigabytes: memory in GiB of a GPU to plan for instead of this machine's device.
        output_dir: folder that may hold measured rates.
    """
    gpu = query_gpu()
    host = host_memory()
    if planned_gigabytes is not None:
        name, memory = f"a GPU with {planned_gigabytes:g} GiB", planned_gigabytes * 2**30
        like = gpu.name if gpu else "an " + [card for least, card in USUAL if planned_gigabytes >= least][-1]
        # Without a GPU here, the run will be on another machine, whose host memory is unknown.
        return Device(name, memory, host if gpu else None, True, rates_of(like), f"as fast as {like}, assumed")
    if gpu and torch_uses_gpus():
        # Processes that a launcher started must decide alike, and hold memory of the device themselves by now.
        taken = gpu.taken if launched(os.environ) is None else 0.0
        users = query_users() if taken else ""
        device = Device(gpu.name, gpu.memory, host, True, rates_of(gpu.name), "rates assumed", taken, users)
    else:
        device = this_cpu(idle=gpu.name if gpu else "")
    return with_measured(device, output_dir) if output_dir else device


def this_cpu(idle: str = "") -> Device:
    """The processor of this machine, with the name of a GPU that torch cannot use."""
    host, flops = host_memory(), usable_cores() * CORE_FLOPS
    return Device("CPU", host, host, False, Rates(flops, flops, CPU_BYTES, CPU_BYTES), "rates assumed", idle=idle)


def torch_uses_gpus() -> bool:
    """Whether the installed torch was built for GPUs, as its version.py tells without an import; assumed otherwise."""
    torch = importlib.util.find_spec("torch")
    file = Path(torch.origin).with_name("version.py") if torch and torch.origin else Path()
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    values = re.findall(r"^(?:cuda|hip|xpu)\b.*= (.+)", text, re.MULTILINE)
    # Lines such as `cuda: Optional[str] = '12.8'`; a CPU build has None in all of them.
    return not values or set(values) != {"None"}


def rates_of(name: str) -> Rates:
    """Assumed rates of a GPU by name; a MIG slice gets its share in sevenths."""
    whole = next((rates for known, rates in KNOWN if known in name), UNKNOWN_GPU)
    part = SLICE.search(name)
    if part is None:
        return whole
    share = int(part["sevenths"]) / 7
    # Slices do not divide the bus.
    return replace(whole, matmul=share * whole.matmul, attention=share * whole.attention, memory=share * whole.memory)


def with_measured(device: Device, folder: Path) -> Device:
    """The device with the rates in a folder, if they were measured on it.

    Rates of float32 products are ignored: the assumed rates are for 16 bits.
    """
    rates = read_rates(folder)
    measured: dict[str, float] = {}
    if rates is not None and rates.device == device.name:
        if rates.dtype in ("bfloat16", "float16", ""):
            measured |= {"matmul": rates.matmul_flops, "attention": ATTENTION_SHARE * rates.matmul_flops}
        if rates.host_to_device_bytes is not None:
            measured["transfer"] = rates.host_to_device_bytes
    note = f"{', '.join(measured)} measured" if measured else device.note
    return replace(device, rates=replace(device.rates, **measured), note=note)


class Gpu(NamedTuple):
    """A GPU or a part of one: its name, its bytes of memory, and those in use; of a part the driver does not know."""

    name: str
    memory: float
    taken: float = 0.0


def query_gpu() -> Gpu | None:
    """The first NVIDIA GPU visible to this process, from nvidia-smi; None if there is none, or the driver is broken,
    which torch reports later."""
    if part := _slice(ask_driver("-L") if driver() else [], _first_visible()):
        return part
    try:
        # From the right, whatever the name holds.
        name, total, used = _ask_about("gpu=name,memory.total,memory.used", _first_visible())[0].rsplit(",", 2)
        taken = float(used) * 2**20
        return Gpu(name.strip(), float(total) * 2**20, taken if taken > IDLE else 0.0)
    except (ValueError, IndexError):
        return None


def query_users() -> str:
    """The programs that compute on that GPU, such as "python (process 4711)"; desktops are not among them."""
    rows = (line.partition(",") for line in _ask_about("compute-apps=pid,process_name", _first_visible()))
    return ", ".join(f"{Path(name.strip()).name} (process {pid})" for pid, _, name in rows)


def compute_capability() -> tuple[int, int] | None:
    """CUDA compute capability of that GPU; None if unknown."""
    first = _first_visible()
    # Queries answer for whole GPUs only, see `_slice`; those of one machine are taken to be alike.
    answer = "".join(_ask_about("gpu=compute_cap", "" if first.startswith("MIG-") else first)[:1])
    numbers = re.fullmatch(r"(\d+)\.(\d+)", answer)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def count_gpus() -> int:
    """How many NVIDIA GPUs this process sees; 0 if there are none or the driver does not answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and shutil.which("nvidia-smi"):
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return sum(WHOLE.match(line) is not None for line in ask_driver("-L"))


def _first_visible() -> str:
    """The index or UUID of the first visible GPU; empty if all are visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()


def _ask_about(what: str, gpu: str) -> list[str]:
    """The answer of nvidia-smi about a GPU, or about the programs on it; nothing if none is visible."""
    words = ["-i", gpu] if gpu else []
    return ask_driver(*words, f"--query-{what}", "--format=csv,noheader,nounits") if driver() else []


def ask_driver(*words: str) -> list[str]:
    """The lines that nvidia-smi prints; none if it is not there, fails or hangs."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _slice(listed: Sequence[str], chosen: str) -> Gpu | None:
    """The MIG slice that CUDA would use; None if it uses a whole GPU.

    nvidia-smi lists slices below their GPU, but its queries answer for whole GPUs only. CUDA uses one slice: the one
    whose UUID is in CUDA_VISIBLE_DEVICES, otherwise the first of the chosen GPU.

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


def host_memory() -> float | None:
    """Memory of the machine in bytes, or the container's limit; None if unknown."""
    try:
        total = float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    try:
        # cgroup v2, where "max" stands for no limit.
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        limit = ""
    return min(total, float(limit)) if limit.isdecimal() else total
