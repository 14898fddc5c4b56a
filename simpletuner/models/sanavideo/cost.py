"""What Sana Video costs: shapes, FLOPs and bytes of `SanaVideoTransformer3DModel` and its encoders. No torch.

Notation as in the Kandinsky page: N tokens, d hidden width, and h the width inside the convolutional feed-forward,
which works on 2 h channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from simpletuner.models.cost import (
    Activations,
    Adapters,
    FamilyCost,
    Load,
    Shape,
    TransformerCost,
    VaeLoad,
    Work,
    linear,
    number,
)

GEMMA = 2_614_341_888
WAN_VAE = 126_892_531
TIME_WIDTH = 256  # of the sinusoids of a timestep
PUBLISHED = {
    "in_channels": 16, "out_channels": 16, "num_attention_heads": 20, "attention_head_dim": 112, "num_layers": 20,
    "num_cross_attention_heads": 20, "cross_attention_head_dim": 112, "cross_attention_dim": 2240,
    "caption_channels": 2304, "mlp_ratio": 3.0,
}  # fmt: skip
TEXT_LENGTH = 300  # text is always padded to it


# Modules whose input depends on no LoRA.
BESIDE_LORA = re.compile(r"time_embed|caption_projection|.*\.attn2\.to_[kv]$|transformer_blocks\.0\.attn1\.to_[qkv]$")


def published(flavour: str) -> dict[str, object]:
    """Dimensions of the published checkpoint."""
    return dict(PUBLISHED)


def transformer_cost(settings: Mapping[str, object]) -> TransformerCost:
    """The cost of a transformer with this config.json."""
    layers, d = number(settings, "num_layers", 20), _width(settings)

    def attention(load: Load) -> Work:
        return attention_work(settings, load)

    def activations(load: Load, size: int, adapters: Adapters) -> Activations:
        return activation_bytes(settings, load, size, adapters)

    return TransformerCost(
        shapes=dict(parameter_shapes(settings)),
        blocks=[f"transformer_blocks.{index}." for index in range(layers)],
        large=layers,
        hidden=d,
        stays_float32=lambda name: False,
        rows=rows,
        attention=attention,
        activations=activations,
        starts=starts,
    )


def _width(settings: Mapping[str, object]) -> int:
    return number(settings, "num_attention_heads", 20) * number(settings, "attention_head_dim", 112)


def _inner(settings: Mapping[str, object]) -> int:
    ratio = settings.get("mlp_ratio", 2.5)
    return int(float(ratio) * _width(settings)) if isinstance(ratio, int | float) else 3 * _width(settings)


def parameter_shapes(settings: Mapping[str, object]) -> Iterable[tuple[str, Shape]]:
    """Every parameter of the model, by the name it has in a checkpoint."""
    d, channels = _width(settings), number(settings, "in_channels", 16)
    captions, out = number(settings, "caption_channels", 2304), number(settings, "out_channels", 16)
    yield "scale_shift_table", (2, d)
    yield "patch_embedding.weight", (d, channels, 1, 2, 2)
    yield "patch_embedding.bias", (d,)
    yield from linear("time_embed.emb.timestep_embedder.linear_1", d, TIME_WIDTH)
    yield from linear("time_embed.emb.timestep_embedder.linear_2", d, d)
    yield from linear("time_embed.linear", 6 * d, d)
    yield from linear("caption_projection.linear_1", d, captions)
    yield from linear("caption_projection.linear_2", d, d)
    yield "caption_norm.weight", (d,)
    for index in range(number(settings, "num_layers", 20)):
        yield from _block(f"transformer_blocks.{index}", settings, d, _inner(settings))
    yield from linear("proj_out", out * 4, d)


def _block(prefix: str, settings: Mapping[str, object], d: int, h: int) -> Iterable[tuple[str, Shape]]:
    cross = number(settings, "cross_attention_dim", d)
    biased = bool(settings.get("attention_bias", False))
    yield f"{prefix}.scale_shift_table", (6, d)
    for attention, context, bias in (("attn1", d, biased), ("attn2", cross, True)):
        yield f"{prefix}.{attention}.norm_q.weight", (d,)
        yield f"{prefix}.{attention}.norm_k.weight", (d,)
        for layer, wide in (("to_q", d), ("to_k", context), ("to_v", context)):
            yield from linear(f"{prefix}.{attention}.{layer}", d, wide, bias=bias)
        yield from linear(f"{prefix}.{attention}.to_out.0", d, d)
    yield f"{prefix}.ff.conv_inverted.weight", (2 * h, d, 1, 1)
    yield f"{prefix}.ff.conv_inverted.bias", (2 * h,)
    yield f"{prefix}.ff.conv_depth.weight", (2 * h, 1, 3, 3)
    yield f"{prefix}.ff.conv_depth.bias", (2 * h,)
    yield f"{prefix}.ff.conv_point.weight", (d, h, 1, 1)
    yield f"{prefix}.ff.conv_temp.weight", (d, d, 3, 1)


def rows(name: str, load: Load) -> int:
    """One row per sample for the timestep (each distinct one is embedded once), T for text, else every token."""
    if name.endswith("scale_shift_table"):
        return 0
    if name.startswith("time_embed."):
        return load.samples * (1 + load.timed_tokens)
    reads_text = name.startswith("caption_") or "attn2.to_k" in name or "attn2.to_v" in name
    return load.samples * (load.text if reads_text else load.tokens)


def starts(module: str, full: bool) -> bool:
    """Embeddings; beside a LoRA also keys and values of the text, and the first block's projections of its input."""
    if module == "patch_embedding" or module.endswith(("timestep_embedder.linear_1", "caption_projection.linear_1")):
        return True
    return not full and BESIDE_LORA.match(module) is not None


