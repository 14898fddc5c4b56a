"""Costs of Kandinsky 5 that `cost.json` lacks: published transformers, encoders, NABLA's tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simpletuner.config.json_reader import read_toml
from simpletuner.models.cost import BatchShape, FamilyCost, Kernels, TransformerCost
from simpletuner.models.cost_guess import cost_table_of
from simpletuner.models.cost_table import number
from simpletuner.models.kandinsky5.options import (
    TILE,
    heads_at_once,
    is_sparse,
    is_sparse_flavour,
)
from simpletuner.models.vae_cost import VAE_COSTS
from simpletuner.rounding import ceil_div
from simpletuner.weights.files import Shapes

PACKAGE = "simpletuner.models.kandinsky5"
TRANSFORMER_CLASS = "Kandinsky5Transformer3DModel"
# Parameters of the published encoders.
QWEN = 8_292_166_656
QWEN_HEAD = 544_997_376  # of these
QWEN_VISION = 676_550_144  # of these
CLIP = 123_060_480
# Float32 layers whose weights are stored in bf16 where that is exact (`blocks.store_in_bf16`).
MODULATION = frozenset({"modulation", "text_modulation", "visual_modulation"})
# Share of tile pairs that NABLA visits: a guess for Pro at 768x512, 121 frames, until a run has
# measured it.
ASSUMED_DENSITY = 0.25
# Pixels per side of a prompt token: Qwen gets the picture at half size, and makes a token of 28.
PROMPT_PIXELS = 2 * 28

FAMILY = read_toml(PACKAGE, "family.toml")


def published(flavour: str) -> dict[str, object]:
    """The config.json of the published transformer of a flavour."""
    task, *words = flavour.split("-")
    if task in ("t2i", "i2i"):
        size = "image"
    elif "pro" in words:
        size = "pro"
    else:
        size = "lite"
    return {
        **FAMILY["transformers"][size],
        "visual_cond": task != "t2i",
        "attention_type": "nabla" if is_sparse_flavour(flavour) else "regular",
    }


def head_width(settings: Mapping[str, object]) -> int:
    """Width of an attention head."""
    axes = settings.get("axes_dims")  # of the rotary embedding, which fills a head
    if isinstance(axes, list | tuple):
        return sum(axes)
    return 64


def attention_heads(settings: Mapping[str, object]) -> int:
    """Attention heads, which processes may share; see `FamilySpec.heads`."""
    return number(settings, "model_dim", 2048) // head_width(settings)


def transformer_cost(
    settings: Mapping[str, object], shapes: Shapes, kernels: Kernels
) -> TransformerCost:
    """The cost of a transformer with this config.json and these parameters."""
    head = head_width(settings)
    dense = TransformerCost(
        cost_table_of(PACKAGE, shapes),
        shapes,
        head,
        modulation=MODULATION,
        compiled=kernels.compiled,
    )
    if not is_sparse(settings):
        return dense
    heads = attention_heads(settings)

    def tile_bytes(batch: BatchShape, size: int) -> tuple[float, float]:
        """Saved and temporary bytes of a block's tile lists or masks, see `TransformerCost.tiles`.

        They are quadratic in tokens, unlike the measured costs, so the table lacks them.
        """
        tiles = batch.tokens // TILE
        pairs = float(batch.samples * heads * tiles**2)
        if kernels.tile_lists:
            # Saved is a boolean per pair of tiles. Both passes convert them to two int32 lists
            # (8 bytes per pair), by cumulative sums and scatters with int64 indices (16 bytes per
            # pair of the heads that are sorted at one time).
            sorted_heads = heads_at_once(batch.samples, heads, tiles)
            return pairs, 8 * pairs + 16 * pairs * sorted_heads / heads
        # A mask has a row of TILE keys per pair. Saved are the biases that are added to the scores;
        # temporary are its booleans, twice.
        return TILE * size * pairs, TILE * 2 * pairs

    def assumed_density(tokens: int) -> float:
        return ASSUMED_DENSITY

    return replace(
        dense,
        unit=TILE,
        tiles=tile_bytes,
        density=assumed_density if kernels.tile_lists else None,  # with masks, all are computed
    )


def picture_tokens(width: int, height: int) -> int:
    """Text tokens of a source picture in Qwen's prompt."""
    return ceil_div(width, PROMPT_PIXELS) * ceil_div(height, PROMPT_PIXELS)


IMAGE_COST = FamilyCost(
    package=PACKAGE,
    transformer_class=TRANSFORMER_CLASS,
    published=published,
    transformer=transformer_cost,
    vae=VAE_COSTS["AutoencoderKL"],
    text_parameters=QWEN + CLIP,
    head_parameters=QWEN_HEAD,
    vision_parameters=QWEN_VISION,
    prompt_layer="text_embeddings.in_layer",
    picture_tokens=picture_tokens,
)
VIDEO_COST = replace(IMAGE_COST, vae=VAE_COSTS["AutoencoderKLHunyuanVideo"])
