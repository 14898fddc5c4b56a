"""Transformers of random weights in many sizes, batches for them, and adapters around them.

The tests use the tiny ones, one per family. medium is large enough that arithmetic outweighs Python
on one CPU thread. lite, image, pro and sana are the real architectures with their usual number of
tokens; they are made on the device and need a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from accelerate import Accelerator, init_empty_weights
from diffusers import AutoencoderKL, AutoencoderKLHunyuanVideo
from torch import Tensor, nn
from transformers import Gemma2Model, PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import RunConfig
from simpletuner.diffusion.batch import Batch
from simpletuner.errors import Problems
from simpletuner.models.adapter import AdapterSettings, FamilyAdapter, load_adapter
from simpletuner.models.cost import STOCK, FamilyCost, Kernels, TransformerCost
from simpletuner.models.registry import FAMILIES
from simpletuner.models.source import ModelSource
from simpletuner.weights.part import Part
from tests.tools.tiny import WIDTH, build_qwen
from tests.tools.tiny_sana import build_gemma

CHANNELS = 16


@dataclass(frozen=True)
class Size:
    """An architecture and the size of its samples.

    Attributes:
        settings: arguments of the transformer's class.
        latents: frames, height and width.
        caption: tokens of a caption.
        embeds: width of each text embedding; the pooled one has no tokens.
        gigabytes: of the weights in bf16, parts that stay float32 included; None for sizes that are
            not published.
    """

    family: str
    flavour: str
    settings: dict[str, Any]
    latents: tuple[int, int, int]
    caption: int
    embeds: dict[str, int] = field(default_factory=dict)
    gigabytes: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a sample, in patches of 2 by 2."""
        frames, height, width = self.latents
        return frames * height * width // 4


def _published(
    family: str,
    flavour: str,
    latents: tuple[int, int, int],
    *,
    caption: int,
    embeds: dict[str, int],
    gigabytes: float,
) -> Size:
    """The architecture of a flavour as it is published, with dense attention."""
    settings = dict(FAMILIES[family].cost.published(flavour))
    if "attention_type" in settings:
        settings["attention_type"] = "regular"
    return Size(family, flavour, settings, latents, caption, embeds, gigabytes)


def _kandinsky(size: dict[str, Any], axes: tuple[int, int, int], **more: Any) -> dict[str, Any]:
    channels = {"in_visual_dim": CHANNELS, "out_visual_dim": CHANNELS}
    return {**channels, **size, "axes_dims": axes, **more}


_TINY = {
    "in_text_dim": WIDTH,
    "in_text_dim2": WIDTH,
    "time_dim": WIDTH,
    "model_dim": WIDTH,
    "ff_dim": 2 * WIDTH,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
}
_MEDIUM = {
    "in_text_dim": WIDTH,
    "in_text_dim2": WIDTH,
    "time_dim": 128,
    "model_dim": 384,
    "ff_dim": 1536,
    "num_text_blocks": 2,
    "num_visual_blocks": 8,
}
_NABLA: dict[str, Any] = {
    **_MEDIUM,
    "attention_type": "nabla",
    "attention_P": 0.9,
    "attention_add_sta": True,
    "attention_method": "topcdf",
    "attention_wT": 3,
    "attention_wW": 3,
    "attention_wH": 3,
}
_DEEP = {**_MEDIUM, "num_visual_blocks": 16}
_TINY_SANA = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 24,
    "cross_attention_dim": 48,
    "caption_channels": WIDTH,
}
_SMALL_TEXT = {"prompt_embeds": WIDTH, "pooled_prompt_embeds": WIDTH}
_QWEN_AND_CLIP = {"prompt_embeds": 3584, "pooled_prompt_embeds": 768}
_NARROW = (16, 24, 24)

