"""Importing torch and what comes with it, as quickly as it goes.

A start imports some five thousand modules. The garbage collector counts the objects they make, walks through all of
them again and again, and finds nothing: a tenth of the time. Later every full collection walks through them too.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without the collector, and take what was imported out of its sight for good.

    Does nothing in a process that has torch already: what lives there is not ours to set aside.
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
