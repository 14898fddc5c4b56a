"""The process's heap."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# Options of glibc's `mallopt`, and their values once glibc has adapted them to large tensors.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
ADAPTED = {MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}
LARGE = 2**20  # bytes


def trim_heap() -> None:
    """Return freed memory to the system.

    glibc keeps what is freed below 32 MB for later, in pieces that tensors of other sizes do not fit into: after
    quantising a model, that is three times the packed weights.
    """
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def large_tensors_apart() -> Iterator[None]:
    """Keep large tensors out of the heap: their memory goes back to the system as soon as they are freed.

    In the heap, long-lived small tensors fragment the space of large temporary ones, and the heap grows.
    """
    if _has_glibc():
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        for option, value in ADAPTED.items() if _has_glibc() else ():
            ctypes.CDLL(None).mallopt(option, value)


@cache
def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
