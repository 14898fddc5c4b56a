"""Calculate by card how much faster a step is with `quantized_matmul`. Nothing is measured.

    python -m benchmarks.products

A step with bf16 products takes what the plan estimates. With 8 bits, products of the frozen layers
that multiply tokens take less time, but move more bytes around them:

- Inputs, and gradients times the scales of the weights, are rounded to 8 bits.
- torch's int8 product writes sums of 4 bytes, which are read again to be scaled. A kernel that
  scales its sums (`scaled`) does without them; `_scaled_mm` of fp8 is such a kernel.
- The backward pass transposes the levels. Transposed ones that are stored (`stored`) would save
  that, for one more byte per weight.

This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from simpletuner.budget.device import CARDS, planned_device
from simpletuner.budget.step_cost import Step
from simpletuner.budget.step_memory import StepModel
from simpletuner.config.device import Card
from simpletuner.config.load import Layer as Settings
from simpletuner.config.load import resolve
from simpletuner.errors import Problems
from simpletuner.models.cost import Adapters, BatchShape, FamilyCost, Kernels, Layer
from simpletuner.models.kandinsky5.cost import IMAGE_COST, VIDEO_COST

COMPILED = Kernels(compiled=True, tile_lists=True)
RANK = 16
TARGETS = ("self_attention.to_query", "self_attention.to_key", "self_attention.to_value")
# Layers whose input has been rounded for another layer.
SHARED_INPUTS = ("self_attention.to_key", "self_attention.to_value")

# Rates of 8-bit products, in units of bf16 products with float32 sums (data sheets). GeForce cards
# have half the rate for float32 sums, of bf16 and fp8, but the whole rate for int8.
GEFORCE_INT8 = 4.0
OTHER_INT8 = 2.0
FP8 = 2.0
# Share of that ratio which products reach: assumed. The less time arithmetic takes, the more the
# rest of a kernel counts.
REACHED = 0.8
# Inductor writes kernels of products only for GPUs with as many multiprocessors.
LEAST_MULTIPROCESSORS = 68


@dataclass(frozen=True)
class Chip:
    """What `cards.toml` does not say about a card.

    Attributes:
        int8, fp8: rate of products, in units of those in bf16; 0 if it has none.
    """

    multiprocessors: int
    int8: float = OTHER_INT8
    fp8: float = FP8


CHIPS: Mapping[Card, Chip] = {
    "3060": Chip(28, GEFORCE_INT8, fp8=0),
    "3090": Chip(82, GEFORCE_INT8, fp8=0),
    "4070": Chip(46, GEFORCE_INT8),
    "4080": Chip(76, GEFORCE_INT8),
    "4090": Chip(128, GEFORCE_INT8),
    "5090": Chip(170, GEFORCE_INT8),
    "a6000": Chip(84, fp8=0),
    "l40s": Chip(142),
    "a100": Chip(108, fp8=0),
    "h100": Chip(132),
}


@dataclass(frozen=True)
class Case:
    """A published model, and a micro-batch of it."""

    family: FamilyCost
    flavour: str
    batch: BatchShape


CASES = {
    "Image": Case(IMAGE_COST, "t2i-lite-sft", BatchShape(1, 1, 64, 64, 256)),
    "Lite": Case(VIDEO_COST, "t2v-lite-sft-5s", BatchShape(1, 16, 32, 48, 256)),
}


@dataclass(frozen=True)
class Products:
    """A way to multiply in 8 bits.

    Attributes:
        speed: rate in units of bf16 products.
        scaled: their kernel scales its sums.
        stored: the transposed levels are stored.
    """

    speed: float
    scaled: bool
    stored: bool = False

    def traffic(self, layer: Layer, tokens: int, *, backward: bool) -> float:
        """Bytes moved in excess of a bf16 product, for a layer's output or input gradient."""
        results, factors = layer.shape  # numbers per token
        if backward:
            results, factors = factors, results
        weights = results * factors

        moved = 0.0
        if backward or not layer.name.endswith(SHARED_INPUTS):
            moved += (2 + 1) * tokens * factors  # read and written to be rounded
        # Factors and weights are then read in 1 byte instead of 2.
        moved -= tokens * factors + weights
        if not self.scaled:
            moved += (4 + 4) * tokens * results
        if backward and not self.stored:
            moved += (1 + 1) * weights
        return moved


def ratio(step: Step, products: Products) -> float:
    """The duration of a step with such products, in units of one with bf16 products."""
    cost = step.model.cost
    rates = step.device.rates
    tokens = step.load.samples * step.load.tokens
    recomputed = sum(step.model.checkpointed) / cost.large
    seconds = step.cost.computing
    for layer in cost.layers:
        if not layer.block or layer.axis != "token":
            continue
        bf16 = layer.product(tokens) / rates.matmul
        saved = bf16 - bf16 / products.speed
        forward = products.traffic(layer, tokens, backward=False) / rates.memory - saved
        backward = products.traffic(layer, tokens, backward=True) / rates.memory - saved
        seconds += (1 + recomputed) * forward + backward
    return seconds / step.cost.computing


def make_step(case: Case, card: Card) -> Step:
    """A step of a LoRA on a card that holds the weights, with recomputed blocks."""
    cost = case.family.of_flavour(case.flavour, COMPILED, attention_type="regular")
    targets = [layer.name for layer in cost.layers if layer.name.endswith(TARGETS)]
    problems = Problems()
    settings = [("model_type", "lora"), ("model_family", "kandinsky5-video")]
    config = resolve([Settings("benchmark", settings)], problems)
    problems.raise_if_fatal()
    model = StepModel(cost, config, Adapters(RANK, frozenset(targets)))
    return Step(model, case.batch, planned_device(None, card, None))


def rows() -> Iterator[str]:
    """The table, in Markdown."""
    columns = ["card"]
    for name in CASES:
        columns += [f"{name}: bf16", "int8", "int8, scaled", "fp8"]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for card, chip in CHIPS.items():
        int8 = Products(REACHED * chip.int8, scaled=False)
        cells = [CARDS[card].name]
        for case in CASES.values():
            step = make_step(case, card)
            cells += [f"{step.cost.computing:.2f} s", f"{ratio(step, int8):.2f}"]
            can_scale = chip.multiprocessors >= LEAST_MULTIPROCESSORS
            scaled = replace(int8, scaled=True)
            cells.append(f"{ratio(step, scaled):.2f}" if can_scale else "–")
            fp8 = Products(REACHED * chip.fp8, scaled=True)
            cells.append(f"{ratio(step, fp8):.2f}" if chip.fp8 else "–")
        yield f"| {' | '.join(cells)} |"


def saved_by_stored_levels() -> float:
    """The largest share of a step that stored transposed levels save, of all cards and cases."""
    shares = []
    for card, chip in CHIPS.items():
        for case in CASES.values():
            step = make_step(case, card)
            transposing = ratio(step, Products(REACHED * chip.int8, scaled=True))
            stored = ratio(step, Products(REACHED * chip.int8, scaled=True, stored=True))
            shares.append(1 - stored / transposing)
    return max(shares)


if __name__ == "__main__":
    print("\n".join(rows()))
    print(f"Stored transposed levels would save up to {saved_by_stored_levels():.1%} of a step.")
