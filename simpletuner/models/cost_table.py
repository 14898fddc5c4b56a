"""The table of a family's measured costs, `cost.json`, written by
`python -m benchmarks.cost_table`. Imports no torch.

In names, `#` is the number of a block. A quantity is a sum of products: each product is named by
the numbers that are multiplied, such as `token width`, and has a factor. So a table that was
measured with small models holds at any size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from simpletuner.weights.files import Shape

Factors = Mapping[
    str, float
]  # by the names of the numbers that are multiplied, as in {"token width": 36.0}


@dataclass(frozen=True)
class CostTable:
    """The content of a `cost.json`.

    Attributes:
        groups: names of the lists of repeated blocks, in the order of the forward pass; the last
            has the large ones.
        float32: name components of parameters that stay float32 at every precision setting.
        rows: the axis that each weight is applied to: every `token`, `text` token or `sample`.
        no_gradient: layers whose input needs no gradient, by kind of run: `lora` or `full`.
        keeps_attention: whether selective checkpointing can keep the output of self-attention.
        flops: FLOPs of a `large` and a `small` block, excluding matmuls with weights.
        bytes: of a large block, by dtype; `reads` lists layers whose input is kept only for an
            adapter, each with the first layer that reads the same input, `compiled` is what a
            compiled block saves, `compiled forward` and `compiled backward` what its kernels move,
            `trained` what a stock one saves in a full fine-tune, and `sampling` a list of phases,
            the largest of which is the peak of a forward pass without gradients.
        published: shapes of the published checkpoints.
        is_measured: False for a guess (`cost_guess`).
    """

    groups: Sequence[str]
    float32: Sequence[str]
    rows: Mapping[str, str]
    no_gradient: Mapping[str, Sequence[str]]
    keeps_attention: bool
    flops: Mapping[str, Factors]
    bytes: Mapping[str, Mapping[str, Any]]
    published: Sequence[Mapping[str, Any]]
    is_measured: bool = True

    def published_shapes(self, flavour: str) -> dict[str, Shape]:
        """Shapes of all parameters of a flavour's published checkpoint, by name."""
        found = next(each for each in self.published if flavour in each["flavours"])
        shapes: dict[str, Shape] = {}
        for name, shape in found["shapes"].items():
            count = found["blocks"].get(name.partition(".#.")[0], 1)
            shapes |= {name.replace("#", str(index), 1): tuple(shape) for index in range(count)}
        return shapes


@cache
def read_cost_table(package: str) -> CostTable | None:
    """The table in a family's folder; None if the family is not measured yet."""
    file = files(package) / "cost.json"
    return CostTable(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def numbered(name: str, groups: Sequence[str]) -> str:
    """A name with `#` in place of its block's number."""
    group, _, rest = name.partition(".")
    number, dot, rest = rest.partition(".")
    # transformer_blocks.7.attn1.to_q -> transformer_blocks.#.attn1.to_q
    return f"{group}.#.{rest}" if group in groups and number.isdecimal() and dot else name


def product_of(names: str, numbers: Mapping[str, float]) -> float:
    """The product of some numbers, of which `names` has the names: `token width` is tokens times
    width.
    """
    return math.prod(numbers[name] for name in names.split())


def sum_of(factors: Factors, numbers: Mapping[str, float]) -> float:
    """The sum of the products that are named by the keys, each times its factor."""
    return sum(factor * product_of(names, numbers) for names, factor in factors.items())


def peak_of(phases: Sequence[Factors], numbers: Mapping[str, float]) -> float:
    """The largest sum of some phases, of which the one or the other is the peak, depending on the
    numbers.
    """
    return max(sum_of(phase, numbers) for phase in phases)


def number(settings: Mapping[str, object], key: str, default: int) -> int:
    """An integer setting of a model's config.json, or the default."""
    value = settings.get(key, default)
    return int(value) if isinstance(value, int | float) else default
