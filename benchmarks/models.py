"""Models of random weights in three sizes, and batches for them.

tiny is what the tests use. medium is large enough that arithmetic outweighs Python on one CPU thread. image is the
architecture of Kandinsky 5 Image (6B), for a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from diffusers import AutoencoderKL, Kandinsky5Transformer3DModel
from torch import nn
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from simpletuner.config.load import Layer, RunConfig, resolve
from simpletuner.diffusion.batch import Batch
from simpletuner.models.kandinsky5 import attention
from simpletuner.models.kandinsky5.image import Kandinsky5ImageAdapter
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE
from simpletuner.models.source import ModelSource
from tests.tiny import WIDTH, build_qwen, fill_zeros

SIZES = ("tiny", "medium", "image")
FLAVOUR = "t2i-lite-sft"

_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "tiny": {"in_text_dim": WIDTH, "in_text_dim2": WIDTH, "time_dim": WIDTH, "model_dim": WIDTH, "ff_dim": 2 * WIDTH,
             "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 6, 6)},
    "medium": {"in_text_dim": WIDTH, "in_text_dim2": WIDTH, "time_dim": 128, "model_dim": 384, "ff_dim": 1536,
               "num_text_blocks": 2, "num_visual_blocks": 8, "axes_dims": (16, 24, 24)},
    "image": {"in_text_dim": 3584, "in_text_dim2": 768, "time_dim": 512, "model_dim": 2560, "ff_dim": 10240,
              "num_text_blocks": 2, "num_visual_blocks": 50, "axes_dims": (32, 48, 48)},
}  # fmt: skip
# Height and width of the latents, and tokens of a caption.
LATENT_SIDE = {"tiny": 16, "medium": 32, "image": 128}
CAPTION_LENGTH = {"tiny": 24, "medium": 64, "image": 256}


def build_transformer(size: str, device: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The transformer of a size, in training mode; equal seeds give equal weights."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = Kandinsky5Transformer3DModel(in_visual_dim=16, out_visual_dim=16, **_TRANSFORMERS[size])
        fill_zeros(model)
    for name, parameter in model.named_parameters():
        if not any(each in name for each in model._keep_in_fp32_modules or ()):
            parameter.data = parameter.data.to(dtype)
    return model.train()


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


def build_medium_qwen(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLForConditionalGeneration:
    """The tests' Qwen2.5-VL made wider and deeper."""
    config = build_qwen(tokenizer).config
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 512, 2048, 8
    text.layer_types = ["full_attention"] * text.num_hidden_layers
    text.num_attention_heads, text.num_key_value_heads = 8, 2
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [8, 12, 12]}
    config.vision_config.out_hidden_size = text.hidden_size
    return Qwen2_5_VLForConditionalGeneration(config)


def make_config(**settings: Any) -> RunConfig:
    """The config of a LoRA run."""
    values = {"model_type": "lora", "model_family": KANDINSKY5_IMAGE.name, "model_flavour": FLAVOUR, **settings}
    problems: list[Any] = []
    config = resolve([Layer("benchmark", list(values.items()))], problems)
    if config is None or problems:
        raise ValueError(problems)
    return config


class RandomAdapter(Kandinsky5ImageAdapter):
    """The family's adapter, with a transformer of random weights made in place."""

    def __init__(self, config: RunConfig, size: str, device: str) -> None:
        flavour = KANDINSKY5_IMAGE.flavour(FLAVOUR)
        source = ModelSource.from_config(KANDINSKY5_IMAGE, flavour, config.model)
        super().__init__(flavour, source, config.model, config.text, config.caching)
        self.size, self.device = size, device

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        transformer = build_transformer(self.size, self.device, dtype)
        self.dtype = dtype
        self._padding = attention.install(transformer)
        return transformer


def make_accelerator(device: str) -> Accelerator:
    """As a run makes it, on a device of choice."""
    return Accelerator(mixed_precision="no", cpu=device == "cpu")


def make_batch(size: str, count: int) -> Batch:
    """Random latents and captions of one length, on the CPU."""
    shape, side, length = _TRANSFORMERS[size], LATENT_SIDE[size], CAPTION_LENGTH[size]
    with torch.random.fork_rng():
        torch.manual_seed(count)
        embeds = [
            {
                "prompt_embeds": torch.randn(length, shape["in_text_dim"]),
                "pooled_prompt_embeds": torch.randn(shape["in_text_dim2"]),
            }
            for _ in range(count)
        ]
        return Batch(torch.randn(count, 16, 1, side, side), embeds, [f"memory/{index}" for index in range(count)])


def clock_of(device: str) -> Callable[[], float]:
    """CPU seconds of this process, or wall seconds with the GPU's queue run empty."""
    if device == "cpu":
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def write_checkpoint(folder: Path, size: str) -> Path:
    """A whole checkpoint whose transformer has a size; its other parts are the tests'."""
    from tests.tiny import make_checkpoint

    make_checkpoint(folder)
    if size != "tiny":
        build_transformer(size, "cpu", torch.float32).save_pretrained(folder / "transformer")  # type: ignore[operator]
    return folder
