"""LoKr, LoHa and LyCORIS as the plan and the budget know them: their layers, and the numbers that they train per layer.
Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from simpletuner.annexes.adapters.lycoris_file import check_lycoris, read_lycoris
from simpletuner.config.lora import LoraConfig
from simpletuner.config.option import LYCORIS, check_installed
from simpletuner.errors import Problem
from simpletuner.models.adapter_kinds import AdapterKind, Shapes
from simpletuner.models.cost import Shape
from simpletuner.models.lora_targets import Targets, matching_modules
from simpletuner.models.spec import FamilySpec

Pair = tuple[int, int]


def lokr(config: LoraConfig, spec: FamilySpec, targets: Targets, shapes: Shapes) -> dict[str, int]:
    """Trained numbers of each layer."""
    pairs = {name: [factorise(width, config.lokr_factor) for width in shapes[name][:2]]
             for name in matching_modules(shapes, targets)}  # fmt: skip
    return {name: lokr_numbers(rows, columns, config.lora_rank) for name, (rows, columns) in pairs.items()}


def loha(config: LoraConfig, spec: FamilySpec, targets: Targets, shapes: Shapes) -> dict[str, int]:
    """Trained numbers of each layer."""
    return {name: loha_numbers(config.lora_rank, shapes[name]) for name in matching_modules(shapes, targets)}


def lycoris(config: LoraConfig, spec: FamilySpec, targets: Targets, shapes: Shapes) -> dict[str, int]:
    """Trained numbers of each layer that the settings file chooses."""
    file = read_lycoris(config.lycoris_config, spec, [])
    layers = file.layers(shapes) if file else {}
    return {name: _lycoris_numbers(shapes[name], settings) for name, settings in layers.items()}


def _lycoris_numbers(shape: Shape, settings: Mapping[str, Any]) -> int:
    """Numbers of a layer of LyCORIS, in which the smaller factor comes first."""
    rank, out, into = int(settings["dim"]), shape[0], shape[1]
    rows, columns = (sorted(factorise(width, int(settings["factor"]))) for width in (out, into))
    if settings["unbalanced_factorization"]:
        rows.reverse()
    numbers = loha_numbers(rank, shape) if settings["algo"] == "loha" else rank * (out + into)
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


def lycoris_layers(
    config: LoraConfig, spec: FamilySpec, shapes: Shapes, problems: list[Problem], quantised: bool
) -> list[str]:
    """The layers that the settings file selects; empty, with a problem, if it is invalid.

    Args:
        shapes: empty if the transformer is not on this machine.
        quantised: the base model is.
    """
    faults = list(check_installed(LYCORIS, "lora_type", "lycoris"))
    file = read_lycoris(config.lycoris_config, spec, faults)
    if file is not None:
        faults += check_lycoris(file, shapes, quantised=quantised)
    problems.extend(faults)
    return [] if file is None or any(fault.fatal for fault in faults) else list(file.layers(shapes))


by_peft = partial(AdapterKind, "simpletuner.annexes.adapters.converted:add_product")
KINDS = {
    "lokr": by_peft(lokr, takes_any_rank=True),
    "loha": by_peft(loha),
    "lycoris": AdapterKind("simpletuner.annexes.adapters.lycoris:add_lycoris", lycoris, lycoris_layers),
}
