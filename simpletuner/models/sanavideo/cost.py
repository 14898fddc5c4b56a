"""Costs of Sana Video that `cost.json` lacks: published transformers and encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from simpletuner.config.json_reader import read_toml
from simpletuner.models.cost import FamilyCost, Kernels, TransformerCost
from simpletuner.models.cost_guess import cost_table_of
from simpletuner.models.cost_table import number
from simpletuner.models.vae_cost import VAE_COSTS
from simpletuner.weights.files import Shapes

PACKAGE = "simpletuner.models.sanavideo"
TRANSFORMER_CLASS = "SanaVideoTransformer3DModel"
# Classes of the VAE.
WAN = "AutoencoderKLWan"
LTX2 = "AutoencoderKLLTX2Video"
# Parameters of the published encoders.
GEMMA = 2_614_341_888
FAMILY = read_toml(PACKAGE, "family.toml")
TEXT_LENGTH = 300  # tokens; the pipelines always pad to it


def transformer_cost(
    settings: Mapping[str, object], shapes: Shapes, kernels: Kernels
) -> TransformerCost:
    """The cost of a transformer with this config.json and these parameters."""
    head = number(settings, "attention_head_dim", 112)
    return TransformerCost(
        cost_table_of(PACKAGE, shapes),
        shapes,
        head,
        compiled=kernels.compiled,
        # Without an adapter these are products with weights that are not trained (`run_block`).
        compiled_reads={name: name for name in ("ff.conv_inverted", "ff.conv_point")},
    )


COST = FamilyCost(
    package=PACKAGE,
    transformer_class=TRANSFORMER_CLASS,
    published=FAMILY["transformers"].__getitem__,
    transformer=transformer_cost,
    vae=VAE_COSTS[WAN],
    text_parameters=GEMMA,
    prompt_layer="caption_projection.linear_1",
    guided_together=True,
    padded_text=TEXT_LENGTH,
)
COST_720 = replace(COST, vae=VAE_COSTS[LTX2])
