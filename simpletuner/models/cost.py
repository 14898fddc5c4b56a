"""What a transformer, a VAE and a text encoder cost, as arithmetic. Free of torch.

A family's `cost.py` describes its transformer by the shapes of its parameters and by a few functions of a
micro-batch. Everything else follows here: bytes of weights, FLOPs of a forward pass and of a training step.

Two units: an *element* is one number of `tokens x hidden width`; FLOPs count a multiply-add as 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from simpletuner.config.tread import Route, tokens_by_block

Shape = tuple[int, ...]
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Backward of attention: dQ, dK, dV and dP are twice the two products of the forward pass; a flash kernel also
# computes the scores again (Dao 2023, arXiv 2307.08691, section 2.3).
ATTENTION_BACKWARD, FLASH_BACKWARD = 2.0, 2.5


@dataclass(frozen=True)
class BatchShape:
    """One micro-batch as the transformer sees it.

    Attributes:
        samples: how many.
        frames, height, width: tokens of one sample along each axis.
        text: text tokens of one sample.
        timed_tokens: each token has a timestep of its own (a given first frame in Sana Video).
        kept: tokens of one sample in each large block, where some are left out; empty where all blocks have all.
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
        """Of one sample."""
        return self.frames * self.height * self.width

    def in_blocks(self, blocks: int) -> list[BatchShape]:
        """What each of so many large blocks sees of it."""
        if not self.kept:
            return [self] * blocks
        whole = replace(self, kept=())
        parts = {kept: replace(whole, frames=1, height=1, width=kept) for kept in self.kept}
        return [whole if kept == self.tokens else parts[kept] for kept in self.kept]


@dataclass(frozen=True)
class Work:
    """FLOPs: matrix products with weights (and other plain products), and softmax attention."""

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
    """Bytes that a micro-batch takes, beside weights.

    Attributes:
        held: the input of one large block, which checkpointing keeps.
        saved: what autograd keeps of one large block without checkpointing, its input not counted.
        transient: what the backward pass of a block takes on top of `saved`.
        attention: what selective checkpointing keeps of one block beside its input.
        outside: what lives as long as the step: position tables, timestep embeddings.
        sampling: the peak of a forward pass without gradients.
        traffic: bytes that a block's elementwise operations move in a forward pass; the backward pass moves twice
            as many.
    """

    held: float
    saved: float
    transient: float
    attention: float
    outside: float
    sampling: float
    traffic: float


@dataclass(frozen=True)
class Adapters:
    """A LoRA: its rank and the modules that have one, by name; `rank` 0 with no modules is none."""

    rank: int
    modules: frozenset[str]

    def __contains__(self, name: str) -> bool:
        return name in self.modules


NO_ADAPTERS = Adapters(0, frozenset())


