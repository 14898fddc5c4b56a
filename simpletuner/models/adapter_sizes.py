"""Numbers per layer that adapters other than LoRA train. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from simpletuner.annexes.adapters.lycoris_file import read_lycoris
from simpletuner.config.lora import LoraConfig
from simpletuner.models.cost import Adapters, Shape
from simpletuner.models.lora_targets import Targets, matching_modules
from simpletuner.models.spec import FamilySpec

Pair = tuple[int, int]


def planned_adapters(config: LoraConfig, spec: FamilySpec, targets: Targets, shapes: Mapping[str, Shape]) -> Adapters:
    """The adapter that a config adds to a transformer.

    Args:
        shapes: of the weights of its layers, by layer.
    """
    file = read_lycoris(config.lycoris_config, spec, []) if config.lora_type == "lycoris" else None
    if file is not None:
        products = {name: _lycoris_numbers(shapes[name], settings) for name, settings in file.layers(shapes).items()}
        return Adapters(config.lora_rank, frozenset(products), products)
    modules, rank, products = matching_modules(shapes, targets), config.lora_rank, {}
    if config.lora_type == "lokr":
        pairs = {name: [factorise(width, config.lokr_factor) for width in shapes[name][:2]] for name in modules}
        products = {name: lokr_numbers(rows, columns, rank) for name, (rows, columns) in pairs.items()}
    elif config.lora_type == "loha":
        products = {name: loha_numbers(rank, shapes[name]) for name in modules}
    return Adapters(rank, frozenset(modules), products)


def _lycoris_numbers(shape: Shape, settings: Mapping[str, Any]) -> int:
    """Numbers of a layer of LyCORIS, in which the smaller factor comes first."""
    rank, out, into = int(settings["dim"]), shape[0], shape[1]
    rows, columns = (sorted(factorise(width, int(settings["factor"]))) for width in (out, into))
    if settings["unbalanced_factorization"]:
        rows.reverse()
    numbers = {"loha": loha_numbers(rank, shape)}.get(settings["algo"], rank * (out + into))
    if settings["algo"] == "lokr":
        full, both = settings["full_matrix"], settings["decompose_both"]
        numbers = lokr_numbers((rows[0], rows[1]), (columns[0], columns[1]), rank, full=full, both=both)
    magnitudes = (out if settings["wd_on_output"] else into) if settings["dora_wd"] else 0
    return numbers + magnitudes + bool(settings["use_scalar"])


def lokr_numbers(rows: Pair, columns: Pair, rank: int, *, full: bool = False, both: bool = False) -> int:
    """Numbers of a LoKr: W1 (a, m) and W2 (k, n), each full or as two matrices of the rank.

    Args:
        rows: (a, k), whose product is the layer's output width.
        columns: (m, n), whose product is its input width.
        full: never use matrices of the rank.
        both: low-rank factors may also replace W1.
    """
    (a, k), (m, n) = rows, columns
    first = rank * (a + m) if both and not full and rank < max(a, m) / 2 else a * m
    return first + (rank * (k + n) if not full and rank < max(k, n) / 2 else k * n)


def loha_numbers(rank: int, shape: Shape) -> int:
    """Numbers of a LoHa: two pairs of matrices."""
    return 2 * rank * (shape[0] + shape[1])


def factorise(width: int, factor: int) -> Pair:
    """A width as a product of two numbers.

    Args:
        factor: the first number, if it divides the width; else the upper limit of the first, smaller number. -1: no
            limit, so that the two are as close as possible.
    """
    if factor > 0 and width % factor == 0:
        return factor, width // factor
    limit = math.isqrt(width) if factor < 0 else min(max(factor, 1), math.isqrt(width))
    small = max(each for each in range(1, limit + 1) if width % each == 0)
    return small, width // small
