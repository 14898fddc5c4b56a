"""Reads `cost.json`, the table of a family's measured costs.

`python -m benchmarks.cost_table` writes it. In names of weights, `#` is the number of a block. A
quantity is a sum of products: the key of each product names the numbers that are multiplied, such
as `token width`, and the value is its factor. So a table that was measured with small models holds
at any size. Imports no torch.
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

# A sum of products: {"token width": 36.0, "text width": 8.0} is
# 36 x tokens x width + 8 x text tokens x width.
Factors = Mapping[str, float]


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
        bytes: of a large block, by dtype, each a sum of products unless noted:
            `saved`, `compiled`: what a stock or compiled block saves for its backward pass, if its
                weights are frozen;
            `trained`: what a stock block saves in a full fine-tune;
            `reads`: layers whose input is saved only for an adapter, each with the first layer
                that reads the same input (a mapping of names);
            `transient`, `trained transient`: additional memory of the backward pass of a stock
                block, with frozen weights and in a full fine-tune, without gradients of weights;
            `outside`: tensors that live for the whole step;
            `sampling`: phases of a forward pass without gradients, whose largest is its peak (a
                list of sums);
            `traffic`, `compiled forward`, `compiled backward`: what the kernels of a stock block
                move in a forward pass, and those of a compiled one in each pass.
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
        checkpoint = next(entry for entry in self.published if flavour in entry["flavours"])
        shapes: dict[str, Shape] = {}
        for name, shape in checkpoint["shapes"].items():
            group = name.partition(".#.")[0]
            blocks = checkpoint["blocks"].get(group, 1)  # 1 for a name without `#`
            for number in range(blocks):
                shapes[name.replace("#", str(number), 1)] = tuple(shape)
        return shapes


@cache
def read_cost_table(package: str) -> CostTable | None:
    """The table in a family's folder; None if the family is not measured yet."""
    file = files(package) / "cost.json"
    if not file.is_file():
        return None
    return CostTable(**json.loads(file.read_text(encoding="utf-8")))


def numbered(name: str, groups: Sequence[str]) -> str:
    """A name with `#` in place of its block's number.

    `transformer_blocks.7.attn1.to_q` becomes `transformer_blocks.#.attn1.to_q`; a name outside the
    groups stays as it is.
    """
    group, _, rest = name.partition(".")
    number, dot, path = rest.partition(".")
    if group in groups and number.isdecimal() and dot:
        return f"{group}.#.{path}"
    return name


def product_of(names: str, numbers: Mapping[str, float]) -> float:
    """The product of the named numbers: `token width` is tokens times width."""
    return math.prod(numbers[name] for name in names.split())


def sum_of(factors: Factors, numbers: Mapping[str, float]) -> float:
    """The sum of the products that the keys name, each times its factor."""
    return sum(factor * product_of(names, numbers) for names, factor in factors.items())


def peak_of(phases: Sequence[Factors], numbers: Mapping[str, float]) -> float:
    """The largest of the phases' sums; which phase it is depends on the numbers."""
    return max(sum_of(phase, numbers) for phase in phases)


def number(settings: Mapping[str, object], key: str, default: int) -> int:
    """An integer setting of a model's config.json, or the default."""
    value = settings.get(key, default)
    return int(value) if isinstance(value, int | float) else default
