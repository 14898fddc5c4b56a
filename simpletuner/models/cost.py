"""Memory and compute of a transformer and a VAE, calculated without torch.

A family's `cost.json`, written by `python -m benchmarks.cost_table`, has the measurements. In names, `#` is the number
of a block. A quantity is a sum of products: the key of a factor, such as `token width`, names its multipliers. The
shapes of the parameters and this table determine the bytes of weights and activations, and the FLOPs of a forward pass
and of a training step.

FLOPs count a multiply-add as 2.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.resources import files
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from simpletuner.config.json_reader import read_toml
from simpletuner.config.techniques import Route, tokens_by_block
from simpletuner.weights.files import Shape, Shapes

P = ParamSpec("P")
R = TypeVar("R")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}  # per number
# Cost of the backward pass of attention relative to its forward pass. dQ, dK, dV and dP are four matmuls, the forward
# pass has two; a flash kernel also recomputes the scores (Dao 2023, arXiv 2307.08691, section 2.3).
ATTENTION_BACKWARD, FLASH_BACKWARD = 2.0, 2.5


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch in tokens.

    Attributes:
        samples: batch size.
        frames, height, width: tokens per sample along each axis.
        text: text tokens per sample.
        timed_tokens: timesteps are per token (a conditioning first frame in Sana Video).
        kept: tokens per sample in each large block with routes; empty if every block processes all tokens.
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
        return {"sample": self.samples, "text": self.samples * self.text, "token": self.samples * self.tokens}

    def in_blocks(self, blocks: int) -> list[BatchShape]:
        """The shape of this micro-batch in each of the `blocks` large blocks."""
        if not self.kept:
            return [self] * blocks
        whole = replace(self, kept=())
        # Kept tokens do not form a grid, so they count as one row.
        parts = {kept: replace(whole, frames=1, height=1, width=kept) for kept in self.kept}
        return [whole if kept == self.tokens else parts[kept] for kept in self.kept]


@dataclass(frozen=True)
class Work:
    """FLOPs of matmuls (`linear`), of dense softmax attention, and of block-sparse attention (`sparse`)."""

    linear: float = 0.0
    attention: float = 0.0
    sparse: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.linear + other.linear, self.attention + other.attention, self.sparse + other.sparse)

    def times(self, linear: float, attention: float | None = None) -> Work:
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
        saved: tensors that autograd saves for a large block without checkpointing, excluding its input.
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
        products: trained numbers per module of another kind, which materialises the update of the whole weight.
    """

    rank: int
    modules: frozenset[str]
    products: Mapping[str, int] = field(default_factory=dict, hash=False)


NO_ADAPTERS = Adapters(0, frozenset())


Factors = Mapping[str, float]


@dataclass(frozen=True)
class CostTable:
    """The content of a `cost.json`.

    Attributes:
        groups: names of the lists of repeated blocks, in the order of the forward pass; the last has the large ones.
        float32: name components of parameters that stay float32 at every precision setting.
        rows: the axis that each weight is applied to: every `token`, `text` token or `sample`.
        no_gradient: layers whose input needs no gradient, by kind of run: `lora` or `full`.
        keeps_attention: whether selective checkpointing can keep the output of self-attention.
        flops: FLOPs of a `large` and a `small` block, excluding matmuls with weights.
        bytes: of a large block, by dtype; `reads` lists layers whose input is kept only for an adapter, each with
            the first layer that reads the same input, `compiled` is what a compiled block saves, `compiled forward` and
            `compiled backward` what its kernels move, and `trained` what a stock one saves in a full fine-tune.
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


def numbered(name: str, groups: Sequence[str]) -> str:
    """A name with `#` in place of its block's number."""
    group, _, rest = name.partition(".")
    number, dot, rest = rest.partition(".")
    # transformer_blocks.7.attn1.to_q -> transformer_blocks.#.attn1.to_q
    return f"{group}.#.{rest}" if group in groups and number.isdecimal() and dot else name


def product_of(words: str, numbers: Mapping[str, float]) -> float:
    """The product of the numbers named in `words`, such as `token width`."""
    return math.prod(numbers[word] for word in words.split())


