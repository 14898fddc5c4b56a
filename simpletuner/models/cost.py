"""Memory and compute of a transformer and a VAE, calculated without torch.

A family's `cost.py` describes its transformer by the shapes of its parameters and by a few functions of a
micro-batch. The rest follows here: bytes of weights, FLOPs of a forward pass and of a training step.

FLOPs count a multiply-add as 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from simpletuner.config.tread import Route, tokens_by_block

Shape = tuple[int, ...]
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Cost of the backward pass of attention relative to its forward pass. dQ, dK, dV and dP are four matrix products, the
# forward pass has two; a flash kernel recomputes the scores as well (Dao 2023, arXiv 2307.08691, section 2.3).
ATTENTION_BACKWARD, FLASH_BACKWARD = 2.0, 2.5


@dataclass(frozen=True)
class BatchShape:
    """One micro-batch as the transformer sees it.

    Attributes:
        samples: batch size.
        frames, height, width: tokens per sample along each axis.
        text: text tokens per sample.
        timed_tokens: each token has its own timestep (a given first frame in Sana Video).
        kept: tokens per sample in each large block when routes drop some; empty when every block gets all.
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

    def in_blocks(self, blocks: int) -> list[BatchShape]:
        """This micro-batch as each of the `blocks` large blocks sees it."""
        if not self.kept:
            return [self] * blocks
        whole = replace(self, kept=())
        parts = {kept: replace(whole, frames=1, height=1, width=kept) for kept in self.kept}
        return [whole if kept == self.tokens else parts[kept] for kept in self.kept]


