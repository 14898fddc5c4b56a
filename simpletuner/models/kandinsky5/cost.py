"""Costs of Kandinsky 5 that `cost.json` lacks: published dimensions, encoders, NABLA's tiles. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from simpletuner.models.cost import (
    STOCK,
    BatchShape,
    FamilyCost,
    Kernels,
    Shape,
    TileBytes,
    TransformerCost,
    VaeLoad,
    number,
    read_cost_table,
)
from simpletuner.models.kandinsky5.options import TILE, is_sparse, is_sparse_flavour

PACKAGE, TRANSFORMER_CLASS = "simpletuner.models.kandinsky5", "Kandinsky5Transformer3DModel"
# Parameters of the published encoders.
QWEN_AND_CLIP = 8_292_166_656 + 123_060_480
QWEN_HEAD, QWEN_VISION = 544_997_376, 676_550_144
FLUX_VAE, HUNYUAN_VAE = 83_819_683, 246_478_803
# Share of the pairs of tiles that NABLA visits: a guess for Pro at 768x512, 121 frames, until a run has measured it.
ASSUMED_DENSITY = 0.25
PROMPT_PIXELS = 56  # pixels per side of a prompt token: Qwen gets the picture at half size, in patches of 28

# From the config.json of the published transformers.
LITE = {"model_dim": 1792, "ff_dim": 7168, "time_dim": 512, "num_visual_blocks": 32, "axes_dims": [16, 24, 24]}
IMAGE = {"model_dim": 2560, "ff_dim": 10240, "time_dim": 512, "num_visual_blocks": 50, "axes_dims": [32, 48, 48]}
PRO = {
    "model_dim": 4096, "ff_dim": 16384, "time_dim": 1024, "num_visual_blocks": 60, "num_text_blocks": 4,
    "axes_dims": [32, 48, 48],
}  # fmt: skip
CHANNELS = {"in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 3584, "in_text_dim2": 768}


def published(flavour: str) -> dict[str, object]:
    """Dimensions of the published checkpoint of a flavour."""
    task, *words = flavour.split("-")
    size = IMAGE if task in ("t2i", "i2i") else PRO if "pro" in words else LITE
    attention = "nabla" if is_sparse_flavour(flavour) else "regular"
    return {**CHANNELS, "num_text_blocks": 2, **size, "visual_cond": task != "t2i", "attention_type": attention}


def head_width(settings: Mapping[str, object]) -> int:
    """Width of an attention head."""
    axes = settings.get("axes_dims")
    return sum(axes) if isinstance(axes, list | tuple) else 64


def attention_heads(settings: Mapping[str, object]) -> int:
    """Attention heads, which processes may share; see `FamilySpec.heads`."""
    return number(settings, "model_dim", 2048) // head_width(settings)


def transformer_cost(
    settings: Mapping[str, object], shapes: Mapping[str, Shape], kernels: Kernels = STOCK
) -> TransformerCost:
    """The cost of a transformer with this config.json and these parameters."""
    head, heads = head_width(settings), attention_heads(settings)

    def tile_bytes(batch: BatchShape, size: int) -> TileBytes:
        """Quadratic in tokens, unlike the measured costs."""
        if not is_sparse(settings):
            return TileBytes()
        pairs = float(batch.samples * heads * (batch.tokens // TILE) ** 2)
        if kernels.tile_lists:
            # Booleans, from which both passes make four int32 lists, by a sort and scatters with int64 indices.
            return TileBytes(pairs, (16 + 24) * pairs)
        # A mask of a tile's queries for every key: booleans, and the numbers added to the scores.
        return TileBytes(TILE * size * pairs, TILE * 2 * pairs)

    unit = TILE if is_sparse(settings) else 1
    # Masks leave nothing out.
    density = (lambda tokens: ASSUMED_DENSITY) if is_sparse(settings) and kernels.tile_lists else None
    return TransformerCost(read_cost_table(PACKAGE), shapes, head, unit, tile_bytes, kernels.compiled, density=density)


def _base_channels(settings: Mapping[str, object]) -> int:
    channels = settings.get("block_out_channels", (128,))
    return int(channels[0]) if isinstance(channels, list | tuple) else 128


def image_vae_encode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Five feature maps of the first width at full size (measured: 640 numbers per pixel with 128 channels)."""
    return 5.0 * _base_channels(settings) * load.pixels * load.samples


def image_vae_decode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Six feature maps (measured: 768 numbers per pixel); in strips 3.2, with 2.5 to encode a source picture."""
    if not load.strips:
        return 6.0 * _base_channels(settings) * load.pixels * load.samples
    return _base_channels(settings) * load.samples * max(3.2 * load.pixels, 2.5 * load.width * load.height)


def _frames_at_once(load: VaeLoad) -> int:
    """The stock VAE processes 17 frames at a time."""
    return min(load.frames, 17)


def video_vae_encode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Measured with 1, 5, 17 and 61 frames: five feature maps per frame plus two; sliced, four plus five."""
    frames = _frames_at_once(load)
    maps = 4 * frames + 5 if load.sliced and frames > 1 else 5 * frames + 2
    return float(maps * _base_channels(settings) * load.pixels * load.samples)


def video_vae_decode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Measured likewise: nine maps per frame plus three; sliced, 6.75 plus eleven; in strips, 3.1 plus a half.

    The clip's pixels are held twice, in strips once.
    """
    frames = _frames_at_once(load)
    maps = 6.75 * frames + 11 if load.sliced and frames > 1 else 9 * frames + 3
    maps = 3.1 * frames + 0.5 if load.strips else maps
    clip = (1 if load.strips and not load.tiled else 2) * 3 * load.frames * load.width * load.height
    return float(load.samples * (maps * _base_channels(settings) * load.pixels + clip))


def video_vae_upsampled(settings: Mapping[str, object], load: VaeLoad) -> int:
    """The last upsampling, of twice the first width: all frames at a time but the first."""
    return 2 * _base_channels(settings) * max(_frames_at_once(load) - 1, 1) * load.pixels


def _decode_flops(per_pixel: float, settings: Mapping[str, object], load: VaeLoad) -> float:
    """FLOPs per pixel and square of the first width, metered with one layer in a block, and with two as published."""
    layers = (number(settings, "layers_per_block", 2) + 3) / 5
    return per_pixel * layers * _base_channels(settings) ** 2 * load.all_pixels


def picture_tokens(width: int, height: int) -> int:
    """Text tokens of a source picture in Qwen's prompt."""
    return math.ceil(width / PROMPT_PIXELS) * math.ceil(height / PROMPT_PIXELS)


IMAGE_COST = FamilyCost(
    package=PACKAGE,
    transformer_class=TRANSFORMER_CLASS,
    published=published,
    transformer=transformer_cost,
    vae_parameters=FLUX_VAE,
    text_parameters=QWEN_AND_CLIP,
    head_parameters=QWEN_HEAD,
    vision_parameters=QWEN_VISION,
    vae_encode=image_vae_encode,
    vae_decode=image_vae_decode,
    vae_decode_flops=partial(_decode_flops, 590),
    prompt_layer="text_embeddings.in_layer",
    picture_tokens=picture_tokens,
)
VIDEO_COST = replace(
    IMAGE_COST, vae_parameters=HUNYUAN_VAE, vae_encode=video_vae_encode, vae_decode=video_vae_decode,
    vae_upsampled=video_vae_upsampled, vae_decode_flops=partial(_decode_flops, 1460),
)  # fmt: skip