def sum_of(factors: Factors, numbers: Mapping[str, float]) -> float:
    return sum(factor * product_of(words, numbers) for words, factor in factors.items())


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
        """Input features; a kernel does not count."""
        return math.prod(self.shape[1:2])

    def product(self, positions: int) -> float:
        """FLOPs of the product with the weight."""
        return 2.0 * positions * math.prod(self.shape)

    def factors(self, positions: int, adapters: Adapters) -> tuple[float, float]:
        """FLOPs of the two factors (down, up) of the layer's LoRA; of another kind, 0 and the FLOPs of the update."""
        if self.name not in adapters.modules:
            return 0.0, 0.0
        if adapters.products:
            return 0.0, self.product(positions)
        factor = 2.0 * positions * adapters.rank
        return factor * math.prod(self.shape[1:]), factor * self.shape[0]


def remembered(method: Callable[Concatenate[Any, P], R]) -> cached_property[Callable[P, R]]:
    """A method with a cache per object, since the search over settings repeats calls."""
    return cached_property(lambda owner: cast("Callable[P, R]", cache(partial(method, owner))))


@dataclass(frozen=True)
class Weights:
    """The parameters of a transformer: their blocks, axes and bytes.

    Attributes:
        table: the measurements of its class.
        shapes: shape of every parameter, by name, as in the safetensors header.
    """

    table: CostTable
    shapes: Shapes

    @cached_property
    def blocks(self) -> list[str]:
        """Name prefixes (`transformer_blocks.0.`) of the repeated blocks, in the order of the forward pass."""
        counts = Counter(path[0] for path in {tuple(name.split(".")[:2]) for name in self.shapes})
        return [f"{group}.{number}." for group in self.table.groups for number in range(counts[group])]

    @cached_property
    def large(self) -> int:
        """Number of large blocks, which come last and are described by `activations`; all others are small."""
        return sum(prefix.startswith(f"{self.table.groups[-1]}.") for prefix in self.blocks)

    @cached_property
    def _by_block(self) -> dict[str, list[str]]:
        """Parameter names by block prefix; parameters outside the blocks have an empty prefix."""
        names: dict[str, list[str]] = {prefix: [] for prefix in (*self.blocks, "")}
        for name in self.shapes:
            prefix = ".".join(name.split(".")[:2]) + "."
            names[prefix if prefix in names else ""].append(name)
        return names

    @cached_property
    def layers(self) -> list[Layer]:
        """The layers that multiply with a weight."""
        rows, groups = self.table.rows, self.table.groups
        paths = [(name.removesuffix(".weight"), block) for block, names in self._by_block.items() for name in names]
        applied = ((path, block, rows.get(numbered(path, groups))) for path, block in paths)
        return [Layer(path, block, axis, self.shapes[f"{path}.weight"]) for path, block, axis in applied if axis]

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
    def largest_weight(self) -> int:
        """Numbers of the largest weight."""
        return max(map(math.prod, self.shapes.values()))

    def stays_float32(self, name: str) -> bool:
        """Whether a parameter stays float32 at every precision setting."""
        return any(part in name.split(".") for part in self.table.float32)

    @remembered
    def needs_no_gradient(self, module: str, full: bool) -> bool:
        """Whether the input of a module needs no gradient, because no trained weight precedes it; in a full fine-tune,
        only for embeddings."""
        names = self.table.no_gradient["full" if full else "lora"]
        return module in names or numbered(module, self.table.groups) in names

    @remembered
    def block_bytes(self, dtype: str, *, quantised: float) -> list[float]:
        """Bytes of the frozen weights of each block, in order.

        Args:
            quantised: bytes per weight of a quantised linear layer; 0 if not quantised.
        """
        return [sum(self._size(name, dtype, quantised) for name in self._by_block[prefix]) for prefix in self.blocks]

    @remembered
    def rest_bytes(self, dtype: str) -> float:
        """Bytes of the weights outside the blocks."""
        return sum(self._size(name, dtype, 0.0) for name in self._by_block[""])

    def _size(self, name: str, dtype: str, quantised: float) -> float:
        """Bytes of one parameter. Only linear layers are quantised; they have one scale per row as well."""
        shape = self.shapes[name]
        if self.stays_float32(name):
            return 4.0 * math.prod(shape)
        if quantised and len(shape) == 2 and name.endswith(".weight"):
            return quantised * math.prod(shape) + BYTES[dtype] * shape[0]
        return float(BYTES[dtype]) * math.prod(shape)

    @remembered
    def adapter_parameters(self, adapters: Adapters) -> int:
        """Parameters of an adapter; a LoRA has `rank` x (in + out) for each module, where `in` counts a kernel."""
        if adapters.products:
            return sum(adapters.products.values())
        shapes = (self.shapes[f"{name}.weight"] for name in adapters.modules)
        return adapters.rank * sum(shape[0] + math.prod(shape[1:]) for shape in shapes)


