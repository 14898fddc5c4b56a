"""This process: environment variables that native libraries read, and garbage collection."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def set_environment() -> None:
    """Set variables that native libraries read when they are loaded, unless the user has."""
    # The order of nvidia-smi, which the plan reads; by default CUDA puts the fastest card first.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Waiting OpenMP threads spin, by default so long that on a busy CPU a step took 30 times as
    # long. Without spinning, a step of the demo takes 2.5 times as long on an idle CPU; this count
    # costs 6 % there.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def configure_torch() -> None:
    """Set variables that torch reads on import, unless the user has."""
    # Avoids fragmentation of GPU memory by buckets of many shapes.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch logs every connection attempt


@contextmanager
def without_gc() -> Iterator[None]:
    """Import or plan without garbage collection, and exempt the result from it.

    Importing torch and listing many files create long-lived objects, which later collections would
    scan for nothing. Does nothing if torch is already imported: the process then belongs to a
    calling program, as do its objects.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
