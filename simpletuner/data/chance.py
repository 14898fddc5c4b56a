"""Random choices that depend only on names and numbers, never on what was drawn before.

A crop position, a shuffled caption or the order of an epoch is the same on every machine and after every restart,
because it is derived by hashing from what it belongs to.
"""

from __future__ import annotations

import hashlib
import math
import random


def fraction(*parts: object) -> float:
    """A number in [0, 1), uniform over different parts and the same for equal ones."""
    # 56 bits are more than a float holds, and the largest numbers would be rounded to 1.
    return min(int.from_bytes(order_key(*parts)[:7], "big") / 2**56, math.nextafter(1.0, 0.0))


def generator(*parts: object) -> random.Random:
    """A separate generator, for uses that need more than one number."""
    return random.Random(order_key(*parts))


def order_key(*parts: object) -> bytes:
    """A key that sorts things into a fixed arbitrary order."""
    # File names may contain bytes that are not UTF-8; Python represents them as surrogates.
    return hashlib.sha256("\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
