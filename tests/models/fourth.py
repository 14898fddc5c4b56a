"""A fourth family around a class of diffusers, Sana for pictures, as one would begin it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from diffusers import SanaTransformer2DModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.cost_table import table_of
from simpletuner.config.option import Group
from simpletuner.config.types import Size
from simpletuner.diffusion.batch import NoisyBatch
from simpletuner.models.adapter import BlockLayout, FamilyAdapter
from simpletuner.models.cost import STOCK, FamilyCost, Kernels, TransformerCost
from simpletuner.models.cost_table import CostTable
from simpletuner.models.spec import (
    AutoShift,
    CaptionFormat,
    Component,
    FamilyChecks,
    FamilySpec,
    Flavour,
)
from simpletuner.models.vae_cost import VaeCost
from simpletuner.weights.files import Shape
from tests.tools.tiny import WIDTH

LINEAR = r"transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)"


def small(heads: int, head: int, ratio: int) -> dict[str, Any]:
    """Settings of a small transformer, as `benchmarks/models.py` has them for other families."""
    return {
        "num_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "num_cross_attention_heads": heads,
        "cross_attention_head_dim": head,
        "cross_attention_dim": heads * head,
        "in_channels": 16,
        "out_channels": 16,
        "caption_channels": WIDTH,
        "patch_size": 2,
        "mlp_ratio": float(ratio),
    }


@cache
def table() -> CostTable:
    """Measured here; a family of the package reads its `cost.json`."""
    return CostTable(**table_of([FOURTH], compiled=False))


def cost(
    settings: Mapping[str, object], shapes: Mapping[str, Shape], kernels: Kernels = STOCK
) -> TransformerCost:
    head: Any = settings["attention_head_dim"]
    return TransformerCost(table(), shapes, head)


class FourthAdapter(FamilyAdapter):
    """The part of an adapter that a training step needs."""

    transformer_class = SanaTransformer2DModel

    def predict(self, transformer: nn.Module, noisy: NoisyBatch) -> Tensor:
        prompts = [embed["prompt_embeds"] for embed in noisy.batch.embeds]
        text = pad_sequence(prompts, batch_first=True).to(self.dtype)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = torch.arange(text.shape[1]) < lengths[:, None]
        velocity: Tensor = transformer(
            hidden_states=noisy.noisy_latents[:, :, 0].to(self.dtype),
            encoder_hidden_states=text,
            encoder_attention_mask=mask.to(self.dtype),
            timestep=noisy.timesteps,
            return_dict=False,
        )[0]
        return velocity.float().unsqueeze(2)

    def block_layout(self, transformer: nn.Module) -> BlockLayout:
        model: Any = transformer
        name = "transformer_blocks"
        return BlockLayout(
            groups={name: model.get_submodule(name)},
            visual=name,
            width=model.config["num_attention_heads"] * model.config["attention_head_dim"],
        )


# Text encoders and previews are missing, which no training step needs.
FourthAdapter.__abstractmethods__ = frozenset()


class FourthOptions(Group):
    """The fourth family"""


FOURTH = FourthAdapter.spec = FamilySpec(
    name="fourth",
    title="The fourth family",
    media="image",
    flavours=(Flavour("small", "example/fourth", "t2i"),),
    adapter="tests.models.fourth:FourthAdapter",
    options=FourthOptions,
    defaults={"flow_schedule_shift": 3.0, "resolution": 512},
    block_counts={"transformer_blocks": "num_layers"},
    components={
        role: Component(role)
        for role in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    },
    size_multiple=16,
    vae_stride=8,
    patch_size=2,
    largest_side=2048,
    native_sizes={512: (Size(512, 512),)},
    lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
    lora_presets={"all-linear": LINEAR},
    adapter_classes={},
    quantised_layers=LINEAR,
    license="other",
    checks=FamilyChecks(lambda config, flavour: (), lambda flavour, source: ()),
    captions=CaptionFormat(
        300, clean=str.strip, fingerprint=lambda options, flavour: "no words around captions"
    ),
    auto_shift=AutoShift(most_tokens=8192, highest_mu=0.9),
    cost=FamilyCost(
        package="tests.models",
        transformer_class="SanaTransformer2DModel",
        published=lambda flavour: small(4, 32, 3),
        transformer=cost,
        vae=VaeCost(10_000_000, {"usual": [{"pixel": 640.0}]}, {"usual": [{"pixel": 768.0}]}),
        text_parameters=100_000_000,
        prompt_layer="caption_projection.linear_1",
    ),
)
