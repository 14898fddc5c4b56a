"""Memory and compute of a transformer, and all costs of a family, calculated without torch.

Two things determine them: the shapes of the parameters, and the measurements in the family's table
(`cost_table`). Weights are counted by their shapes. FLOPs of a layer are its weights times the
positions that it is applied to, on one of three axes: `token`, `text` token or `sample`. What a
block keeps for its backward pass cannot be read from shapes; the table has it as a sum of products.
FLOPs count a multiply-add as 2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from simpletuner.config.techniques.tread import Route, tokens_by_block
from simpletuner.models.cost_table import (
    CostTable,
    numbered,
    peak_of,
    product_of,
    read_cost_table,
    sum_of,
)
from simpletuner.models.vae_cost import VaeCost
from simpletuner.weights.files import Shape, Shapes

P = ParamSpec("P")
R = TypeVar("R")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}  # per number
# Cost of the backward pass of attention relative to its forward pass, in matmuls. The forward pass
# has two: Q K^T and P V. The gradients dV, dP, dQ and dK are four; a flash kernel does not keep the
# scores and computes Q K^T again, the fifth (Dao 2023, arXiv 2307.08691, section 2.3).
ATTENTION_BACKWARD = 4 / 2
FLASH_BACKWARD = 5 / 2


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch in tokens.

    Attributes:
        samples: batch size.
        frames, height, width: tokens per sample along each axis.
        text: text tokens per sample.
        timed_tokens: timesteps are per token (a conditioning first frame in Sana Video).
        kept: tokens per sample in each large block with routes; empty if every block processes all
            tokens.
    """

    samples: int
    frames: int
    height: int
    width: int
    text: int
    timed_tokens: bool = False
    kept: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Visual tokens per sample."""
        return self.frames * self.height * self.width

    @property
    def positions(self) -> dict[str, int]:
        """Number of positions that a weight is applied to, by axis."""
        return {
            "sample": self.samples,
            "text": self.samples * self.text,
            "token": self.samples * self.tokens,
        }

    def in_blocks(self, blocks: int) -> list[BatchShape]:
        """The shape of this micro-batch in each of the `blocks` large blocks."""
        if not self.kept:
            return [self] * blocks
        all_tokens = replace(self, kept=())
        shapes = []
        for kept in self.kept:
            if kept == self.tokens:
                shapes.append(all_tokens)
            else:
                # Kept tokens do not form a grid, so they count as one row.
                shapes.append(replace(all_tokens, frames=1, height=1, width=kept))
        return shapes


@dataclass(frozen=True)
class Work:
    """FLOPs by kind of kernel, since each kind reaches a different share of a device's peak.

    Attributes:
        linear: of matmuls, including linear attention.
        attention: of dense softmax attention.
        sparse: of block-sparse attention.
    """

    linear: float = 0.0
    attention: float = 0.0
    sparse: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            linear=self.linear + other.linear,
            attention=self.attention + other.attention,
            sparse=self.sparse + other.sparse,
        )

    def times(self, linear: float, attention: float | None = None) -> Work:
        """This work repeated; `attention` is the factor of both attentions if it differs."""
        factor = linear if attention is None else attention
        return Work(self.linear * linear, self.attention * factor, self.sparse * factor)

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.sparse


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of a micro-batch.

    Attributes:
        held: the input of a large block, which checkpointing keeps.
        saved: tensors that autograd saves for a large block without checkpointing, excluding its
            input.
        transient: additional memory of a block's backward pass.
        attention: tensors of a block that selective checkpointing keeps besides its input.
        outside: tensors that live for the whole step: position tables, timestep embeddings.
        sampling: the peak of a forward pass without gradients.
        traffic: bytes moved by a stock block's elementwise operations in a forward pass.
        forward, backward: bytes moved by a block's kernels in training, in each pass.
    """

    held: float
    saved: float
    transient: float
    attention: float
    outside: float
    sampling: float
    traffic: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Kernels:
    """The kernels of the blocks, which determine the tensors that autograd saves.

    Attributes:
        compiled: by inductor.
        tile_lists: block-sparse attention reads lists of tiles, as on a GPU, instead of masks.
    """

    compiled: bool = False
    tile_lists: bool = False


STOCK = Kernels()


@dataclass(frozen=True)
class Adapters:
    """An adapter: a LoRA, or another kind; without modules, no adapter.

    Attributes:
        rank: rank of a LoRA.
        modules: names of the target modules.
        products: trained numbers per module of another kind, which materialises the update of the
            whole weight.
    """

    rank: int
    modules: frozenset[str]
    products: Mapping[str, int] = field(default_factory=dict, hash=False)


