"""How many numbers adapters other than LoRA train for a layer. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from simpletuner.config.lora import LoraConfig
from simpletuner.models.cost import Adapters, Shape

Pair = tuple[int, int]


def adapters_of(config: LoraConfig, shapes: Mapping[str, Shape]) -> Adapters:
    """The adapter that a config adds to layers, given the shapes of their weights."""
    modules, products = frozenset(shapes), {}
    if config.lora_type == "lokr":
        pairs = {name: [factorise(width, config.lokr_factor) for width in shape[:2]] for name, shape in shapes.items()}
        products = {name: lokr_numbers(rows, columns, config.lora_rank) for name, (rows, columns) in pairs.items()}
    elif config.lora_type == "loha":
        products = {name: loha_numbers(shape, config.lora_rank) for name, shape in shapes.items()}
    return Adapters(config.lora_rank, modules, products)


def lokr_numbers(rows: Pair, columns: Pair, rank: int, *, full: bool = False, both: bool = False) -> int:
    """Numbers of a LoKr: W1 (a, m) and W2 (k, n), each of them or two matrices of the rank.

    Args:
        rows: (a, k), whose product is the layer's output width.
        columns: (m, n), whose product is its input width.
        full: never use matrices of the rank.
        both: they may replace W1, too.
    """
    (a, k), (m, n) = rows, columns
    first = rank * (a + m) if both and not full and rank < max(a, m) / 2 else a * m
    return first + (rank * (k + n) if not full and rank < max(k, n) / 2 else k * n)


def loha_numbers(shape: Shape, rank: int) -> int:
    """Numbers of a LoHa: two pairs of matrices."""
    return 2 * rank * (shape[0] + shape[1])


def factorise(width: int, factor: int) -> Pair:
    """A width as a product of two numbers.

    Args:
        factor: the first number, if it divides the width; else a limit of the first, which is the smaller one. -1: no
            limit, so that the two are as near to each other as possible.
    """
    if factor > 0 and width % factor == 0:
        return factor, width // factor
    limit = math.isqrt(width) if factor < 0 else min(max(factor, 1), math.isqrt(width))
    small = max(each for each in range(1, limit + 1) if width % each == 0)
    return small, width // small
