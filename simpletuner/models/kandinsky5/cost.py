"""What Kandinsky 5 costs: shapes, FLOPs and bytes of `Kandinsky5Transformer3DModel` and its encoders. No torch.

Notation: N tokens of a micro-batch (all samples), T text tokens, d the hidden width, f the width of the feed-forward.
Bytes of activations were counted from the forward pass of the stock block and checked with a meter on autograd; see
`tests/models/test_cost.py`.
"""

from __future__ import annotations

import math
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
from simpletuner.models.kandinsky5.geometry import TILE, is_sparse, is_sparse_flavour

FLOAT32 = ("time_embeddings.", "modulation.")  # `_keep_in_fp32_modules` of the class
QKV = ("to_query", "to_key", "to_value")
FIRST_PROJECTIONS = re.compile(r"(text|visual)_transformer_blocks\.0\.self_attention\.to_(query|key|value)")
QWEN_AND_CLIP = 8_292_166_656 + 123_060_480
FLUX_VAE, HUNYUAN_VAE = 83_819_683, 246_478_803
PROMPT_PIXELS = 56  # pixels a side of a picture per token of Qwen's prompt: it sees half the size in steps of 28

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


def transformer_cost(settings: Mapping[str, object]) -> TransformerCost:
    """The cost of a transformer with this config.json."""
    text, visual = number(settings, "num_text_blocks", 2), number(settings, "num_visual_blocks", 32)
    width = number(settings, "model_dim", 2048)

    def attention(load: Load) -> Work:
        return attention_work(load, width, text, visual)

    def activations(load: Load, size: int, adapters: Adapters) -> Activations:
        return activation_bytes(settings, load, size, adapters)

    return TransformerCost(
        shapes=dict(parameter_shapes(settings)),
        blocks=[
            *(f"text_transformer_blocks.{index}." for index in range(text)),
            *(f"visual_transformer_blocks.{index}." for index in range(visual)),
        ],
        large=visual,
        hidden=width,
        stays_float32=lambda name: any(part in name for part in FLOAT32),
        rows=rows,
        attention=attention,
        activations=activations,
        starts=starts,
        unit=TILE if is_sparse(settings) else 1,
    )


def parameter_shapes(settings: Mapping[str, object]) -> Iterable[tuple[str, Shape]]:
    """Every parameter of the model, by the name it has in a checkpoint."""
    d, time = number(settings, "model_dim", 2048), number(settings, "time_dim", 512)
    f, head = number(settings, "ff_dim", 5120), _head(settings)
    channels, out = number(settings, "in_visual_dim", 4), number(settings, "out_visual_dim", 4)
    patch = 4  # 1 x 2 x 2 latent positions
    visual = (2 * channels + 1 if settings.get("visual_cond") else channels) * patch
    yield from linear("time_embeddings.in_layer", time, d)
    yield from linear("time_embeddings.out_layer", time, time)
    for name, wide, narrow in (
        ("text_embeddings", number(settings, "in_text_dim", 3584), d),
        ("pooled_text_embeddings", number(settings, "in_text_dim2", 768), time),
    ):
        yield from linear(f"{name}.in_layer", narrow, wide)
        yield f"{name}.norm.weight", (narrow,)
        yield f"{name}.norm.bias", (narrow,)
    yield from linear("visual_embeddings.in_layer", d, visual)
    for kind, attentions in (("text", ("self",)), ("visual", ("self", "cross"))):
        for index in range(number(settings, f"num_{kind}_blocks", 2 if kind == "text" else 32)):
            yield from _block(f"{kind}_transformer_blocks.{index}", kind, attentions, d, f, time, head)
    yield from linear("out_layer.modulation.out_layer", 2 * d, time)
    yield from linear("out_layer.out_layer", out * patch, d)


def _block(
    prefix: str, kind: str, attentions: tuple[str, ...], d: int, f: int, time: int, head: int
) -> Iterable[tuple[str, Shape]]:
    yield from linear(f"{prefix}.{kind}_modulation.out_layer", 3 * (len(attentions) + 1) * d, time)
    for attention in attentions:
        for layer in (*QKV, "out_layer"):
            yield from linear(f"{prefix}.{attention}_attention.{layer}", d, d)
        yield f"{prefix}.{attention}_attention.query_norm.weight", (head,)
        yield f"{prefix}.{attention}_attention.key_norm.weight", (head,)
    yield from linear(f"{prefix}.feed_forward.in_layer", f, d, bias=False)
    yield from linear(f"{prefix}.feed_forward.out_layer", d, f, bias=False)


def _head(settings: Mapping[str, object]) -> int:
    axes = settings.get("axes_dims", (16, 24, 24))
    return sum(axes) if isinstance(axes, list | tuple) else 64


def rows(name: str, load: Load) -> int:
    """Time and modulation see one row per sample, text layers T of them, all others every token."""
    if "modulation." in name or name.startswith(("time_embeddings.", "pooled_")):
        return load.samples
    reads_text = name.startswith("text_") or "cross_attention.to_key" in name or "cross_attention.to_value" in name
    return load.samples * (load.text if reads_text else load.tokens)


def starts(module: str, full: bool) -> bool:
    """Embeddings; beside a LoRA also time, modulation, and the first projections of either kind of block."""
    if module.endswith("embeddings.in_layer"):
        return True
    beside_lora = "modulation." in module or "embeddings." in module or FIRST_PROJECTIONS.fullmatch(module)
    return not full and bool(beside_lora)