NO_ADAPTERS = Adapters(0, frozenset())


class Layer(NamedTuple):
    """A layer that multiplies with a weight.

    Attributes:
        name: its path in the transformer.
        block: name prefix of its block; empty outside the blocks.
        axis: what the weight is applied to: every `token`, `text` token or `sample`.
        shape: of the weight.
    """

    name: str
    block: str
    axis: str
    shape: Shape

    @property
    def inputs(self) -> int:
        """Input features; the kernel of a convolution, `shape[2:]`, does not count."""
        return math.prod(self.shape[1:2])  # 1 for a depthwise weight without inputs

    def product(self, positions: int) -> float:
        """FLOPs of the product with the weight."""
        return 2.0 * positions * math.prod(self.shape)

    def factors(self, positions: int, adapters: Adapters) -> tuple[float, float]:
        """FLOPs of the two factors (down, up) of the layer's adapter.

        An adapter of another kind than LoRA has no factors: it multiplies with its whole update,
        which counts as the second.
        """
        if self.name not in adapters.modules:
            return 0.0, 0.0
        if adapters.products:
            return 0.0, self.product(positions)
        # The down factor has the shape (rank, inputs and kernel), the up factor (outputs, rank).
        per_feature = 2.0 * positions * adapters.rank
        return per_feature * math.prod(self.shape[1:]), per_feature * self.shape[0]


