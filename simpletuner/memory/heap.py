"""Control of glibc's heap."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

# Options of glibc's `mallopt`, and the values to which glibc raises them for large tensors.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
ADAPTED = {MMAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}
LARGE = 2**20  # bytes


def trim_heap() -> None:
    """Return freed memory to the system.

    glibc caches freed blocks below 32 MB, which do not fit tensors of other sizes. After quantising
    a model, the cache is three times as large as the packed weights.
    """
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def large_tensors_apart() -> Iterator[None]:
    """Keep large tensors out of the heap: their memory returns to the system when they are freed.

    In the heap, long-lived small tensors fragment the space of large temporary ones, and the heap
    grows.
    """
    if not _has_glibc():
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        for option, value in ADAPTED.items():
            libc.mallopt(option, value)


@cache
def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
