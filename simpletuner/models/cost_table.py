"""Builds a `TransformerCost` from the measurements in a family's `cost.json`. Free of torch.

`python -m benchmarks.cost_table` writes the tables. In names, `#` stands for the number of a block. A quantity is a sum
of products: the key of a factor, such as `token width`, names what the factor is multiplied by.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from simpletuner.models.cost import (
    STOCK,
    Activations,
    Adapters,
    BatchShape,
    Kernels,
    Shape,
    TransformerCost,
    VaeLoad,
    Work,
)

Factors = Mapping[str, float]


@dataclass(frozen=True)
class CostTable:
    """The content of a `cost.json`.

    Attributes:
        groups: names of the lists of repeated blocks, in the order of the forward pass; the last has the large ones.
        float32: name components of parameters that stay float32 at every precision setting.
        rows: what each weight is applied to: every `token`, `text` token or `sample`.
        no_gradient: layers whose input needs no gradient, by kind of run: `lora` or `full`.
        keeps_attention: whether selective checkpointing can keep the result of the self-attention.
        flops: of a `large` and a `small` block, excluding products with weights.
        bytes: of a large block, by dtype; `reads` lists layers whose input is kept only for an adapter, each with
            the first layer that reads the same input, `compiled` is what a compiled block saves, and `trained` what a
            stock one does in a full fine-tune.
        published: shapes of the published checkpoints.
    """

    groups: Sequence[str]
    float32: Sequence[str]
    rows: Mapping[str, str]
    no_gradient: Mapping[str, Sequence[str]]
    keeps_attention: bool
    flops: Mapping[str, Factors]
    bytes: Mapping[str, Mapping[str, Any]]
    published: Sequence[Mapping[str, Any]]

    def published_shapes(self, flavour: str) -> dict[str, Shape]:
        """Shapes of all parameters of a flavour's published checkpoint, by name."""
        found = next(each for each in self.published if flavour in each["flavours"])
        shapes: dict[str, Shape] = {}
        for name, shape in found["shapes"].items():
            count = found["blocks"].get(name.partition(".#.")[0], 1)
            shapes |= {name.replace("#", str(index), 1): tuple(shape) for index in range(count)}
        return shapes