def attention_work(settings: Mapping[str, object], load: Load) -> Work:
    """Linear self-attention (Katharopoulos et al., arXiv 2006.16236) and softmax cross-attention.

    Of the first, value x key and its product with the queries are 2 N d head each, the normaliser 2 N d.
    """
    d, layers = _width(settings), number(settings, "num_layers", 20)
    head, tokens = number(settings, "attention_head_dim", 112), load.samples * load.tokens
    return Work(2.0 * layers * tokens * d * (2 * head + 1), 4.0 * layers * tokens * load.text * d)


def activation_bytes(settings: Mapping[str, object], load: Load, size: int, adapters: Adapters) -> Activations:
    """Bytes of a micro-batch in a block of the stock classes.

    Of each element of N x d autograd keeps seven in float32 (three RMSNorms, and the linear attention's operands and
    result), thirteen in the compute dtype, and of the feed-forward's 2 h channels four maps. A timestep per token adds
    six modulations, which live as long as the step, and eight elements to what a block keeps.
    """
    d, h = _width(settings), _inner(settings)
    tokens, text = load.samples * load.tokens, load.samples * load.text
    elements, wide = tokens * d, 2 * h / d
    timed = 8 * size if load.timed_tokens else 0
    copies = 7 * 4 if size < 4 else 5 * 4  # float32 copies of what is float32 are no copies
    kept = copies + (13 + 4 * wide) * size + timed
    down = (tokens * 6 + text * 2) * adapters.rank * size
    return Activations(
        held=elements * size,
        saved=elements * kept + text * d * (4 + 3 * size) + down,
        transient=elements * size * wide,
        attention=0.0,  # linear attention is cheap to compute again, and nothing of it is kept
        outside=elements * size * (0.25 + 6 * load.timed_tokens),
        sampling=elements * size * (15 + 12 * load.timed_tokens),
        traffic=elements * 183 * size,
    )


def vae_encode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Four frames at a time: 37 maps of the first width (metered: 3530 numbers a pixel with 96 channels)."""
    clip = 3 * load.frames * load.width * load.height
    return float(load.samples * (37 * number(settings, "base_dim", 96) * load.pixels + clip))


def vae_decode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Four frames at a time: 51 maps, and the pixels of the clip (metered: 5113 numbers a pixel for 81 frames)."""
    clip = 3 * load.frames * load.width * load.height
    return float(load.samples * (51 * number(settings, "base_dim", 96) * load.pixels + clip))


COST = FamilyCost(
    published=published,
    transformer=transformer_cost,
    vae_parameters=WAN_VAE,
    text_parameters=GEMMA,
    vae_encode=vae_encode,
    vae_decode=vae_decode,
    prompt_layer="caption_projection.linear_1",
    guided_together=True,
    padded_text=TEXT_LENGTH,
)
