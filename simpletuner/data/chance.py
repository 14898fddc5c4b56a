"""Stateless random choices: a function of names and numbers, never of earlier draws.

A crop position, a shuffled caption or the order of an epoch is the same on every machine and after
every restart, because it is a hash of the seed and of the names it applies to.
"""

from __future__ import annotations

import math
import random

from simpletuner.hashing import hash_text


def fraction(*parts: object) -> float:
    """A number in [0, 1), uniform over different parts and the same for equal ones."""
    number = int.from_bytes(order_key(*parts)[:7], "big")
    # A float has 53 bits: the largest 56-bit numbers would round up to 1.
    return min(number / 2**56, math.nextafter(1.0, 0.0))


def generator(*parts: object) -> random.Random:
    """An independent generator, for uses that need more than one number."""
    return random.Random(order_key(*parts))


def order_key(*parts: object) -> bytes:
    """A sort key for a fixed but arbitrary order."""
    return bytes.fromhex(hash_text("\x1f".join(map(str, parts))))
