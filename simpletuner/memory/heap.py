"""The process's heap."""

from __future__ import annotations

import ctypes
import platform
from functools import cache


def trim_heap() -> None:
    """Return freed memory to the system.

    glibc keeps what is freed below 32 MB for later, in pieces that tensors of other sizes do not fit into: after
    quantising a model, that is three times the packed weights.
    """
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _has_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
