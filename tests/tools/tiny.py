"""Checkpoints of real classes, small enough to make and run in a second.

`make_checkpoint` writes a complete diffusers folder of random weights. The tokenizers are the
demo's, so that templates have their true lengths. Whatever a class initialises with zeros gets
small random values: behind a gate of zero every gradient is zero, and a test of gradients would
pass on nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5I2IPipeline,
    Kandinsky5I2VPipeline,
    Kandinsky5T2IPipeline,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from simpletuner.models.kandinsky5.loading import load_processor
from simpletuner.models.kandinsky5.templates import OFFICIAL
from simpletuner.rounding import round_up

TOKENIZERS = Path(__file__).parents[2] / "simpletuner" / "examples" / "demo" / "checkpoint"
WIDTH = 32
AXES = (4, 6, 6)  # numbers of a head by axis: two heads


def fill_zeros(model: torch.nn.Module, scale: float = 0.05) -> None:
    """Give every parameter that is all zeros small random values."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=scale)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """`model` with its parameters in `dtype`; unlike with `.to(dtype)`, buffers are not rounded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


# Words of the templates that are one token of Qwen's and two of the demo's tokenizer.
WHOLE_WORDS = (
    ("ĠBas", "ed"),
    ("Ġprovid", "ed"),
    ("sec", "ond"),
    ("Ġinterest", "ing"),
    ("Ġto", "gether"),
)


def split_as_qwen(folder: Path) -> None:
    """Let the tokenizer of a checkpoint split the templates as Qwen's own does.

    The vocabulary keeps its size: five tokens that neither the templates nor other merges use
    make room for `WHOLE_WORDS`.
    """
    path = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    merges = content["model"]["merges"]
    used = {part for merge in merges for part in merge}
    templates = " ".join(template.text for template in OFFICIAL.values())
    unused = []
    for merge in merges:
        token = "".join(merge)
        if token not in used and token.strip("Ġ") not in templates:
            unused.append(merge)
    for (left, right), merge in zip(WHOLE_WORDS, unused, strict=False):
        vocabulary[left + right] = vocabulary.pop("".join(merge))
        merges.remove(merge)
        merges.append([left, right])
    path.write_text(json.dumps(content), encoding="utf-8")


def build_qwen(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL of two layers with a vision tower of two; hidden states are `WIDTH` wide."""
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": round_up(len(tokenizer), 16),
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
            },
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def build_clip(tokenizer: PreTrainedTokenizerBase) -> CLIPTextModel:
    """CLIP's text model of two layers; the pooled output is `WIDTH` wide."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=round_up(len(tokenizer), 16),
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_factor=5.0,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_image_vae() -> AutoencoderKL:
    """A VAE like Flux': 16 latent channels at an eighth of the size, scaling and shift factor."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 16, 16),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


NABLA = {
    "attention_type": "nabla",
    "attention_P": 0.8,
    "attention_wT": 3,
    "attention_wH": 1,
    "attention_wW": 1,
    "attention_add_sta": True,
    "attention_method": "topcdf",
}


def build_video_vae(width: int = 8) -> AutoencoderKLHunyuanVideo:
    """A VAE like HunyuanVideo's: 16 latent channels, an eighth of the size, every fourth frame.

    It is the slowest part of a tiny run, hence its width of 8.
    """
    return AutoencoderKLHunyuanVideo(
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(width,) * 4,
        layers_per_block=1,
        norm_num_groups=width // 2,
        mid_block_add_attention=True,
    )


def build_kandinsky(
    *,
    visual_cond: bool = False,
    nabla: bool = False,
    visual_blocks: int = 2,
    axes: tuple[int, int, int] = AXES,
) -> Kandinsky5Transformer3DModel:
    """A Kandinsky 5 transformer of one text block and few visual ones, without zero parameters."""
    transformer = Kandinsky5Transformer3DModel(
        in_visual_dim=16,
        out_visual_dim=16,
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=WIDTH,
        model_dim=WIDTH,
        ff_dim=2 * WIDTH,
        num_text_blocks=1,
        num_visual_blocks=visual_blocks,
        axes_dims=axes,
        visual_cond=visual_cond,
        **(NABLA if nabla else {}),
    )
    fill_zeros(transformer)
    return transformer


PIPELINES = {
    "t2i": Kandinsky5T2IPipeline,
    "i2i": Kandinsky5I2IPipeline,
    "t2v": Kandinsky5T2VPipeline,
    "i2v": Kandinsky5I2VPipeline,
}


def make_checkpoint(
    folder: Path,
    task: Literal["t2i", "i2i", "t2v", "i2v"] = "t2i",
    *,
    nabla: bool = False,
    visual_blocks: int = 2,
    axes: tuple[int, int, int] = AXES,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a Kandinsky 5 checkpoint of random weights into `folder` and return it.

    It loads with `PIPELINES[task].from_pretrained(folder, tokenizer=load_processor(folder))`.
    """
    processor = load_processor(TOKENIZERS)
    clip_tokenizer = CLIPTokenizer.from_pretrained(TOKENIZERS, subfolder="tokenizer_2")
    is_video = task in ("t2v", "i2v")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The seed gives these weights in this order.
        transformer = build_kandinsky(
            visual_cond=task != "t2i", nabla=nabla, visual_blocks=visual_blocks, axes=axes
        )
        vae = build_video_vae() if is_video else build_image_vae()
        pipeline = PIPELINES[task](
            transformer=cast(transformer, dtype),
            vae=cast(vae, dtype),
            text_encoder=cast(build_qwen(processor.tokenizer), dtype),
            tokenizer=processor,
            text_encoder_2=cast(build_clip(clip_tokenizer), dtype),
            tokenizer_2=clip_tokenizer,
            scheduler=FlowMatchEulerDiscreteScheduler(),
        )
    pipeline.save_pretrained(folder)
    return folder