@dataclass(frozen=True)
class TransformerCost(Weights):
    """Memory and work of a transformer with its micro-batches.

    Attributes:
        head: width of an attention head.
        unit: number of tokens that a route keeps or drops together.
        tiles: (micro-batch, bytes per number) -> bytes of the tile lists or masks of block-sparse attention: saved, and
            at the peak of making them.
        compiled: blocks with adapters are compiled.
        density: tokens of a sample -> share of token pairs that block-sparse attention computes; None if dense.
        compiled_reads: further layers whose input a compiled block keeps only for an adapter; see the table's `reads`.
    """

    head: int
    unit: int = 1
    tiles: Callable[[BatchShape, int], tuple[float, float]] = field(default=lambda batch, size: (0.0, 0.0))
    compiled: bool = False
    density: Callable[[int], float] | None = None
    compiled_reads: Mapping[str, str] = field(default_factory=dict)

    def routed(self, batch: BatchShape, routes: Sequence[Route]) -> BatchShape:
        """The micro-batch with the tokens kept by routes in each block."""
        return replace(batch, kept=tokens_by_block(routes, self.large, batch.tokens, self.unit)) if routes else batch

    @remembered
    def activations(self, batch: BatchShape, size: int, adapters: Adapters) -> Activations:
        """Bytes of a micro-batch in a large block with its adapters. Measurements of stock blocks serve as bounds for
        compiled ones.

        Args:
            size: bytes per number of the compute dtype.
        """
        kind, positions, (tiles, making) = "bf16" if size < 4 else "fp32", batch.positions, self.tiles(batch, size)
        # Measured only for families with timesteps per token.
        factors = self.table.bytes.get(f"{kind} given" if batch.timed_tokens else kind, self.table.bytes[kind])
        heads = self.hidden // self.head
        # The feed-forward has the widest output.
        inner = max(layer.shape[0] for layer in self.large_layers if layer.axis == "token")
        numbers = {**positions, "width": self.hidden, "inner": inner, "head": self.head, "heads": heads}
        sums = {name: sum_of(factor, numbers) for name, factor in factors.items() if name != "reads"}
        # A full fine-tune also saves the input of every layer, for the weight gradient.
        saved = ("compiled" if self.compiled else "saved") if adapters.modules else "trained"
        reads = factors["reads"] | (self.compiled_reads if self.compiled else {})
        elements = positions["token"] * self.hidden
        kept = elements * size + positions["token"] * heads * 4  # its result and log-sum-exp
        traffic, lists = sums["traffic"], 2 * (tiles + making)
        # The backward pass of stock code moves twice as much.
        forward, backward = self._moved(sums, positions, adapters, size) if self.compiled else (traffic, 2 * traffic)
        return Activations(
            held=elements * size,
            saved=sums[saved] + self._adapted(reads, positions, adapters) * size + tiles,
            transient=max(sums["transient"], making),
            attention=kept + tiles if self.table.keeps_attention else 0.0,
            outside=sums["outside"],
            sampling=sums["sampling"] + tiles + making,
            traffic=traffic + lists,
            forward=forward + lists,
            backward=backward + 2 * lists,
        )

    def _moved(
        self, sums: Mapping[str, float], positions: Mapping[str, int], adapters: Adapters, size: int
    ) -> tuple[float, float]:
        """Bytes that the kernels of a compiled block move, forward and backward.

        A LoRA adds its output to the layer's output, and its gradient to the input's gradient: two reads and a write.
        """
        layers = [] if adapters.products else self._with_adapters(adapters)
        outputs = sum(positions[layer.axis] * layer.shape[0] for layer in layers)
        inputs = sum(positions[layer.axis] * layer.inputs for layer in layers)
        return sums["compiled forward"] + 3 * size * outputs, sums["compiled backward"] + 3 * size * inputs

    def _with_adapters(self, adapters: Adapters) -> list[Layer]:
        """The layers of a large block that have an adapter."""
        return [layer for layer in self.large_layers if layer.name in adapters.modules]

    def _adapted(self, reads: Mapping[str, str], positions: Mapping[str, int], adapters: Adapters) -> float:
        """Numbers that a block saves for its adapters: inputs not saved otherwise, and outputs of the down factors, or
        whole updates.
        """
        # By the first layer that reads an input, which is saved once.
        inputs, rest = dict[str, int](), 0
        for layer in self._with_adapters(adapters):
            if first := reads.get(layer.name.removeprefix(layer.block)):
                inputs[first] = positions[layer.axis] * layer.inputs
            rest += math.prod(layer.shape) if adapters.products else positions[layer.axis] * adapters.rank
        return sum(inputs.values()) + rest

    @remembered
    def activations_by_block(self, batch: BatchShape, size: int, adapters: Adapters) -> list[Activations]:
        """Activations of each large block. A block that starts a route still holds all tokens as its input."""
        blocks, whole = batch.in_blocks(self.large), replace(batch, kept=())
        bytes_of = {part: self.activations(part, size, adapters) for part in {whole, *blocks}}
        return [
            bytes_of[part] if part == last else replace(bytes_of[part], held=bytes_of[whole].held)
            for last, part in zip([whole, *blocks], blocks, strict=False)
        ]

    def _positions(self, batch: BatchShape) -> list[tuple[Layer, int]]:
        """The layers, each with the positions of a micro-batch that its weight is applied to."""
        parts = dict(zip(self.blocks[-self.large :], batch.in_blocks(self.large), strict=True))
        positions = {block: parts.get(block, batch).positions for block in self._by_block}
        return [(layer, positions[layer.block][layer.axis]) for layer in self.layers]

    def widest(self, batch: BatchShape) -> int:
        """The largest input or output of a linear layer of a large block, in numbers."""
        layers = (pair for pair in self._positions(batch) if pair[0].block.startswith(self.table.groups[-1]))
        return max(count * max(layer.shape) for layer, count in layers if len(layer.shape) == 2)

    def attention(self, batch: BatchShape) -> Work:
        """FLOPs of all attentions in a forward pass."""
        small = self._attention("small", batch).times(len(self.blocks) - self.large)
        large = (self._attention("large", part) for part in batch.in_blocks(self.large))
        return sum(large, small).times(batch.samples)

    def _attention(self, block: str, batch: BatchShape) -> Work:
        """FLOPs of a block for a sample: of softmax attention where they grow with the product of two lengths."""
        numbers = {"width": self.hidden, "head": self.head, "text": batch.text, "token": batch.tokens}
        work = Work()
        for words, factor in self.table.flops[block].items():
            flops, tokens, texts = factor * product_of(words, numbers), words.count("token"), words.count("text")
            if self.density is not None and tokens == 2:
                work += Work(sparse=flops * self.density(batch.tokens))
            else:
                work += Work(attention=flops) if tokens + texts == 2 else Work(linear=flops)
        return work

    @remembered
    def forward(self, batch: BatchShape, adapters: Adapters = NO_ADAPTERS, *, blocks_only: bool = False) -> Work:
        """FLOPs of a forward pass: 2 x positions x weights, plus attention."""
        linear = 0.0
        for layer, count in self._positions(batch):
            if layer.block or not blocks_only:
                linear += layer.product(count) + sum(layer.factors(count, adapters))
        return Work(linear) + self.attention(batch)

    @remembered
    def backward(self, batch: BatchShape, adapters: Adapters, *, full: bool) -> Work:
        """FLOPs of a backward pass without recomputation; attention counts twice its forward pass.

        A frozen layer costs as much as its forward pass (gradient of its input), a trained one twice that.
        """
        linear = 0.0
        for layer, count in self._positions(batch):
            flows = not self.needs_no_gradient(layer.name, full)
            # One product for the gradient of the input, and one for the gradient of the weight.
            linear += layer.product(count) * (flows + full)
            # Both factors are trained; the first needs the gradient of its input only if that flows on.
            down, up = layer.factors(count, adapters)
            linear += down * (1 + flows) + up * 2
        return Work(linear) + self.attention(batch).times(ATTENTION_BACKWARD)


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
    # As in diffusers' video VAEs.
    tile: int = 256

    @property
    def pixels(self) -> int:
        """Pixels of one frame, or of one tile of it."""
        whole = self.width * self.height
        return min(whole, self.tile * self.tile) if self.tiled else whole


