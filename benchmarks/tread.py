"""The limit of the speed-up by token routes: the arithmetic that they save."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.models import SHAPES
from simpletuner.config.techniques.tread import Route

MODELS = ("deep", "lite", "image", "pro")  # Sana's convolutions allow no routes

# How often a LoRA step does the arithmetic of the forward pass. It is done in the forward pass and
# in the recomputation. In the backward pass, a frozen weight has one product (the gradient of its
# input) for one of the forward pass, and attention has five for its two: 1 + 1 + 1, 1 + 1 + 2.5.
LINEAR_PASSES = 3.0
ATTENTION_PASSES = 4.5


def flops(size: str, tokens: int) -> float:
    """Arithmetic of one visual block with so many tokens in a step.

    Text blocks, embeddings and the output have no routes. They are less than a hundredth of the
    arithmetic and are left out.
    """
    model = SHAPES[size].settings
    caption = SHAPES[size].caption
    width: int = model["model_dim"]
    # A product with a weight is 2 operations per number of the weight. A token meets q, k, v and
    # the output of the self-attention, q and the output of the cross-attention, and two layers of
    # the feed-forward; a token of the caption, k and v of the cross-attention.
    per_token = 2 * (6 * width**2 + 2 * width * model["ff_dim"])
    of_text = caption * 2 * 2 * width**2
    # Scores and their product with the values, with all tokens and with the caption.
    attending = 4 * width * tokens * (tokens + caption)
    return LINEAR_PASSES * (tokens * per_token + of_text) + ATTENTION_PASSES * attending


def share_of_arithmetic(size: str, routes: Sequence[Route]) -> float:
    """Arithmetic of a step with routes in units of one without."""
    tokens = SHAPES[size].tokens
    blocks = SHAPES[size].settings["num_visual_blocks"]
    counts = [tokens] * blocks
    for route in routes:
        resolved = route.among(blocks)
        for block in range(resolved.first, resolved.last + 1):
            counts[block] = round((1 - resolved.ratio) * tokens)
    return sum(flops(size, count) for count in counts) / (blocks * flops(size, tokens))


def speed_up_table() -> list[list[str]]:
    """Speed-ups of the published models, by the share of tokens that skip blocks 2 to -2."""
    models = ("image", "lite", "pro")
    table = [["", *models]]
    for ratio in (0.25, 0.5, 0.75):
        route = Route(ratio, 2, -2)
        speed_ups = [1 / share_of_arithmetic(size, [route]) for size in models]
        table.append([f"{ratio:g}", *(f"{speed_up:.2f}" for speed_up in speed_ups)])
    return table
