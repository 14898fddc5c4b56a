"""Guesses the costs of a family that is not measured yet, from the shapes of its weights.

Parameters, and with them the bytes of weights, gradients and optimizer state, are exact. FLOPs and
activations are rather too high: every product of a large block counts as applied to all tokens,
attention as dense, and a block keeps as much as the blocks of the measured families keep at most.
Imports no torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from simpletuner.models.cost_table import CostTable, Factors, numbered, read_cost_table
from simpletuner.weights.files import Shape, Shapes

# Words in the paths of layers that are applied once per sample, such as modulations, or once per
# text token.
SAMPLE_WORDS = ("time", "modulation", "norm", "adaln", "pooled", "guidance")
TEXT_WORDS = ("text", "txt", "caption", "context", "prompt")
# Bytes of a block by dtype: about the largest of the measured families. The names are those of
# `CostTable.bytes`, and `TransformerCost._numbers` has what is multiplied.
SAVED: Mapping[str, Factors] = {
    "bf16": {"token width": 56.0, "token inner": 8.0, "token heads": 20.0, "text width": 8.0},
    "fp32": {"token width": 72.0, "token inner": 16.0, "token heads": 20.0, "text width": 12.0},
}
TRAINED: Mapping[str, Factors] = {
    "bf16": {"token width": 78.0, "token inner": 8.0, "token heads": 20.0, "text width": 12.0},
    "fp32": {"token width": 96.0, "token inner": 16.0, "token heads": 20.0, "text width": 16.0},
}
TRANSIENT: Mapping[str, Factors] = {
    "bf16": {"token width": 6.0, "token inner": 4.0},
    "fp32": {"token width": 8.0, "token inner": 8.0},
}
OUTSIDE: Mapping[str, Factors] = {
    "bf16": {"token head": 8.0, "text width": 2.0},
    "fp32": {"token head": 8.0, "text width": 4.0},
}
SAMPLING: Mapping[str, Factors] = {
    "bf16": {"token width": 24.0, "token inner": 4.0},
    "fp32": {"token width": 24.0, "token inner": 8.0},
}
TRAFFIC: Mapping[str, Factors] = {
    "bf16": {"token width": 354.0, "token inner": 9.0},
    "fp32": {"token width": 320.0, "token inner": 18.0},
}


def cost_table_of(package: str, shapes: Shapes) -> CostTable:
    """The table in a family's folder, or a guess for weights of these shapes."""
    measured = read_cost_table(package)
    if measured is None:
        return guess_cost_table(shapes)
    return measured


def guess_cost_table(shapes: Shapes) -> CostTable:
    """A table for weights of these shapes."""
    groups = block_lists(shapes)
    axes = {}
    for name, shape in shapes.items():
        is_matrix = len(shape) > 1  # the weight of a norm is a vector
        if name.endswith(".weight") and is_matrix:
            path = name.removesuffix(".weight")
            axes[numbered(path, groups)] = _axis(path)
    return CostTable(
        groups=groups,
        float32=(),
        rows=axes,
        no_gradient={"lora": (), "full": ()},
        keeps_attention=True,
        flops={
            "large": {"token token width": 4.0, "token text width": 4.0},
            "small": {"text text width": 4.0},
        },
        bytes={dtype: _bytes_in(dtype) for dtype in SAVED},
        published=(),
        is_measured=False,
    )


def block_lists(shapes: Shapes) -> list[str]:
    """Names of the lists of repeated blocks; the one with the most parameters comes last."""
    # By list, number of the member, and path in the member.
    lists: dict[str, dict[str, dict[str, Shape]]] = defaultdict(lambda: defaultdict(dict))
    for name, shape in shapes.items():
        group, _, rest = name.partition(".")
        number, _, path = rest.partition(".")
        if path and number.isdecimal():
            lists[group][number][path] = shape
    # The members of other lists, such as the layers of an embedding, differ from each other.
    repeated = [group for group, members in lists.items() if _are_alike([*members.values()])]
    return sorted(repeated or lists, key=lambda group: _parameters(lists[group]))


def _are_alike(members: Sequence[Mapping[str, Shape]]) -> bool:
    return len(members) > 1 and all(member == members[0] for member in members)


def _parameters(members: Mapping[str, Mapping[str, Shape]]) -> int:
    return sum(math.prod(shape) for shapes in members.values() for shape in shapes.values())


def _axis(path: str) -> str:
    """What a layer is applied to, by the words in its path.

    Tokens are the most positions, so they are the answer in doubt.
    """
    lowered = path.lower()
    if any(word in lowered for word in SAMPLE_WORDS):
        return "sample"
    if any(word in lowered for word in TEXT_WORDS):
        return "text"
    return "token"


def _bytes_in(dtype: str) -> dict[str, Any]:
    """The guess for a dtype, with the keys of `CostTable.bytes`."""
    traffic = TRAFFIC[dtype]
    return {
        "reads": {},
        "saved": SAVED[dtype],
        "trained": TRAINED[dtype],
        "compiled": SAVED[dtype],
        "transient": TRANSIENT[dtype],
        "trained transient": TRANSIENT[dtype],
        "outside": OUTSIDE[dtype],
        "sampling": [SAMPLING[dtype]],
        "traffic": traffic,
        "compiled forward": traffic,
        "compiled backward": {product: 2 * factor for product, factor in traffic.items()},
    }