SHAPES: dict[str, Size] = {
    "tiny": Size(
        "kandinsky5-image",
        "t2i-lite-sft",
        _kandinsky(_TINY, (4, 6, 6)),
        (1, 16, 16),
        24,
        _SMALL_TEXT,
    ),
    "medium": Size(
        "kandinsky5-image",
        "t2i-lite-sft",
        _kandinsky(_MEDIUM, _NARROW),
        (1, 32, 32),
        64,
        _SMALL_TEXT,
    ),
    "tiny-video": Size(
        "kandinsky5-video",
        "t2v-lite-sft-5s",
        _kandinsky(_TINY, (4, 6, 6), visual_cond=True),
        (3, 8, 12),
        24,
        _SMALL_TEXT,
    ),
    "medium-video": Size(
        "kandinsky5-video",
        "t2v-lite-sft-5s",
        _kandinsky(_MEDIUM, _NARROW, visual_cond=True),
        (5, 16, 24),
        64,
        _SMALL_TEXT,
    ),
    "deep": Size(
        "kandinsky5-video",
        "t2v-lite-sft-5s",
        _kandinsky(_DEEP, _NARROW, visual_cond=True),
        (4, 32, 32),
        128,
        _SMALL_TEXT,
    ),
    "medium-nabla": Size(
        "kandinsky5-video",
        "t2v-lite-sft-10s",
        _kandinsky(_NABLA, _NARROW, visual_cond=True),
        (4, 32, 32),
        64,
        _SMALL_TEXT,
    ),
    "tiny-sana": Size(
        "sanavideo", "2b-480p", _TINY_SANA, (3, 8, 12), 300, {"prompt_embeds": WIDTH}
    ),
    # 512 x 768, 61 frames
    "lite": _published(
        "kandinsky5-video",
        "t2v-lite-sft-5s",
        (16, 64, 96),
        caption=256,
        embeds=_QWEN_AND_CLIP,
        gigabytes=4.6,
    ),
    # 1024 x 1024
    "image": _published(
        "kandinsky5-image",
        "t2i-lite-sft",
        (1, 128, 128),
        caption=256,
        embeds=_QWEN_AND_CLIP,
        gigabytes=13.3,
    ),
    # 512 x 768, 121 frames
    "pro": _published(
        "kandinsky5-video",
        "t2v-pro-sft-5s-hd",
        (31, 64, 96),
        caption=256,
        embeds=_QWEN_AND_CLIP,
        gigabytes=43.4,
    ),
    # 480 x 832, 81 frames
    "sana": _published(
        "sanavideo",
        "2b-480p",
        (21, 60, 104),
        caption=300,
        embeds={"prompt_embeds": 2304},
        gigabytes=4.1,
    ),
}
SIZES = tuple(SHAPES)