Ways = Mapping[str, Sequence[Factors]]  # by way of working, the phases of it


@dataclass(frozen=True)
class VaeCost:
    """Measured cost of a VAE per sample, as sums of products like in `cost.json`.

    In products, `width` is the first width of its layers, `layers` their number relative to the published VAE, `frame`
    the frames processed at a time, `later` these without the first, `pixel` the pixels of a frame or tile, and `clip`
    the pixels of all frames.

    Attributes:
        parameters: number of parameters; in a family's table, of the published VAE.
        encoding, decoding: numbers alive in each phase, by way of working: `usual`, `sliced`, in `strips`, in `tiles`.
        flops: of decoding.
        upsampling: numbers that decoding upsamples at once.
        width_key: config key of the first width; `width` is the default.
        frames: maximum number of frames processed at a time; 0 for all.
        settings: its config.json; empty for the published VAE.
    """

    parameters: int
    encoding: Ways
    decoding: Ways
    flops: Factors = field(default_factory=dict)
    upsampling: Factors = field(default_factory=dict)
    width_key: str = ""
    width: int = 1
    frames: int = 0
    settings: Mapping[str, object] = field(default_factory=dict)

    def encode(self, load: VaeLoad) -> float:
        """Numbers alive at the peak of encoding."""
        return self._peak(self.encoding, load)

    def decode(self, load: VaeLoad) -> float:
        """Numbers alive at the peak of decoding."""
        return self._peak(self.decoding, load)

    def upsampled(self, load: VaeLoad) -> float:
        """Numbers that decoding a sample upsamples at once."""
        return sum_of(self.upsampling, self._numbers(load))

    def decode_flops(self, load: VaeLoad) -> float:
        """FLOPs of decoding."""
        return load.samples * sum_of(self.flops, self._numbers(load))

    def _peak(self, ways: Ways, load: VaeLoad) -> float:
        asked = {"tiles": load.strips and load.tiled, "strips": load.strips, "sliced": load.sliced and load.frames > 1}
        way = next((way for way, is_asked in asked.items() if is_asked and way in ways), "usual")
        numbers = self._numbers(load)
        return load.samples * max(sum_of(phase, numbers) for phase in ways[way])

    def _numbers(self, load: VaeLoad) -> dict[str, float]:
        first, frames = self.settings.get(self.width_key), min(load.frames, self.frames or load.frames)
        return {
            "width": first[0] if isinstance(first, list | tuple) else number(self.settings, self.width_key, self.width),
            "layers": (number(self.settings, "layers_per_block", 2) + 3) / 5,
            "frame": frames,
            "later": max(frames - 1, 1),
            "pixel": load.pixels,
            "clip": load.frames * load.width * load.height,
        }


