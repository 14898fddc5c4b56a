"""What the arithmetic that token routes save allows: the limit of their speed-up."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.models import SHAPES
from simpletuner.config.techniques.tread import Route

MODELS = ("deep", "lite", "image", "pro")  # Sana's convolutions allow no routes

# How often a LoRA step does the arithmetic of the forward pass: in it, in the recomputation, and
# backward. There frozen weights take one product for each of theirs, attention five for its two.
LINEAR_PASSES = 3.0
ATTENTION_PASSES = 4.5


def flops(size: str, tokens: int) -> float:
    """Arithmetic of one visual block in a step, with so many tokens in it.

    Text blocks, embeddings and the output, which routes leave alone, come to less than a hundredth
    and are left out.
    """
    model = SHAPES[size].settings
    caption = SHAPES[size].caption
    width: int = model["model_dim"]
    per_token = 2 * (6 * width**2 + 2 * width * model["ff_dim"])
    of_text = caption * 2 * 2 * width**2  # keys and values of the cross-attention
    attending = 4 * width * tokens * (tokens + caption)
    return LINEAR_PASSES * (tokens * per_token + of_text) + ATTENTION_PASSES * attending


def share_of_arithmetic(size: str, routes: Sequence[Route]) -> float:
    """Arithmetic of a step with routes in units of one without."""
    tokens = SHAPES[size].tokens
    blocks = SHAPES[size].settings["num_visual_blocks"]
    counts = [tokens] * blocks
    for route in (route.among(blocks) for route in routes):
        for block in range(route.first, route.last + 1):
            counts[block] = round((1 - route.ratio) * tokens)
    return sum(flops(size, count) for count in counts) / (blocks * flops(size, tokens))


def speed_up_table() -> list[list[str]]:
    """What can be gained from blocks 2 to -2 of the published models, by the share of tokens that
    is left out.
    """
    models = ("image", "lite", "pro")
    ratios = (0.25, 0.5, 0.75)
    rows = [
        [1 / share_of_arithmetic(size, [Route(ratio, 2, -2)]) for size in models]
        for ratio in ratios
    ]
    return [
        ["", *models],
        *(
            [f"{ratio:g}", *(f"{each:.2f}" for each in row)]
            for ratio, row in zip(ratios, rows, strict=True)
        ),
    ]