def remembered(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorate a method to keep its results in the object's `results`.

    The search over settings repeats the same calls thousands of times. `functools.cache` would
    keep every object alive.
    """

    @wraps(method)
    def look_up(owner: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        results: dict[Any, R] = owner.results
        call = (method, args, *kwargs.items())
        result = results.get(call)  # one look-up, since hashing a call takes longest
        if result is None:
            result = method(owner, *args, **kwargs)
            results[call] = result
        return result

    return look_up


@dataclass(frozen=True)
class Weights:
    """The parameters of a transformer: their blocks, axes and bytes.

    Attributes:
        table: the measurements of its class.
        shapes: shape of every parameter, by name, as in the safetensors header.
        modulation: name components of the float32 layers whose weights bf16 represents exactly, so
            that frozen ones can be stored in bf16; empty if there are none.
        results: of earlier calls; see `remembered`.
    """

    table: CostTable
    shapes: Shapes
    modulation: frozenset[str] = field(default=frozenset(), kw_only=True)
    results: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def blocks(self) -> list[str]:
        """Name prefixes (`transformer_blocks.0.`) of the blocks, in the order of the forward pass.

        Blocks are numbered without gaps, so it is enough to count them.
        """
        members = {tuple(name.split(".")[:2]) for name in self.shapes}
        counts = Counter(path[0] for path in members)
        prefixes = []
        for group in self.table.groups:
            prefixes += [f"{group}.{number}." for number in range(counts[group])]
        return prefixes

    @cached_property
    def large(self) -> int:
        """Number of large blocks: those of the last group.

        They hold nearly all the memory, so `activations` describes them, and not the small blocks
        before.
        """
        large_group = f"{self.table.groups[-1]}."
        return len([prefix for prefix in self.blocks if prefix.startswith(large_group)])

    @property
    def small(self) -> int:
        """Number of small blocks, which come first."""
        return len(self.blocks) - self.large

    @cached_property
    def _by_block(self) -> dict[str, list[str]]:
        """Parameter names by block prefix; parameters outside the blocks have an empty prefix."""
        names: dict[str, list[str]] = {prefix: [] for prefix in (*self.blocks, "")}
        for name in self.shapes:
            names[self._block_of(name)].append(name)
        return names

    def _block_of(self, name: str) -> str:
        """Prefix of the block that a parameter or a module belongs to; empty outside the blocks."""
        prefix = ".".join(name.split(".")[:2]) + "."
        return prefix if prefix in self.blocks else ""

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers that multiply with a weight: those for which the table has an axis."""
        layers = []
        for block, names in self._by_block.items():
            for name in names:
                path = name.removesuffix(".weight")
                axis = self.table.rows.get(numbered(path, self.table.groups))
                if axis:
                    layers.append(Layer(path, block, axis, self.shapes[f"{path}.weight"]))
        return layers

    @cached_property
    def large_layers(self) -> list[Layer]:
        """The layers of a large block."""
        return [layer for layer in self.layers if layer.block == self.blocks[-1]]

    @cached_property
    def hidden(self) -> int:
        """Width of a token."""
        return next(layer.inputs for layer in self.large_layers if layer.axis == "token")

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @cached_property
    def float32_parameters(self) -> int:
        """Parameters that stay float32 at every precision setting."""
        kept = [shape for name, shape in self.shapes.items() if self.stays_float32(name)]
        return sum(map(math.prod, kept))

    @cached_property
    def largest_weight(self) -> int:
        """Numbers of the largest weight."""
        return max(map(math.prod, self.shapes.values()))

    def stays_float32(self, name: str) -> bool:
        """Whether a parameter stays float32 at every precision setting."""
        return any(part in name.split(".") for part in self.table.float32)

    def fits_bf16(self, name: str) -> bool:
        """Whether a parameter is a modulation weight that bf16 represents exactly."""
        return name.endswith(".weight") and not self.modulation.isdisjoint(name.split("."))

    @remembered
    def first_reached(self, adapters: Adapters) -> int:
        """The number of blocks before the first one that the backward pass reaches.

        That is the first block with an adapter. An adapter outside the blocks counts as one before
        them, and a full fine-tune reaches all.
        """
        adapted = {self._block_of(module) for module in adapters.modules}
        if not adapted or "" in adapted:
            return 0
        return min(map(self.blocks.index, adapted))

    @remembered
    def reached(self, adapters: Adapters) -> list[bool]:
        """Whether the backward pass reaches each large block."""
        first = self.first_reached(adapters) - self.small
        return [index >= first for index in range(self.large)]

    @remembered
    def needs_no_gradient(self, layer: Layer, adapters: Adapters, full: bool) -> bool:
        """Whether the input of a layer needs no gradient, because no trained weight precedes it.

        In a full fine-tune, that is so only for embeddings.
        """
        names = self.table.no_gradient["full" if full else "lora"]
        if not layer.block:
            return layer.name in names
        first = self.first_reached(adapters)
        index = self.blocks.index(layer.block)
        is_large = index >= self.small
        # Large blocks read the text, whose gradient only the small blocks need.
        if is_large and layer.axis == "text" and 0 < self.small <= first:
            return True
        alike = numbered(layer.name, self.table.groups)
        if alike in names:
            return True
        # The table describes a pass that reaches all blocks: the first one is that of its group.
        first_of_group = max(first, self.small) if is_large else first
        return index == first_of_group and alike.replace("#", "0", 1) in names

    @remembered
    def block_bytes(self, dtype: str, *, quantised: float, narrow: bool = False) -> list[float]:
        """Bytes of the weights of each block, in order.

        Args:
            quantised: bytes per weight of a quantised linear layer; 0 if not quantised.
            narrow: modulation weights are stored in bf16 where that is exact.
        """
        return [
            sum(self._size(name, dtype, quantised, narrow) for name in self._by_block[prefix])
            for prefix in self.blocks
        ]

    @remembered
    def rest_bytes(self, dtype: str, *, narrow: bool = False) -> float:
        """Bytes of the weights outside the blocks; `narrow` as for `block_bytes`."""
        return sum(self._size(name, dtype, 0.0, narrow) for name in self._by_block[""])

    def _size(self, name: str, dtype: str, quantised: float, narrow: bool) -> float:
        """Bytes of one parameter."""
        shape = self.shapes[name]
        if narrow and self.fits_bf16(name):
            return float(BYTES["bf16"] * math.prod(shape))
        if self.stays_float32(name):
            return 4.0 * math.prod(shape)
        is_linear = len(shape) == 2 and name.endswith(".weight")
        if quantised and is_linear:
            scales = BYTES[dtype] * shape[0]  # one per row
            return quantised * math.prod(shape) + scales
        return float(BYTES[dtype]) * math.prod(shape)

    @remembered
    def adapter_parameters(self, adapters: Adapters) -> int:
        """Parameters of all adapters."""
        return sum(self._adapter_numbers(name, adapters) for name in adapters.modules)

    @remembered
    def adapter_parameters_by_block(self, adapters: Adapters) -> list[int]:
        """Parameters of the adapters in each block, in order."""
        numbers = dict.fromkeys((*self.blocks, ""), 0)
        for name in adapters.modules:
            numbers[self._block_of(name)] += self._adapter_numbers(name, adapters)
        return [numbers[block] for block in self.blocks]

    def _adapter_numbers(self, name: str, adapters: Adapters) -> int:
        """Parameters of one module's adapter.

        A LoRA has `rank` x (in + out), where `in` includes the kernel of a convolution.
        """
        if adapters.products:
            return adapters.products[name]
        shape = self.shapes[f"{name}.weight"]
        return adapters.rank * (shape[0] + math.prod(shape[1:]))


@dataclass(frozen=True)
class TransformerCost(Weights):
    """Memory and work of a transformer with its micro-batches.

    Attributes:
        head: width of an attention head.
        unit: number of tokens that a route keeps or drops together.
        tiles: (micro-batch, bytes per number) -> bytes of the tile lists or masks of block-sparse
            attention in a block: saved, and temporary while they are made.
        compiled: blocks with adapters are compiled.
        density: tokens of a sample -> share of token pairs that block-sparse attention computes;
            None if dense.
        compiled_reads: further layers whose input a compiled block keeps only for an adapter; see
            the table's `reads`.
    """

    head: int
    unit: int = 1
    tiles: Callable[[BatchShape, int], tuple[float, float]] = field(
        default=lambda batch, size: (0.0, 0.0)
    )
    compiled: bool = False
    density: Callable[[int], float] | None = None
    compiled_reads: Mapping[str, str] = field(default_factory=dict)

    def routed(self, batch: BatchShape, routes: Sequence[Route]) -> BatchShape:
        """The micro-batch with the tokens kept by routes in each block."""
        if not routes:
            return batch
        return replace(batch, kept=tokens_by_block(routes, self.large, batch.tokens, self.unit))

    @remembered
    def activations(self, batch: BatchShape, size: int, adapters: Adapters) -> Activations:
        """Bytes of a micro-batch in a large block with its adapters.

        Measurements of stock blocks serve as bounds for compiled ones.

        Args:
            size: bytes per number of the compute dtype.
        """
        factors = self._factors(batch, size)
        numbers = self._numbers(batch)
        # `reads` are names, and `sampling` is a list of sums.
        sums = {
            name: sum_of(factors[name], numbers)
            for name in factors
            if name not in ("reads", "sampling")
        }
        tiles, making_tiles = self.tiles(batch, size)

        # The table's own sums are without adapters: `saved` and `compiled` are of a frozen block,
        # `trained` of a full fine-tune, which also saves the input of every layer for the weight
        # gradient.
        transient = sums["transient"]
        if not adapters.modules:
            saved = sums["trained"]
            transient = sums["trained transient"]
        elif self.compiled:
            saved = sums["compiled"]
        else:
            saved = sums["saved"]
        reads = factors["reads"]
        if self.compiled:
            reads = reads | self.compiled_reads
        adapted = self._adapted(reads, batch.positions, adapters) * size

        token_numbers = batch.positions["token"]
        hidden_bytes = token_numbers * self.hidden * size
        attention = 0.0
        if self.table.keeps_attention:
            log_sum_exp = token_numbers * numbers["heads"] * 4  # float32
            attention = hidden_bytes + log_sum_exp + tiles

        traffic = sums["traffic"]
        if self.compiled:
            forward, backward = self._moved(sums, batch.positions, adapters, size)
        else:
            forward = traffic
            backward = 2 * traffic  # the backward pass of stock code moves twice as much
        lists = 2 * (tiles + making_tiles)  # written once and read once
        return Activations(
            held=hidden_bytes,
            saved=saved + adapted + tiles,
            # Not the sum: the backward pass makes the lists at another moment than its peak.
            transient=max(transient, making_tiles),
            attention=attention,
            outside=sums["outside"],
            sampling=peak_of(factors["sampling"], numbers) + tiles + making_tiles,
            traffic=traffic + lists,
            forward=forward + lists,
            backward=backward + 2 * lists,
        )

    def gradients_of_conditions(self, batch: BatchShape, size: int) -> float:
        """Bytes of the gradients of tensors that all blocks read, in a full fine-tune.

        They are sums over the blocks, so they live as long as the backward pass. Only embeddings of
        timesteps per token are large.
        """
        factor = self._factors(batch, size)["outside"].get("token width", 0.0)
        return float(factor * product_of("token width", self._numbers(batch)))

    def _factors(self, batch: BatchShape, size: int) -> Mapping[str, Any]:
        """The part of the table for a compute dtype of `size` bytes."""
        dtype = "bf16" if size < 4 else "fp32"
        if batch.timed_tokens:
            # Only families with timesteps per token have this part.
            return self.table.bytes.get(f"{dtype} given", self.table.bytes[dtype])
        return self.table.bytes[dtype]

    def _numbers(self, batch: BatchShape) -> dict[str, int]:
        """What the names in the table's products stand for.

        The axes `sample`, `text` and `token` are positions in the whole micro-batch. So "token
        width" is the size of a hidden state, "token inner" of the widest one in the feed-forward,
        "token heads" of the log-sum-exp of the scores, and "token head" of a position table, which
        all heads share.
        """
        # The feed-forward has the widest output.
        inner = max(layer.shape[0] for layer in self.large_layers if layer.axis == "token")
        return {
            **batch.positions,
            "width": self.hidden,
            "inner": inner,
            "head": self.head,
            "heads": self.hidden // self.head,
        }

    def _moved(
        self, sums: Mapping[str, float], positions: Mapping[str, int], adapters: Adapters, size: int
    ) -> tuple[float, float]:
        """Bytes that the kernels of a compiled block move, forward and backward.

        A LoRA adds its output to the layer's output, and its gradient to the input's gradient: two
        reads and a write. An adapter of another kind adds to the weight instead.
        """
        layers = [] if adapters.products else self._with_adapters(adapters)
        outputs = sum(positions[layer.axis] * layer.shape[0] for layer in layers)
        inputs = sum(positions[layer.axis] * layer.inputs for layer in layers)
        forward = sums["compiled forward"] + 3 * size * outputs
        backward = sums["compiled backward"] + 3 * size * inputs
        return forward, backward

    def _with_adapters(self, adapters: Adapters) -> list[Layer]:
        """The layers of a large block that have an adapter."""
        return [layer for layer in self.large_layers if layer.name in adapters.modules]

    def _adapted(
        self, reads: Mapping[str, str], positions: Mapping[str, int], adapters: Adapters
    ) -> float:
        """Numbers that a block saves for its adapters, which a frozen block would not save.

        Args:
            reads: layers whose input is saved only for an adapter, each with the first layer that
                reads the same input.
        """
        # By the first reader: an input that several layers read is saved once.
        inputs: dict[str, int] = {}
        products = 0
        for layer in self._with_adapters(adapters):
            first_reader = reads.get(layer.name.removeprefix(layer.block))
            if first_reader:
                inputs[first_reader] = positions[layer.axis] * layer.inputs
            if adapters.products:
                products += math.prod(layer.shape)  # the whole update
            else:
                products += positions[layer.axis] * adapters.rank  # output of the down factor
        return sum(inputs.values()) + products

    @remembered
    def activations_by_block(
        self, batch: BatchShape, size: int, adapters: Adapters
    ) -> list[Activations]:
        """Activations of each large block."""
        shapes = batch.in_blocks(self.large)
        all_tokens = replace(batch, kept=())
        held_whole = self.activations(all_tokens, size, adapters).held
        by_block = []
        previous = all_tokens
        for shape in shapes:
            activations = self.activations(shape, size, adapters)
            if shape != previous:
                # Where a route starts or ends, all tokens are the input: they are dropped inside
                # the block, and put back before the next.
                activations = replace(activations, held=held_whole)
            by_block.append(activations)
            previous = shape
        return by_block

    def _positions(self, batch: BatchShape) -> list[tuple[Layer, int]]:
        """The layers, each with the positions of a micro-batch that its weight is applied to."""
        # Small blocks, and layers outside of blocks, process all tokens.
        large_blocks = self.blocks[-self.large :]
        shapes = dict(zip(large_blocks, batch.in_blocks(self.large), strict=True))
        positions = {block: shapes.get(block, batch).positions for block in self._by_block}
        return [(layer, positions[layer.block][layer.axis]) for layer in self.layers]

    def widest(self, batch: BatchShape) -> int:
        """The largest input or output of a linear layer of a large block, in numbers."""
        sizes = []
        for layer, positions in self._positions(batch):
            is_linear = len(layer.shape) == 2
            if is_linear and layer.block.startswith(self.table.groups[-1]):
                sizes.append(positions * max(layer.shape))
        return max(sizes)

    def attention(self, batch: BatchShape, first: int = 0) -> Work:
        """FLOPs of the attentions in a forward pass, of the blocks from the `first` on."""
        small = self._attention("small", batch).times(max(self.small - first, 0))
        shapes = batch.in_blocks(self.large)[max(first - self.small, 0) :]
        large = (self._attention("large", part) for part in shapes)
        return sum(large, small).times(batch.samples)

    def _attention(self, block: str, batch: BatchShape) -> Work:
        """FLOPs of the attentions in one block, for one sample.

        Args:
            block: `small` or `large`.
        """
        numbers = {
            "width": self.hidden,
            "head": self.head,
            "text": batch.text,
            "token": batch.tokens,
        }
        work = Work()
        for product, factor in self.table.flops[block].items():
            flops = factor * product_of(product, numbers)
            # Softmax attention grows with the product of two lengths: "token token width" is
            # self-attention, "token text width" cross-attention. "token head width" has one
            # length: it is linear attention.
            lengths = product.count("token") + product.count("text")
            is_self_attention = product.count("token") == 2
            if self.density is not None and is_self_attention:
                work += Work(sparse=flops * self.density(batch.tokens))
            elif lengths == 2:
                work += Work(attention=flops)
            else:
                work += Work(linear=flops)
        return work

    @remembered
    def forward(
        self, batch: BatchShape, adapters: Adapters = NO_ADAPTERS, *, blocks_only: bool = False
    ) -> Work:
        """FLOPs of a forward pass: 2 x positions x weights, plus attention."""
        linear = 0.0
        for layer, positions in self._positions(batch):
            if blocks_only and not layer.block:
                continue
            linear += layer.product(positions) + sum(layer.factors(positions, adapters))
        return Work(linear) + self.attention(batch)

    @remembered
    def backward(self, batch: BatchShape, adapters: Adapters, *, full: bool) -> Work:
        """FLOPs of a backward pass without recomputation, down to the first block with an adapter.

        A frozen layer costs as much as its forward pass, for the gradient of its input; a trained
        one twice that.
        """
        first = self.first_reached(adapters)
        without = set(self.blocks[:first])
        linear = 0.0
        for layer, positions in self._positions(batch):
            if layer.block in without:
                continue
            flows_on = not self.needs_no_gradient(layer, adapters, full)
            products = 0
            if flows_on:
                products += 1  # gradient of the input
            if full:
                products += 1  # gradient of the weight
            linear += layer.product(positions) * products
            # Both factors of an adapter are trained. The gradient of the input of the first is
            # that of the layer's input, so it is computed only if that flows on.
            down, up = layer.factors(positions, adapters)
            down_products = 2 if flows_on else 1
            linear += down * down_products + up * 2
        return Work(linear) + self.attention(batch, first).times(ATTENTION_BACKWARD)


@dataclass(frozen=True)
class FamilyCost:
    """The contents of a family's `cost.py`, for the plan.

    Attributes:
        package: the folder of the family, with its `cost.json`.
        transformer_class: name of the transformer's class in diffusers.
        published: flavour name -> dimensions of the published transformer, as in its config.json.
        transformer: (config.json, shapes of parameters by name, kernels) -> its cost.
        vae: the cost of its VAE.
        text_parameters: parameters of the published encoders, for checkpoints that are not
            downloaded yet.
        head_parameters, vision_parameters: the part of these that is dropped after loading; the
            vision tower only if prompts have no picture.
        prompt_layer: the layer that reads text embeddings, and so has their width.
        picture_tokens: (width, height) of a source picture -> its text tokens in a prompt.
        guided_together: guidance runs both prompts in one batch instead of in turn.
        padded_text: the length that every prompt is padded to; 0 if prompts are not padded.
    """

    package: str
    transformer_class: str
    published: Callable[[str], dict[str, object]]
    transformer: Callable[[Mapping[str, object], Shapes, Kernels], TransformerCost]
    vae: VaeCost
    text_parameters: int
    prompt_layer: str
    picture_tokens: Callable[[int, int], int] = field(default=lambda width, height: 0)
    head_parameters: int = 0
    vision_parameters: int = 0
    guided_together: bool = False
    padded_text: int = 0

    def of_flavour(
        self, flavour: str, kernels: Kernels = STOCK, /, **changes: object
    ) -> TransformerCost:
        """The cost of a published checkpoint of a measured family.

        Args:
            changes: settings of its config.json to replace.
        """
        settings = {**self.published(flavour), **changes}
        return self.transformer(settings, self.published_shapes(flavour), kernels)

    def published_shapes(self, flavour: str) -> dict[str, Shape]:
        """Shapes of the published weights by name; empty if the family is not measured yet."""
        table = read_cost_table(self.package)
        return {} if table is None else table.published_shapes(flavour)
