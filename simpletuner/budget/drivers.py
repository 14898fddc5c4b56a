"""Asks the drivers of this machine about its GPUs.

NVIDIA's and AMD's drivers come with a program, Apple's chips are known to the system. Where no
program answers but the driver's device files are there (containers, Intel), torch is asked in a
process of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from simpletuner.planning.environment import driver

# What a build of torch can use; ROCm's devices are called `cuda` there.
Backend = Literal["cuda", "rocm", "xpu", "mps"]
BACKENDS: dict[str, Backend] = {"cuda": "cuda", "hip": "rocm", "xpu": "xpu"}
# Names of the backends for messages.
TITLES: dict[Backend, str] = {"cuda": "CUDA", "rocm": "ROCm", "xpu": "XPU", "mps": "Apple"}
# Variables that choose GPUs, in the order in which ROCm applies them.
VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

QUERY_SECONDS = 5  # a hung driver must not block the plan
TORCH_SECONDS = 60  # importing torch from a slow disk
# Files by which a driver that a build of torch can use is known; /dev/dxg is that of Windows'
# Linux. Every desktop has a render node, so it says something to a build for Intel's GPUs alone.
DEVICE_FILES: dict[Backend, tuple[str, ...]] = {
    "cuda": ("/dev/nvidiactl", "/dev/dxg"),
    "rocm": ("/dev/kfd", "/dev/dxg"),
    "xpu": ("/dev/dri/renderD128", "/dev/dxg"),
    "mps": (),
}
ASK_TORCH = """
import json, torch
device = torch.accelerator.current_accelerator(check_available=True)
if device is not None:
    properties = torch.get_device_module(device).get_device_properties(0)
    print(json.dumps([properties.name, properties.total_memory]))
"""
# Share of an Apple machine's memory that Metal lets one process use, on most machines.
METAL_SHARE = 0.75
# Bytes that the driver uses on an idle device, part of DEVICE_OVERHEAD; they differ slightly
# between machines.
IDLE = 0.5e9
# Lines of `nvidia-smi -L`: "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-...)", and below a GPU its MIG
# slices: "MIG 3g.40gb Device 0: (...)".
WHOLE = re.compile(r"GPU (?P<index>\d+): (?P<name>.+?) \(UUID")
SLICE = re.compile(r"MIG (?P<sevenths>\d)g\.(?P<gigabytes>\d+)gb")
SLICE_SHARE = 0.97  # usable share of the memory in the name of a MIG slice


class Gpu(NamedTuple):
    """A GPU or a MIG slice.

    Attributes:
        memory: bytes; for Apple's chips, those of the machine that a process can use.
        taken: bytes in use, which are unknown for a slice.
    """

    name: str
    memory: float
    taken: float = 0.0
    backend: Backend = "cuda"


def query_gpu() -> Gpu | None:
    """The first GPU visible to this process; None without a GPU or with a broken driver."""
    # torch reports a broken driver.
    return query_nvidia() or query_amd() or query_apple() or ask_torch()


def query_nvidia() -> Gpu | None:
    """The first visible NVIDIA GPU, from nvidia-smi."""
    chosen = _first_visible()
    listed = ask_driver("-L") if driver() else []
    mig_slice = _slice(listed, chosen)
    if mig_slice is not None:
        return mig_slice
    lines = _ask_about("gpu=name,memory.total,memory.used", chosen)
    try:
        # Split from the right, since the name may contain commas.
        name, total, used = lines[0].rsplit(",", 2)
        return Gpu(name.strip(), float(total) * 2**20, _taken(float(used) * 2**20))
    except (ValueError, IndexError):
        return None


def _taken(used: float) -> float:
    """Bytes that other programs use, of the bytes in use."""
    return used if used > IDLE else 0.0


def query_amd() -> Gpu | None:
    """The first visible AMD GPU, from rocm-smi."""
    cards = _amd_cards()
    chosen = _chosen_amd(len(cards))
    if not chosen:
        return None
    card = cards[chosen[0]]
    try:
        memory = float(card["VRAM Total Memory (B)"])
        used = float(card["VRAM Total Used Memory (B)"])
    except (KeyError, ValueError):
        return None
    name = card.get("Card Series") or card.get("Card series") or card.get("Card Model") or "AMD GPU"
    return Gpu(name.strip(), memory, _taken(used), "rocm")


def _amd_cards() -> list[dict[str, str]]:
    """The facts of all cards from rocm-smi, in the order of their numbers."""
    lines = _run("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")
    try:
        answer = json.loads("\n".join(lines))
    except ValueError:
        return []
    if not isinstance(answer, dict):
        return []
    cards = {}
    for key, values in answer.items():
        number = key.removeprefix("card")
        if number.isdecimal() and isinstance(values, dict):
            cards[int(number)] = values
    return [cards[number] for number in sorted(cards)]


def _chosen_amd(count: int) -> list[int]:
    """Numbers of the visible cards, of `count`."""
    for variable in VISIBLE:
        listed = os.environ.get(variable)
        if listed is not None:
            numbers = [int(word) for word in listed.split(",") if word.strip().isdecimal()]
            return [number for number in numbers if number < count]
    return list(range(count))


def query_apple() -> Gpu | None:
    """The chip of an Apple machine, whose GPU uses the machine's memory."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return None
    name = "".join(_run("sysctl", "-n", "machdep.cpu.brand_string")[:1])
    total = "".join(_run("sysctl", "-n", "hw.memsize")[:1])
    memory = float(total) if total.isdecimal() else float(psutil.virtual_memory().total)
    return Gpu(name or "Apple chip", METAL_SHARE * memory, backend="mps")


