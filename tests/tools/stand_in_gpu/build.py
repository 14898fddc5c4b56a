"""Compiles the stand-in beside the CUDA build of torch, for the Python that runs this."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from simpletuner.errors import UserError

HERE = Path(__file__).parent
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
CFLAGS = ("-std=c11", "-Wall", "-Wextra", "-O2", "-fPIC", "-shared")
DEVICE = (HERE / "memory.c", HERE / "streams.c")
# torch calls this when it is imported, as it does for the packages of other devices.
ENTRY_POINT = "[torch.backends]\nstand_in_gpu = tests.tools.stand_in_gpu.mirror:install\n"


def build(folder: Path) -> list[Path]:
    """Compile the stand-ins for CUDA's runtime, driver and management, and tell torch of them.

    Raises:
        UserError: torch is not built for CUDA.
    """
    real = next(SITE_PACKAGES.glob("nvidia/cu*/lib/libcudart.so.*"), None)
    if real is None:
        raise UserError(f"{SITE_PACKAGES} has no CUDA build of torch")
    package = folder / "stand_in_gpu-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Name: stand-in-gpu\nVersion: 1\n")
    (package / "entry_points.txt").write_text(ENTRY_POINT)

    # torch's libraries ask for functions of this version of the runtime.
    versions = folder / "versions.map"
    versions.write_text(f"{real.name} {{ global: *; }};\n")
    missing = folder / "missing.c"
    refused = refusals(functions_of(real) - implemented())
    if not missing.exists() or missing.read_text() != refused:
        missing.write_text(refused)
    includes = (
        f"-I{real.parents[1] / 'include'}",
        f"-I{SITE_PACKAGES / 'triton/backends/nvidia/include'}",  # what those headers include
    )
    runtime = folder / real.name
    driver = folder / "libcuda.so.1"
    management = folder / "libnvidia-ml.so.1"
    compile_library(
        runtime,
        (*DEVICE, HERE / "runtime.c", missing),
        (*includes, f"-Wl,--version-script={versions}"),
    )
    compile_library(driver, (HERE / "driver.c", runtime), includes)
    compile_library(management, (HERE / "nvml.c",))
    return [runtime, driver, management]


def compile_library(target: Path, sources: Sequence[Path], options: Sequence[str] = ()) -> None:
    """Compile sources into a library, unless it is newer than they are."""
    ours = [*sources, *HERE.glob("*.h")]
    if target.exists() and all(target.stat().st_mtime > path.stat().st_mtime for path in ours):
        return
    made = target.with_suffix(f".{os.getpid()}")  # another process may be using the present one
    name = f"-Wl,-soname,{target.name}"
    words = ["gcc", *CFLAGS, *options, name, *map(str, sources), "-o", str(made)]
    subprocess.run(words, check=True)
    made.replace(target)


def functions_of(library: Path) -> set[str]:
    """What a library offers."""
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True
    )
    return set(re.findall(r"\bT (\w+)", symbols.stdout))


def implemented() -> set[str]:
    """What runtime.c defines or calls."""
    return set(re.findall(r"\b(\w*cuda\w+)\(", (HERE / "runtime.c").read_text()))


def refusals(names: set[str]) -> str:
    """Functions that only say that they are missing."""
    lines = [f'int {name}(void) {{ return stand_in_unsupported("{name}"); }}' for name in names]
    return "\n".join(["int stand_in_unsupported(const char *name);", *sorted(lines), ""])