def attention_work(load: Load, d: int, text_blocks: int, visual_blocks: int) -> Work:
    """4 n m d for n queries and m keys: scores and their product with the values. NABLA's masks are not counted off."""
    visual = sum(each.tokens * (each.tokens + load.text) for each in load.in_blocks(visual_blocks))
    return Work(0.0, 4.0 * load.samples * d * (visual + text_blocks * load.text**2))


def activation_bytes(settings: Mapping[str, object], load: Load, size: int, adapters: Adapters) -> Activations:
    """Bytes of a micro-batch in a visual block of the stock classes.

    Of each element of N x d autograd keeps: the float32 inputs of three LayerNorms and three RMSNorms; q, k, v and
    the output of self-attention; q and the output of cross-attention; the input of the GELU (f / d elements); and the
    input of every adapted layer that is not among these. Where `size` is 4, float32 copies are no copies, and the
    first LayerNorm's input is the block's own. With NABLA the mask has an entry for each tile of queries, key and
    head: one byte as booleans, and once more as the numbers that attention adds to its scores, which autograd keeps. A
    kernel that takes lists of tiles needs less.
    """
    d, head, rank = number(settings, "model_dim", 2048), _head(settings), adapters.rank
    ratio = number(settings, "ff_dim", 5120) / d
    tokens, text = load.samples * load.tokens, load.samples * load.text
    elements = tokens * d
    copies = 3 * 4 if size < 4 else 2 * 4
    kept = copies + 3 * 4 + (4 + 2 + ratio + _adapted_inputs(adapters, ratio)) * size
    statistics = tokens * 4 * (5 * d // head + 3 * 2)  # per head: three RMSNorms, two log-sum-exps; three LayerNorms
    of_text = text * (d * (4 + 2 * size) + 4 * d // head)
    pairs = load.samples * load.tokens**2 // TILE * d // head if is_sparse(settings) else 0
    down = (tokens * 4 + text * 2) * rank * size
    return Activations(
        held=elements * size,
        saved=elements * kept + statistics + of_text + down + pairs * size,
        transient=max(
            elements * (2 * ratio * size + 4), 2.0 * pairs
        ),  # both sides of the GELU, and the residual's float32 gradient
        attention=elements * size + tokens * 4 * d // head,
        outside=tokens * head * 2 * 4 + text * d * size * 2,
        sampling=elements * (12 * size if size < 4 else 8 * size) + pairs * (1 + size),
        traffic=elements * 195 * size + pairs * 2 * (1 + size),
    )


def _adapted_inputs(adapters: Adapters, ratio: float) -> float:
    """Elements per element of N x d that are kept only because an adapter reads them."""
    layers = {re.sub(r"^visual_transformer_blocks\.\d+\.", "", name) for name in adapters.modules}
    inputs = any(f"self_attention.{layer}" in layers for layer in QKV) + ("cross_attention.to_query" in layers)
    forward = ("feed_forward.in_layer" in layers) + ratio * ("feed_forward.out_layer" in layers)
    return inputs + forward


def _base_channels(settings: Mapping[str, object]) -> int:
    channels = settings.get("block_out_channels", (128,))
    return int(channels[0]) if isinstance(channels, list | tuple) else 128


def image_vae_encode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Five maps of the first width at full size (metered: 640 numbers a pixel with 128 channels)."""
    return 5.0 * _base_channels(settings) * load.pixels * load.samples


def image_vae_decode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Six maps (metered: 768 numbers a pixel)."""
    return 6.0 * _base_channels(settings) * load.pixels * load.samples


def _frames_at_once(load: VaeLoad) -> int:
    """The stock VAE works on tiles of 16 frames and one more."""
    return min(load.frames, 17)


def video_vae_encode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Metered on the stock class with 1, 5, 17 and 61 frames: five maps a frame and two more; sliced, six."""
    maps = (6 if load.sliced else 5) * _frames_at_once(load) + 2
    return float(maps * _base_channels(settings) * load.pixels * load.samples)


def video_vae_decode(settings: Mapping[str, object], load: VaeLoad) -> float:
    """Metered likewise: nine maps a frame and three more; sliced, eleven. Then the pixels of the clip, twice."""
    maps = (11 if load.sliced else 9) * _frames_at_once(load) + 3
    clip = 2 * 3 * load.frames * load.width * load.height
    return float(load.samples * (maps * _base_channels(settings) * load.pixels + clip))


def picture_tokens(width: int, height: int) -> int:
    """Tokens of a source picture in Qwen's prompt."""
    return math.ceil(width / PROMPT_PIXELS) * math.ceil(height / PROMPT_PIXELS)


IMAGE_COST = FamilyCost(
    published=published,
    transformer=transformer_cost,
    vae_parameters=FLUX_VAE,
    text_parameters=QWEN_AND_CLIP,
    vae_encode=image_vae_encode,
    vae_decode=image_vae_decode,
    prompt_layer="text_embeddings.in_layer",
    picture_tokens=picture_tokens,
)
VIDEO_COST = FamilyCost(
    published=published,
    transformer=transformer_cost,
    vae_parameters=HUNYUAN_VAE,
    text_parameters=QWEN_AND_CLIP,
    vae_encode=video_vae_encode,
    vae_decode=video_vae_decode,
    prompt_layer="text_embeddings.in_layer",
)