def _small_kandinsky(heads: int, head: int, ratio: int) -> dict[str, Any]:
    widths = {
        **_TINY,
        "num_text_blocks": 2,
        "model_dim": heads * head,
        "ff_dim": ratio * heads * head,
    }
    return _kandinsky(widths, (head // 4, head * 3 // 8, head * 3 // 8))


def _small_sana(heads: int, head: int, ratio: int) -> dict[str, Any]:
    widths = {
        "attention_head_dim": head,
        "cross_attention_head_dim": head,
        "cross_attention_dim": heads * head,
    }
    counts = {"num_attention_heads": heads, "num_cross_attention_heads": heads}
    return {**_TINY_SANA, **counts, **widths, "mlp_ratio": float(ratio)}


# Settings of a small transformer by class, as functions of the number of heads, their width, and
# the width of the feed-forward in units of the model's. Text embeddings are `WIDTH` wide.
SMALL: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "Kandinsky5Transformer3DModel": _small_kandinsky,
    "SanaVideoTransformer3DModel": _small_sana,
}


def small_size(family: str, heads: int, head: int, ratio: int) -> Size:
    """A small model of a family, to be measured."""
    spec = FAMILIES[family]
    settings = SMALL[spec.cost.transformer_class](heads, head, ratio)
    pooled = {"pooled_prompt_embeds": WIDTH} if spec.text_encoders > 1 else {}
    return Size(
        family, spec.flavour_names[0], settings, (1, 8, 8), 24, {"prompt_embeds": WIDTH, **pooled}
    )


def transformer_class(size: str) -> Any:
    """The diffusers class of a size."""
    return getattr(diffusers, FAMILIES[SHAPES[size].family].cost.transformer_class)


def cost_of(
    cost: FamilyCost, model: Any, kernels: Kernels = STOCK, /, **changes: object
) -> TransformerCost:
    """The cost of a model by its config, with some changes, and by its parameters."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return cost.transformer({**model.config, **changes}, shapes, kernels)


def hollow_transformer(size: str) -> nn.Module:
    """The layers without weights; buffers have their values."""
    with init_empty_weights(include_buffers=False):
        model: nn.Module = transformer_class(size)(**SHAPES[size].settings)
    return model


def build_transformer(size: str, device: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The transformer of a size, in training mode; equal seeds give equal weights.

    Weights are drawn on the device and in the dtype in which a checkpoint is loaded, so making a
    model needs no more memory than having it. No weight is zero: behind a gate of zero, gradients
    would be zero.
    """
    model = hollow_transformer(size)
    generator = torch.Generator(device).manual_seed(seed)
    for name, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            values = random_weight(
                name,
                key,
                like=parameter,
                device=torch.device(device),
                dtype=dtype_of(model, f"{name}.{key}", dtype),
                generator=generator,
            )
            setattr(module, key, nn.Parameter(values))
    return model.to(device).train()


def dtype_of(model: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """float32 for modules that the class keeps in float32, else `dtype`."""
    kept_modules = model._keep_in_fp32_modules or ()
    is_kept = any(module in name.split(".") for module in kept_modules)
    return torch.float32 if is_kept else dtype


def random_weight(
    name: str,
    key: str,
    like: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Tensor:
    """A weight with which activations keep their size: norms near 1, small biases and gates."""
    values = torch.empty(like.shape, device=device, dtype=dtype)
    if like.ndim < 2 and key == "weight":
        return values.normal_(1.0, 0.05, generator=generator)
    if like.ndim < 2 or "modulation" in name:
        return values.normal_(0.0, 0.02, generator=generator)
    # A sum of n products of independent numbers has n times their variance.
    return values.normal_(0.0, like[0].numel() ** -0.5, generator=generator)


def build_vae() -> AutoencoderKL:
    """A VAE of Flux's shape at an eighth of its width: about 1/64 of its arithmetic."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        layers_per_block=2,
        latent_channels=16,
        norm_num_groups=8,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_clip_vae(size: str, device: str) -> AutoencoderKLHunyuanVideo:
    """HunyuanVideo's VAE, or one an eighth as wide if the size is not published; bf16 on a GPU."""
    real = SHAPES[size].gigabytes is not None
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        vae = AutoencoderKLHunyuanVideo(
            block_out_channels=(128, 256, 512, 512) if real else (16, 32, 64, 64),
            norm_num_groups=32 if real else 8,
        )
    made: AutoencoderKLHunyuanVideo = vae.to(dtype).requires_grad_(False).eval()
    return made


def build_medium_qwen(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLForConditionalGeneration:
    """The tests' Qwen2.5-VL made wider and deeper."""
    config = build_qwen(tokenizer).config
    text = config.text_config
    text.hidden_size = 512
    text.intermediate_size = 2048
    text.num_hidden_layers = 8
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.num_attention_heads = 8
    text.num_key_value_heads = 2
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [8, 12, 12]}
    config.vision_config.out_hidden_size = text.hidden_size
    return Qwen2_5_VLForConditionalGeneration(config)


# In the slice, feed-forward, attention and head have the shares of the arithmetic that they have in
# the real model.
_QWEN = {
    "slice": {
        "vocab_size": 4880,
        "hidden_size": 1024,
        "intermediate_size": 5408,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "real": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}


def build_qwen_of(
    size: str, tokenizer: PreTrainedTokenizerBase, device: str
) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL with a tiny vision tower: the real text model in bf16, or its slice in float32."""
    config = build_qwen(tokenizer).config
    text = config.text_config
    for name, value in _QWEN[size].items():
        setattr(text, name, value)
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [16, 24, 24]}
    text.initializer_range = 0.02
    config.vision_config.out_hidden_size = text.hidden_size
    with torch.device(device):
        dtype = torch.bfloat16 if size == "real" else torch.float32
        model: Any = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=dtype)
    made: Qwen2_5_VLForConditionalGeneration = model.requires_grad_(False).eval()
    return made


def build_medium_gemma(vocabulary: int) -> Gemma2Model:
    """The tests' Gemma 2 made wider and deeper."""
    config = build_gemma(vocabulary).config
    config.hidden_size = 512
    config.intermediate_size = 2048
    config.num_hidden_layers = 8
    config.layer_types = ["sliding_attention", "full_attention"] * (config.num_hidden_layers // 2)
    config.num_attention_heads = 4
    config.num_key_value_heads = 2
    config.head_dim = 128
    return Gemma2Model(config)


def make_config(size: str = "tiny", **settings: Any) -> RunConfig:
    """The config of a LoRA run."""
    shape = SHAPES[size]
    values = {
        "model_type": "lora",
        "model_family": shape.family,
        "model_flavour": shape.flavour,
        **settings,
    }
    problems = Problems()
    config = resolve([Layer("benchmark", list(values.items()))], problems)
    if config is None or problems:
        raise ValueError(problems)
    return config


def lora_targets(size: str) -> list[str]:
    """The layers that the family trains by default."""
    return list(FAMILIES[SHAPES[size].family].lora_targets)


def adapter_settings(config: RunConfig) -> AdapterSettings:
    """The settings of an adapter, as a run selects them."""
    return AdapterSettings(
        config.text, config.caching, config.family, config.validation.validation_noise_scheduler
    )


def RandomAdapter(config: RunConfig, size: str, device: str) -> FamilyAdapter:
    """The family's adapter, which makes a transformer of random weights instead of loading one."""
    spec = FAMILIES[SHAPES[size].family]
    flavour = spec.flavour(SHAPES[size].flavour)
    source = ModelSource.from_settings(spec, flavour, config.flat)
    adapter: Any = load_adapter(spec)(adapter_settings(config), flavour, source)
    load = adapter.load_transformer

    def load_random(dtype: torch.dtype, *, empty: bool = False) -> nn.Module:
        def build(*inputs: Any, **settings: Any) -> tuple[nn.Module, dict[str, list[str]]]:
            return build_transformer(size, device, dtype), {"missing_keys": []}

        no_download = mock.patch.object(Part, "fetch", return_value=Path())
        with no_download, mock.patch.object(transformer_class(size), "from_pretrained", build):
            loaded: nn.Module = load(dtype)
        return loaded

    adapter.load_transformer = load_random
    made: FamilyAdapter = adapter
    return made


def make_accelerator(device: str) -> Accelerator:
    """An accelerator as a run makes it, on a chosen device."""
    return Accelerator(mixed_precision="no", cpu=device == "cpu")


def make_batch(size: str, count: int, latents: tuple[int, int, int] | None = None) -> Batch:
    """Random latents and captions of one length, on the CPU."""
    shape = SHAPES[size]
    with torch.random.fork_rng():
        torch.manual_seed(count)
        embeds = [_random_embeds(shape) for _ in range(count)]
        clean = torch.randn(count, CHANNELS, *(latents or shape.latents))
    return Batch(clean, embeds, [f"memory/{index}" for index in range(count)])


def _random_embeds(shape: Size) -> dict[str, Tensor]:
    """Random text embeddings of a caption; the pooled one has no tokens."""
    embeds = {}
    for name, width in shape.embeds.items():
        is_pooled = name.startswith("pooled")
        embeds[name] = torch.randn(width) if is_pooled else torch.randn(shape.caption, width)
    return embeds


def clock_of(device: str) -> Callable[[], float]:
    """CPU seconds of this process, or wall seconds after the GPU has finished its work."""
    if device == "cpu":
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def write_checkpoint(folder: Path, size: str) -> Path:
    """Write a checkpoint with the transformer of a size and the other parts of the tests'."""
    from tests.tools.tiny import make_checkpoint

    make_checkpoint(folder)
    if size != "tiny":
        transformer: Any = build_transformer(size, "cpu", torch.float32)
        transformer.save_pretrained(folder / "transformer")
    return folder