@functools.cache
def ask_torch() -> Gpu | None:
    """The GPU that torch finds in a process of its own; None if it cannot have one.

    The import takes seconds, so torch is asked only where a driver's files show that there may be a
    GPU.
    """
    backend = torch_backend()
    if not backend:
        return None
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    has_driver = any(Path(file).exists() for file in DEVICE_FILES[backend])
    if is_hidden or not has_driver:
        return None
    lines = _run(sys.executable, "-c", ASK_TORCH, seconds=TORCH_SECONDS)
    try:
        name, memory = json.loads(lines[-1])
        return Gpu(str(name), float(memory), backend=backend)
    except (IndexError, ValueError, TypeError):
        return None


def torch_backend() -> Backend | Literal[""] | None:
    """What the installed torch is built for, read from its version.py without an import.

    Returns:
        an empty text for a build for CPUs; None if unknown.
    """
    if platform.system() == "Darwin":
        return "mps" if platform.machine() == "arm64" else ""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    file = Path(torch.origin).with_name("version.py")
    if not file.is_file():
        return None
    # Lines such as `cuda: Optional[str] = '12.8'`; a CPU build has None in all of them.
    text = file.read_text(encoding="utf-8")
    versions = re.findall(r"^(cuda|hip|xpu)\b.*= (.+)", text, re.MULTILINE)
    for name, version in versions:
        if version != "None":
            return BACKENDS[name]
    return "" if versions else None


def torch_uses_gpus() -> bool:
    """Whether the installed torch is built for GPUs; True if unknown."""
    return torch_backend() != ""


def is_for_torch(gpu: Gpu) -> bool:
    """Whether the installed torch, if it is built for GPUs, is built for those of this vendor."""
    is_unknown_or_for_cpus = not torch_backend()
    return is_unknown_or_for_cpus or torch_backend() == gpu.backend


def query_users() -> str:
    """The programs that compute on the NVIDIA GPU, such as "python (process 4711)"."""
    users = []
    for line in _ask_about("compute-apps=pid,process_name", _first_visible()):
        pid, _, path = line.partition(",")
        users.append(f"{Path(path.strip()).name} (process {pid})")
    return ", ".join(users)


def compute_capability() -> tuple[int, int] | None:
    """CUDA compute capability of the NVIDIA GPU; None if unknown."""
    gpu = _first_visible()
    if gpu.startswith("MIG-"):
        # Queries answer for whole GPUs only, see `_slice`. Any will do if a machine's are alike.
        gpu = ""
    lines = _ask_about("gpu=compute_cap", gpu)
    numbers = re.fullmatch(r"(\d+)\.(\d+)", lines[0]) if lines else None
    if numbers is None:
        return None
    return int(numbers[1]), int(numbers[2])


def count_gpus() -> int:
    """Number of GPUs visible to this process; 0 if no driver answers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and shutil.which("nvidia-smi"):
        return len([number for number in visible.split(",") if number.strip() not in ("", "-1")])
    nvidia = sum(WHOLE.match(line) is not None for line in ask_driver("-L"))
    return nvidia or len(_chosen_amd(len(_amd_cards())))


def _first_visible() -> str:
    """The index or UUID of the first visible GPU; empty if all are visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()


def _ask_about(what: str, gpu: str) -> list[str]:
    """The answer of nvidia-smi about a GPU or the programs on it; empty if no GPU is visible."""
    if not driver():
        return []
    selection = ["-i", gpu] if gpu else []
    return ask_driver(*selection, f"--query-{what}", "--format=csv,noheader,nounits")


def ask_driver(*words: str) -> list[str]:
    """The output lines of nvidia-smi; empty if it is missing, fails or hangs."""
    return _run("nvidia-smi", *words)


def _run(*command: str, seconds: float = QUERY_SECONDS) -> list[str]:
    """The output lines of a program; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _slice(listed: Sequence[str], chosen: str) -> Gpu | None:
    """The MIG slice that CUDA would use; None if it uses a whole GPU.

    nvidia-smi lists slices below their GPU, but its queries answer for whole GPUs only. CUDA uses
    one slice: the slice whose UUID is in CUDA_VISIBLE_DEVICES, else the first slice of the chosen
    GPU.

    Args:
        listed: output of `nvidia-smi -L`.
        chosen: an index or a UUID; empty for the first GPU.
    """
    name = ""
    is_chosen = False
    for line in listed:
        gpu = WHOLE.match(line)
        if gpu is not None:
            name = gpu["name"]
            # CUDA also accepts the beginning of a UUID.
            has_uuid = chosen.startswith("GPU-") and chosen in line
            is_chosen = has_uuid or (chosen or "0") == gpu["index"]
            continue
        mig_slice = SLICE.search(line)
        if mig_slice is None:
            continue
        if chosen.startswith("MIG-"):
            is_chosen = chosen in line
        if is_chosen:
            memory = float(mig_slice["gigabytes"]) * SLICE_SHARE * 2**30
            return Gpu(f"{name} {mig_slice[0]}", memory)
    return None