@cache
def read_cost_table(package: str) -> CostTable:
    """The table in a family's folder."""
    return CostTable(**json.loads((files(package) / "cost.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class FamilyCost:
    """Everything the plan needs from a family's `cost.py`.

    Attributes:
        package: the folder of the family, with its `cost.json`.
        transformer_class: name of the transformer's class in diffusers.
        published: flavour name -> dimensions of the published transformer, as in its config.json.
        transformer: (config.json, shapes of parameters by name, kernels) -> its cost.
        vae_parameters, text_parameters: of the published encoders, for checkpoints that are not downloaded yet.
        head_parameters, vision_parameters: of those, what is dropped once it is loaded; the vision tower only where
            prompts hold no picture.
        vae_encode, vae_decode: (the VAE's config, its load) -> numbers alive at the peak.
        vae_upsampled: likewise, the numbers that decoding upsamples at once.
        prompt_layer: the layer that reads text embeddings, and so has their width.
        picture_tokens: (width, height) of a source picture -> text tokens that it takes in a prompt that holds it.
        guided_together: guidance runs both prompts in one batch instead of one after the other.
        padded_text: the length that every prompt is padded to; 0 if prompts are not padded.
    """

    package: str
    transformer_class: str
    published: Callable[[str], dict[str, object]]
    transformer: Callable[[Mapping[str, object], Mapping[str, Shape], Kernels], TransformerCost]
    vae_parameters: int
    text_parameters: int
    vae_encode: Callable[[Mapping[str, object], VaeLoad], float]
    vae_decode: Callable[[Mapping[str, object], VaeLoad], float]
    prompt_layer: str
    vae_upsampled: Callable[[Mapping[str, object], VaeLoad], int] = field(default=lambda settings, load: 0)
    picture_tokens: Callable[[int, int], int] = field(default=lambda width, height: 0)
    head_parameters: int = 0
    vision_parameters: int = 0
    guided_together: bool = False
    padded_text: int = 0

    def of_flavour(self, flavour: str, kernels: Kernels = STOCK, /, **changes: object) -> TransformerCost:
        """The cost of a published checkpoint, optionally with some settings changed."""
        shapes = read_cost_table(self.package).published_shapes(flavour)
        return self.transformer({**self.published(flavour), **changes}, shapes, kernels)


def numbered(name: str, groups: Sequence[str]) -> str:
    """A name with `#` in place of its block's number."""
    return re.sub(rf"^({'|'.join(groups)})\.\d+\.", r"\1.#.", name)


def product_of(words: str, numbers: Mapping[str, float]) -> float:
    """The product of the numbers named in `words`, such as `token width`."""
    return math.prod(numbers[word] for word in words.split())


def sum_of(factors: Factors, numbers: Mapping[str, float]) -> float:
    return sum(factor * product_of(words, numbers) for words, factor in factors.items())


@dataclass(frozen=True)
class Block:
    """A large block: the shapes of its weights by name within the block, and what they are applied to."""

    prefix: str
    weights: Mapping[str, Shape]
    rows: Mapping[str, str]

    @property
    def tokens(self) -> Iterable[Shape]:
        return (shape for name, shape in self.weights.items() if self.rows[name] == "token")

    @property
    def hidden(self) -> int:
        return next(iter(self.tokens))[1]

    @property
    def inner(self) -> int:
        return max(shape[0] for shape in self.tokens)


@dataclass(frozen=True)
class TileBytes:
    """Bytes of the tile lists or masks of block-sparse attention in a large block: saved, and at the peak of making
    them.
    """

    saved: float = 0.0
    making: float = 0.0


def transformer_cost(
    table: CostTable,
    shapes: Mapping[str, Shape],
    *,
    head: int,
    unit: int = 1,
    sparse: Callable[[BatchShape, int], TileBytes] = lambda load, size: TileBytes(),
    compiled: bool = False,
) -> TransformerCost:
    """The cost of a transformer of the table's class.

    Args:
        shapes: of every parameter, by name.
        head: width of an attention head.
        unit: how many tokens a route keeps or drops together.
        sparse: (micro-batch, bytes per number) -> bytes that block-sparse attention adds.
        compiled: blocks with adapters are compiled.
    """
    counts = {group: len({name.split(".")[1] for name in shapes if name.startswith(f"{group}.")})
              for group in table.groups}  # fmt: skip
    blocks = [f"{group}.{index}." for group, count in counts.items() for index in range(count)]
    large = counts[table.groups[-1]]
    block = _large_block(table, shapes, blocks[-1])
    layers = {name: numbered(name.removesuffix(".weight"), table.groups) for name in shapes}
    rows = {name: table.rows.get(layer) for name, layer in layers.items() if name.endswith(".weight")}
    ends = {kind: frozenset(names) for kind, names in table.no_gradient.items()}

    def rows_of(name: str, load: BatchShape) -> int:
        axis = rows.get(name)
        return 0 if axis is None else load.samples * {"sample": 1, "text": load.text, "token": load.tokens}[axis]

    def attention(load: BatchShape) -> Work:
        numbers = {"width": block.hidden, "head": head, "text": load.text}
        small = _attention(table.flops["small"], {**numbers, "token": load.tokens}).times(len(blocks) - large)
        works = (_attention(table.flops["large"], {**numbers, "token": one.tokens}) for one in load.in_blocks(large))
        return sum(works, small).times(load.samples)

    @cache
    def starts(module: str, full: bool) -> bool:
        names = ends["full" if full else "lora"]
        return module in names or numbered(module, table.groups) in names

    return TransformerCost(
        shapes=shapes,
        blocks=blocks,
        large=large,
        hidden=block.hidden,
        stays_float32=lambda name: any(part in name.split(".") for part in table.float32),
        rows=rows_of,
        attention=attention,
        activations=lambda load, size, adapters: _activations(
            table, block, head, sparse(load, size), load, size, adapters, compiled=compiled
        ),
        starts=starts,
        unit=unit,
    )


def _large_block(table: CostTable, shapes: Mapping[str, Shape], prefix: str) -> Block:
    names = [name for name in shapes if name.startswith(prefix) and name.endswith(".weight")]
    layers = {name.removeprefix(prefix).removesuffix(".weight"): name for name in names}
    numbers = {layer: numbered(prefix + layer, table.groups) for layer in layers}
    known = {layer: table.rows[number] for layer, number in numbers.items() if number in table.rows}
    return Block(prefix, {layer: shapes[layers[layer]] for layer in known}, known)


def _attention(factors: Factors, numbers: Mapping[str, float]) -> Work:
    """FLOPs, counted as softmax attention where they grow with the product of two lengths."""
    lengths = {words: sum(word in ("token", "text") for word in words.split()) for words in factors}
    softmax = {words: factor for words, factor in factors.items() if lengths[words] == 2}
    other = {words: factor for words, factor in factors.items() if lengths[words] < 2}
    return Work(sum_of(other, numbers), sum_of(softmax, numbers))


def _activations(
    table: CostTable, block: Block, head: int, tiles: TileBytes, load: BatchShape, size: int, adapters: Adapters, *,
    compiled: bool,
) -> Activations:  # fmt: skip
    """Bytes of a micro-batch in a large block with its adapters. Measurements of stock blocks serve as bounds for
    compiled ones.
    """
    kind = "bf16" if size < 4 else "fp32"
    # Measured only for families whose tokens can have their own timesteps.
    timed = load.timed_tokens and f"{kind} given" in table.bytes
    factors = table.bytes[f"{kind} given" if timed else kind]
    axes = {"token": load.samples * load.tokens, "text": load.samples * load.text, "sample": load.samples}
    numbers = {**axes, "width": block.hidden, "inner": block.inner, "head": head, "heads": block.hidden // head}
    sums = {name: sum_of(factor, numbers) for name, factor in factors.items() if name != "reads"}
    saved = ("compiled" if compiled else "saved") if adapters.modules else "trained"
    elements = axes["token"] * block.hidden
    kept = elements * size + axes["token"] * numbers["heads"] * 4  # its result and log-sum-exp
    return Activations(
        held=elements * size,
        saved=sums[saved] + _adapted(block, factors["reads"], axes, adapters) * size + tiles.saved,
        transient=max(sums["transient"], tiles.making),
        attention=kept + tiles.saved if table.keeps_attention else 0.0,
        outside=sums["outside"],
        sampling=sums["sampling"] + tiles.saved + tiles.making,
        traffic=sums["traffic"] + 2 * (tiles.saved + tiles.making),
    )


def _adapted(block: Block, reads: Mapping[str, str], axes: Mapping[str, int], adapters: Adapters) -> float:
    """Numbers that a block saves for its adapters: inputs not saved otherwise, and outputs of the down factors, or
    whole updates.
    """
    layers = [layer for layer in block.weights if f"{block.prefix}{layer}" in adapters.modules]
    inputs = {reads[layer]: axes[block.rows[layer]] * math.prod(block.weights[layer][1:2])
              for layer in layers if layer in reads}  # fmt: skip
    if adapters.products:
        return sum(inputs.values()) + sum(math.prod(block.weights[layer]) for layer in layers)
    return sum(inputs.values()) + sum(axes[block.rows[layer]] * adapters.rank for layer in layers)
