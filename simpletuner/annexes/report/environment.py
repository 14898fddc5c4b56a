"""Versions, system and device of a run, for the report, the model card and bug reports."""

from __future__ import annotations

import os
import platform
import sys

from simpletuner.planning.resume import package_versions


def describe_environment(device: str | None = None) -> dict[str, str]:
    """Names and values, most relevant first.

    Args:
        device: the training device; None queries torch if it is already imported.
    """
    environment = {
        "device": device or describe_device(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "processor": f"{os.cpu_count()} cores",
    }
    return environment | package_versions()


def describe_device() -> str:
    """The accelerator's name and memory, `cpu`, or `unknown` until torch is imported."""
    if "torch" not in sys.modules:
        return "unknown"
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        version = f"CUDA {torch.version.cuda}"
        if not torch.version.cuda:  # ROCm's build of torch calls its GPUs cuda, too
            version = f"ROCm {torch.version.hip}"
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {version}"
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return "cpu"
    return "Apple GPU" if device.type == "mps" else f"{device.type.upper()} GPU"