@dataclass(frozen=True)
class TransformerCost:
    """A transformer as numbers.

    Attributes:
        shapes: of every parameter, by name, as in the safetensors header.
        blocks: name prefixes (`transformer_blocks.0.`) of the repeated blocks, in the order of the forward pass.
        large: how many of them, from the end, are as large as `activations` says; the others are small.
        hidden: width of a token.
        stays_float32: parameters that no precision setting rounds.
        rows: to how many positions of a micro-batch a weight is applied; 0 for parameters that are no weights.
        attention: FLOPs of all attentions in a forward pass.
        activations: bytes of a micro-batch, by bytes of the compute dtype and adapters.
        starts: modules whose input no trained weight has touched, so that no gradient flows into it; in a full
            fine-tune (the second argument) only the embeddings.
        unit: how many tokens a route keeps or leaves out together.
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
        """The load with the tokens that routes leave to each block."""
        return replace(load, kept=tokens_by_block(routes, self.large, load.tokens, self.unit)) if routes else load

    def activations_by_block(self, load: BatchShape, size: int, adapters: Adapters) -> list[Activations]:
        """Of each large block. One that has fewer tokens than the one before it picks them out of all of them."""
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
        """Names of parameters in large blocks, with the number of the block among these."""
        large = enumerate(self.blocks[len(self.blocks) - self.large :])
        return {name: number for number, prefix in large for name in self._by_block[prefix]}

    def _applied(self, load: BatchShape) -> Callable[[str], int]:
        """To how many positions of a micro-batch each weight is applied."""
        blocks, number_of = load.in_blocks(self.large), self._large_block
        return lambda name: self.rows(name, blocks[number_of[name]] if name in number_of else load)

    @cached_property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @cached_property
    def _block_bytes(self) -> dict[tuple[str, float], list[float]]:
        """What `block_bytes` has found: a search over settings asks again and again."""
        return {}

    @cached_property
    def _by_block(self) -> dict[str, list[str]]:
        """Parameter names by block prefix; those outside the blocks under an empty prefix."""
        groups: dict[str, list[str]] = {prefix: [] for prefix in (*self.blocks, "")}
        depth = self.blocks[0].count(".")
        for name in self.shapes:
            prefix = ".".join(name.split(".")[:depth]) + "."
            groups[prefix if prefix in groups else ""].append(name)
        return groups

    def block_bytes(self, dtype: str, *, quantised: float) -> list[float]:
        """Bytes of the frozen weights of each block, in order.

        Args:
            quantised: bytes per weight of a linear layer, 0 for as `dtype` says.
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
        """A quantised weight has one scale per row beside it; only linear layers are quantised."""
        shape = self.shapes[name]
        if self.stays_float32(name):
            return 4.0 * math.prod(shape)
        if quantised and len(shape) == 2 and name.endswith(".weight"):
            return quantised * math.prod(shape) + BYTES[dtype] * shape[0]
        return float(BYTES[dtype]) * math.prod(shape)

    def linear_modules(self) -> dict[str, tuple[int, int]]:
        """Linear layers by name, with (out, in) features."""
        return {
            name.removesuffix(".weight"): (shape[0], shape[1])
            for name, shape in self.shapes.items()
            if name.endswith(".weight") and len(shape) == 2
        }

    def adapter_parameters(self, adapters: Adapters) -> int:
        """Numbers of a LoRA: `rank` times width in plus width out of each module, kernels of convolutions counted."""
        shapes = (self.shapes[f"{name}.weight"] for name in adapters.modules)
        return sum(adapters.rank * (shape[0] + math.prod(shape[1:])) for shape in shapes)

    def forward(self, load: BatchShape, adapters: Adapters = NO_ADAPTERS, *, blocks_only: bool = False) -> Work:
        """FLOPs of a forward pass: 2 x positions x weights, and the attentions."""
        names = self.shapes if not blocks_only else [n for prefix in self.blocks for n in self._by_block[prefix]]
        rows = self._applied(load)
        frozen = sum(self._product(name, rows) for name in names)
        lora = sum(sum(self._adapter_products(f"{name}.weight", rows, adapters)) for name in adapters.modules)
        return Work(frozen + lora) + self.attention(load)

    def backward(self, load: BatchShape, adapters: Adapters, *, full: bool) -> Work:
        """FLOPs of a backward pass without any recomputation, attention at twice its forward pass.

        A frozen layer costs its forward pass once more (the gradient of its input), a trained one twice.
        """
        linear, rows = 0.0, self._applied(load)
        for name in self.shapes:
            module = name.removesuffix(".weight")
            product, flows = self._product(name, rows), not self.starts(module, full)
            linear += product * (flows + full)
            if module in adapters:
                down, up = self._adapter_products(name, rows, adapters)
                linear += down * (1 + flows) + up * 2
        return Work(linear) + self.attention(load).times(ATTENTION_BACKWARD)

    def _product(self, name: str, rows: Callable[[str], int]) -> float:
        shape = self.shapes[name]
        return 2.0 * rows(name) * math.prod(shape) if len(shape) > 1 else 0.0

    def _adapter_products(self, name: str, rows: Callable[[str], int], adapters: Adapters) -> tuple[float, float]:
        """FLOPs of the two factors of one module's LoRA."""
        shape, each = self.shapes[name], 2.0 * rows(name) * adapters.rank
        return each * math.prod(shape[1:]), each * shape[0]


@dataclass(frozen=True)
class VaeLoad:
    """What the VAE has before it: so many pictures or clips of one size in pixels.

    Attributes:
        tiled: in tiles of 256 x 256 pixels (`vae_enable_tiling`).
        sliced: its 3D convolutions in slices of time (`vae_enable_patch_conv`).
    """

    samples: int
    frames: int
    width: int
    height: int
    tiled: bool = False
    sliced: bool = False

    @property
    def pixels(self) -> int:
        """Of one frame, or of one tile of it."""
        whole = self.width * self.height
        return min(whole, 256 * 256) if self.tiled else whole


def number(settings: Mapping[str, object], key: str, default: int) -> int:
    """A whole number of a model's config.json."""
    value = settings.get(key, default)
    return int(value) if isinstance(value, int | float) else default