@dataclass(frozen=True)
class Work:
    """FLOPs of matrix products (`linear`) and of softmax attention."""

    linear: float = 0.0
    attention: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.linear + other.linear, self.attention + other.attention)

    def times(self, linear: float, attention: float | None = None) -> Work:
        return Work(self.linear * linear, self.attention * (linear if attention is None else attention))

    @property
    def total(self) -> float:
        return self.linear + self.attention


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of a micro-batch.

    Attributes:
        held: the input of a large block, which checkpointing keeps.
        saved: tensors that autograd saves for a large block without checkpointing, excluding its input.
        transient: additional memory of a block's backward pass.
        attention: tensors of a block that selective checkpointing keeps besides its input.
        outside: tensors that live for the whole step: position tables, timestep embeddings.
        sampling: the peak of a forward pass without gradients.
        traffic: bytes moved by a block's elementwise operations in a forward pass; the backward pass moves twice as
            many.
    """

    held: float
    saved: float
    transient: float
    attention: float
    outside: float
    sampling: float
    traffic: float


@dataclass(frozen=True)
class Kernels:
    """The kernels of the blocks, which determine what autograd saves.

    Attributes:
        compiled: by inductor.
        tile_lists: block-sparse attention reads lists of tiles, as on a GPU, instead of masks.
    """

    compiled: bool = False
    tile_lists: bool = False


STOCK = Kernels()


@dataclass(frozen=True)
class Adapters:
    """An adapter: a LoRA of a rank, or another kind; without modules, no adapter.

    Attributes:
        rank: of a LoRA.
        modules: names of its target modules.
        products: trained numbers per module of another kind, which materialises an update of the whole weight.
    """

    rank: int
    modules: frozenset[str]
    products: Mapping[str, int] = field(default_factory=dict, hash=False)


NO_ADAPTERS = Adapters(0, frozenset())


@dataclass(frozen=True)
class TransformerCost:
    """Cost model of a transformer.

    Attributes:
        shapes: of every parameter, by name, as in the safetensors header.
        blocks: name prefixes (`transformer_blocks.0.`) of the repeated blocks, in the order of the forward pass.
        large: how many of the last blocks are large, that is, described by `activations`; the others are small.
        hidden: width of a token.
        stays_float32: whether a parameter stays float32 at every precision setting.
        rows: number of positions of a micro-batch that a weight is applied to; 0 for parameters that are not weights.
        attention: FLOPs of all attentions in a forward pass.
        activations: (micro-batch, bytes per number of the compute dtype, adapters) -> bytes.
        starts: (module, is a full fine-tune) -> whether its input needs no gradient, because no trained weight
            comes before it; in a full fine-tune only the embeddings.
        unit: how many tokens a route keeps or drops together.
    """

    shapes: Mapping[str, Shape]
    blocks: Sequence[str]
    large: int
    hidden: int
    stays_float32: Callable[[str], bool]
    rows: Callable[[str, BatchShape], int]
    attention: Callable[[BatchShape], Work]
    activations: Callable[[BatchShape, int, Adapters], Activations]
    starts: Callable[[str, bool], bool]
    unit: int = 1

    def routed(self, load: BatchShape, routes: Sequence[Route]) -> BatchShape:
        """The micro-batch with the tokens that routes leave in each block."""
        return replace(load, kept=tokens_by_block(routes, self.large, load.tokens, self.unit)) if routes else load

    def activations_by_block(self, load: BatchShape, size: int, adapters: Adapters) -> list[Activations]:
        """Activations of each large block. A block that starts a route still holds all tokens as its input."""
        blocks = load.in_blocks(self.large)
        whole = replace(load, kept=())
        bytes_of = {each: self.activations(each, size, adapters) for each in {whole, *blocks}}
        before = [whole, *blocks]
        return [
            bytes_of[own] if own == last else replace(bytes_of[own], held=bytes_of[whole].held)
            for last, own in zip(before, blocks, strict=False)
        ]

    @cached_property
    def _large_block(self) -> dict[str, int]:
        """Parameter names in large blocks, with the block's number among the large ones."""
        large = enumerate(self.blocks[len(self.blocks) - self.large :])
        return {name: number for number, prefix in large for name in self._by_block[prefix]}

    def _applied(self, load: BatchShape) -> Callable[[str], int]:
        """How many positions of a micro-batch each weight is applied to."""
        blocks, number_of = load.in_blocks(self.large), self._large_block
        return lambda name: self.rows(name, blocks[number_of[name]] if name in number_of else load)

    def widest(self, load: BatchShape) -> int:
        """The largest input or output of a linear layer of a large block, in numbers."""
        rows, names = self._applied(load), (name for name in self._large_block if len(self.shapes[name]) == 2)
        return max(rows(name) * max(self.shapes[name]) for name in names)

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @cached_property
    def _block_bytes(self) -> dict[tuple[str, float], list[float]]:
        """Cache of `block_bytes`: the search over settings asks for the same values many times."""
        return {}

    @cached_property
    def _work(self) -> dict[tuple[str, BatchShape, Adapters, bool], Work]:
        """Cache of `forward` and `backward`."""
        return {}

    @cached_property
    def _widths(self) -> dict[frozenset[str], int]:
        """Cache of `adapter_parameters`: in + out of all modules of an adapter."""
        return {}

    @cached_property
    def _by_block(self) -> dict[str, list[str]]:
        """Parameter names by block prefix; parameters outside the blocks have an empty prefix."""
        groups: dict[str, list[str]] = {prefix: [] for prefix in (*self.blocks, "")}
        depth = self.blocks[0].count(".")
        for name in self.shapes:
            prefix = ".".join(name.split(".")[:depth]) + "."
            groups[prefix if prefix in groups else ""].append(name)
        return groups

    def block_bytes(self, dtype: str, *, quantised: float) -> list[float]:
        """Bytes of the frozen weights of each block, in order.

        Args:
            quantised: bytes per weight of a quantised linear layer; 0 if not quantised.
        """
        key = dtype, quantised
        if key not in self._block_bytes:
            self._block_bytes[key] = [self._bytes(self._by_block[prefix], dtype, quantised) for prefix in self.blocks]
        return self._block_bytes[key]

    def rest_bytes(self, dtype: str) -> float:
        """Bytes of the weights outside the blocks."""
        return self._bytes(self._by_block[""], dtype, 0.0)

    def _bytes(self, names: Sequence[str], dtype: str, quantised: float) -> float:
        return sum(self._size(name, dtype, quantised) for name in names)

    def _size(self, name: str, dtype: str, quantised: float) -> float:
        """Bytes of one parameter. Only linear layers are quantised; they have one scale per row as well."""
        shape = self.shapes[name]
        if self.stays_float32(name):
            return 4.0 * math.prod(shape)
        if quantised and len(shape) == 2 and name.endswith(".weight"):
            return quantised * math.prod(shape) + BYTES[dtype] * shape[0]
        return float(BYTES[dtype]) * math.prod(shape)

    def adapter_parameters(self, adapters: Adapters) -> int:
        """Parameters of an adapter; a LoRA has `rank` x (in + out) for each module, where `in` counts a kernel."""
        if adapters.products:
            return sum(adapters.products.values())
        if adapters.modules not in self._widths:
            shapes = (self.shapes[f"{name}.weight"] for name in adapters.modules)
            self._widths[adapters.modules] = sum(shape[0] + math.prod(shape[1:]) for shape in shapes)
        return adapters.rank * self._widths[adapters.modules]

    def forward(self, load: BatchShape, adapters: Adapters = NO_ADAPTERS, *, blocks_only: bool = False) -> Work:
        """FLOPs of a forward pass: 2 x positions x weights, plus attention."""
        key = "forward", load, adapters, blocks_only
        if key not in self._work:
            self._work[key] = self._forward(load, adapters, blocks_only)
        return self._work[key]

    def _forward(self, load: BatchShape, adapters: Adapters, blocks_only: bool) -> Work:
        names = self.shapes if not blocks_only else [n for prefix in self.blocks for n in self._by_block[prefix]]
        rows = self._applied(load)
        frozen = sum(self._product(name, rows) for name in names)
        lora = sum(sum(self._adapter_products(f"{name}.weight", rows, adapters)) for name in adapters.modules)
        return Work(frozen + lora) + self.attention(load)

    def backward(self, load: BatchShape, adapters: Adapters, *, full: bool) -> Work:
        """FLOPs of a backward pass without recomputation; attention counts twice its forward pass.

        A frozen layer costs as much as its forward pass (gradient of its input), a trained one twice that.
        """
        key = "backward", load, adapters, full
        if key not in self._work:
            self._work[key] = self._backward(load, adapters, full)
        return self._work[key]

    def _backward(self, load: BatchShape, adapters: Adapters, full: bool) -> Work:
        linear, rows = 0.0, self._applied(load)
        for name in self.shapes:
            module = name.removesuffix(".weight")
            product, flows = self._product(name, rows), not self.starts(module, full)
            linear += product * (flows + full)
            if module in adapters.modules:
                down, up = self._adapter_products(name, rows, adapters)
                linear += down * (1 + flows) + up * 2
        return Work(linear) + self.attention(load).times(ATTENTION_BACKWARD)

    def _product(self, name: str, rows: Callable[[str], int]) -> float:
        shape = self.shapes[name]
        return 2.0 * rows(name) * math.prod(shape) if len(shape) > 1 else 0.0

    def _adapter_products(self, name: str, rows: Callable[[str], int], adapters: Adapters) -> tuple[float, float]:
        """FLOPs of the two factors (down, up) of a module's LoRA; of another kind, 0 and the FLOPs of the update."""
        if adapters.products:
            return 0.0, self._product(name, rows)
        shape, each = self.shapes[name], 2.0 * rows(name) * adapters.rank
        return each * math.prod(shape[1:]), each * shape[0]


TILE, OVERLAP = 384, 128  # of preview decoding: pixels per side of a tile, and overlap of two tiles


@dataclass(frozen=True)
class VaeLoad:
    """Pictures or clips of one size, in pixels, for the VAE to encode or decode.

    Attributes:
        tiled: processed in tiles (`vae_enable_tiling`, `validation_decoding`).
        sliced: 3D convolutions run in slices of time (`vae_enable_patch_conv`).
        strips: large layers run in strips of rows (`validation_decoding`).
        tile: pixels per side of a tile.
    """

    samples: int
    frames: int
    width: int
    height: int
    tiled: bool = False
    sliced: bool = False
    strips: bool = False
    tile: int = 256

    @property
    def pixels(self) -> int:
        """Pixels of one frame, or of one tile of it."""
        whole = self.width * self.height
        return min(whole, self.tile * self.tile) if self.tiled else whole


def number(settings: Mapping[str, object], key: str, default: int) -> int:
    """An integer setting of a model's config.json, or the default."""
    value = settings.get(key, default)
    return int(value) if isinstance(value, int | float) else default
