"""Costs of Sana Video that `cost.json` lacks: published dimensions and encoders. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simpletuner.models.cost import STOCK, FamilyCost, Kernels, Shape, TransformerCost, VaeLoad, number, read_cost_table

PACKAGE, TRANSFORMER_CLASS = "simpletuner.models.sanavideo", "SanaVideoTransformer3DModel"
# Parameters of the published encoders.
GEMMA = 2_614_341_888
WAN_VAE, LTX2_VAE = 126_892_531, 1_222_479_601
PUBLISHED = {
    "in_channels": 16, "out_channels": 16, "num_attention_heads": 20, "attention_head_dim": 112, "num_layers": 20,
    "num_cross_attention_heads": 20, "cross_attention_head_dim": 112, "cross_attention_dim": 2240,
    "caption_channels": 2304, "mlp_ratio": 3.0,
}  # fmt: skip
TEXT_LENGTH = 300  # tokens; the pipelines always pad to it


PUBLISHED_720 = {"in_channels": 128, "out_channels": 128, "patch_size": (1, 1, 1)}


def published(flavour: str) -> dict[str, object]:
    """Dimensions of the published checkpoint of a flavour."""
    return {**PUBLISHED, **(PUBLISHED_720 if flavour == "2b-720p" else {})}


def transformer_cost(
    settings: Mapping[str, object], shapes: Mapping[str, Shape], kernels: Kernels = STOCK
) -> TransformerCost:
    """The cost of a transformer with this config.json and these parameters."""
    head = number(settings, "attention_head_dim", 112)
    return TransformerCost(
        read_cost_table(PACKAGE), shapes, head, compiled=kernels.compiled,
        # Without an adapter these are products with weights that are not trained (`run_block`).
        compiled_reads={name: name for name in ("ff.conv_inverted", "ff.conv_point")},
    )  # fmt: skip


def vae_encode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Four frames at a time: 37 feature maps of the first width (measured: 3530 numbers per pixel with 96 channels)."""
    clip = 3 * load.frames * load.width * load.height
    return float(load.samples * (37 * number(settings, "base_dim", 96) * load.pixels + clip))


def vae_decode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Four frames at a time: 51 feature maps, and the clip's pixels (measured: 5113 numbers per pixel, 81 frames)."""
    clip = 3 * load.frames * load.width * load.height
    return float(load.samples * (51 * number(settings, "base_dim", 96) * load.pixels + clip))


def ltx2_encode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """The whole clip at once (measured with 9 to 81 frames: 40 numbers per pixel and frame, and 32 per pixel)."""
    return float(load.samples * (40 * load.frames + 48) * load.pixels)


def ltx2_decode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """The whole clip at once (measured likewise: 42.2 and 50); in strips 20.7, in tiles 25 and the clip's pixels."""
    if not load.strips:
        return load.samples * (42.2 * load.frames + 50) * load.pixels
    clip = 3 * load.width * load.height if load.tiled else 0
    return load.samples * load.frames * ((25 if load.tiled else 20.7) * load.pixels + clip)


def wan_decode_flops(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Metered with 17 and 81 frames."""
    return float(920 * number(settings, "base_dim", 96) ** 2 * load.all_pixels)


COST = FamilyCost(
    package=PACKAGE,
    transformer_class=TRANSFORMER_CLASS,
    published=published,
    transformer=transformer_cost,
    vae_parameters=WAN_VAE,
    text_parameters=GEMMA,
    vae_encode=vae_encode,
    vae_decode=vae_decode,
    vae_decode_flops=wan_decode_flops,
    prompt_layer="caption_projection.linear_1",
    guided_together=True,
    padded_text=TEXT_LENGTH,
)
COST_720 = replace(
    COST, vae_parameters=LTX2_VAE, vae_encode=ltx2_encode, vae_decode=ltx2_decode,
    vae_decode_flops=lambda settings, load: 1.3e6 * load.all_pixels,  # metered likewise
)  # fmt: skip