def read_vae_costs(package: str) -> dict[str, VaeCost]:
    """Costs of a family's VAEs, by diffusers class."""
    return {name: VaeCost(**table) for name, table in read_toml(package, "vae.toml").items()}


@dataclass(frozen=True)
class FamilyCost:
    """The contents of a family's `cost.py`, for the plan.

    Attributes:
        package: the folder of the family, with its `cost.json`.
        transformer_class: name of the transformer's class in diffusers.
        published: flavour name -> dimensions of the published transformer, as in its config.json.
        transformer: (config.json, shapes of parameters by name, kernels) -> its cost.
        vae: the cost of its VAE.
        text_parameters: parameters of the published encoders, for checkpoints that are not downloaded yet.
        head_parameters, vision_parameters: the part of these dropped after loading; the vision tower only if prompts
            have no picture.
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

    def of_flavour(self, flavour: str, kernels: Kernels = STOCK, /, **changes: object) -> TransformerCost:
        """The cost of a published checkpoint, optionally with some settings changed."""
        shapes = read_cost_table(self.package).published_shapes(flavour)
        return self.transformer({**self.published(flavour), **changes}, shapes, kernels)


def number(settings: Mapping[str, object], key: str, default: int) -> int:
    """An integer setting of a model's config.json, or the default."""
    value = settings.get(key, default)
    return int(value) if isinstance(value, int | float) else default
