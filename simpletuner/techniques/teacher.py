"""The teacher of CREPA: a frozen DINOv2 (Oquab et al., arXiv 2304.07193) on decoded frames."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import Dinov2Model, Dinov2WithRegistersModel

from simpletuner.config.techniques.crepa import CrepaConfig
from simpletuner.models.adapter import FamilyAdapter, LatentEncoder
from simpletuner.models.loading import load_whole
from simpletuner.models.placement import place
from simpletuner.models.vision import KINDS, VisionEncoder

# ImageNet statistics, with which DINOv2 normalises pictures.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
CLASSES = dict(zip(KINDS, (Dinov2Model, Dinov2WithRegistersModel), strict=True))
# Names of weights: torch hub to transformers.
RENAMED = {
    r"^(\w+_tokens?)$": r"embeddings.\1",
    "^pos_embed": "embeddings.position_embeddings",
    r"^patch_embed\.proj": "embeddings.patch_embeddings.projection",
    "^norm": "layernorm",
    "^blocks": "encoder.layer",
    r"attn\.proj": "attention.output.dense",
    r"ls(\d)\.gamma": r"layer_scale\1.lambda1",
    r"\.w12": ".weights_in",
    r"\.w3": ".weights_out",
}


class FrameTeacher:
    """Features of the pixel frames at latent frames: 0, 4, 8 and so on."""

    def __init__(
        self, model: Any, decoder: LatentEncoder, config: CrepaConfig, patch_size: int
    ) -> None:
        self.model = model
        self.decoder = decoder
        self.config = config
        self.patch_size = patch_size
        # The tokens before the patch tokens: one of the class, and registers.
        self.skipped = 1 + model.config.to_dict().get("num_register_tokens", 0)

    @torch.no_grad()
    def encode(self, latents: Tensor) -> Tensor:
        """Features of clean latents `C F H W`, on the model's token grid: bfloat16, `F h w E`."""
        count, height, width = latents.shape[1:]
        pixels = self.decoder.decode(latents[None])[0].transpose(0, 1)  # F 3 H W in [-1, 1]
        # The VAE encodes frame 0 alone, then groups of four: 61 frames have 16 latent frames, so
        # every fourth is taken, (61 - 1) / (16 - 1) = 4. A picture has one frame.
        interval = max((len(pixels) - 1) // max(count - 1, 1), 1)
        frames = pixels[::interval]
        batch_size = count
        if self.config.crepa_encoder_frames_batch_size > 0:
            batch_size = self.config.crepa_encoder_frames_batch_size
        features = [self._features(batch) for batch in frames.split(batch_size)]
        grid = height // self.patch_size, width // self.patch_size
        # 2-D: interpolation along flattened tokens would shift columns of a 2:3 clip by a third of
        # its width.
        resized = interpolate(torch.cat(features), grid, mode="bilinear", antialias=True)
        # Half the cache size of float32; the loss only compares directions.
        return resized.permute(0, 2, 3, 1).to(torch.bfloat16)

    def _features(self, frames: Tensor) -> Tensor:
        """Patch features of frames `F 3 H W` in [-1, 1]: float32, `F E rows columns`."""
        rows, columns = self.config.patches(*frames.shape[-2:])
        side = self.model.config.patch_size
        pictures = interpolate(
            frames / 2 + 0.5, (rows * side, columns * side), mode="bilinear", antialias=True
        )
        mean = pictures.new_tensor(MEAN).view(3, 1, 1)
        deviation = pictures.new_tensor(DEVIATION).view(3, 1, 1)
        normalised = (pictures - mean) / deviation
        tokens = self.model(normalised.to(self.model.dtype)).last_hidden_state
        patches = tokens[:, self.skipped :].transpose(1, 2)
        return patches.unflatten(2, (rows, columns)).float()


def load_teacher(
    encoder: VisionEncoder,
    config: CrepaConfig,
    adapter: FamilyAdapter,
    load_vae: Callable[[], LatentEncoder],
    device: torch.device,
) -> FrameTeacher:
    """Load the encoder, in bfloat16 on a GPU, and the VAE."""
    model = _load_model(encoder, torch.bfloat16 if device.type == "cuda" else torch.float32)
    decoder = load_vae()
    if config.crepa_drop_vae_encoder:
        decoder.vae.encoder = nn.Identity()
    model = place(model.requires_grad_(False).eval(), device)
    return FrameTeacher(model, decoder, config, adapter.spec.patch_size)


def _load_model(encoder: VisionEncoder, dtype: torch.dtype) -> Any:
    """The encoder as a transformers model, from a folder, from torch hub's file, or downloaded."""
    place = encoder.local()
    settings = encoder.settings()
    model_class: Any = CLASSES[settings["model_type"]]
    if place is None or place.is_dir():
        return load_whole(model_class, encoder.part, torch_dtype=dtype)
    weights = torch.load(place, map_location="cpu", weights_only=True)
    config = model_class.config_class(**settings)
    return model_class.from_pretrained(
        None, config=config, state_dict=rename_weights(weights), torch_dtype=dtype
    )


def rename_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename DINOv2 weights from torch hub's names to those of transformers."""
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for pattern, new in RENAMED.items():
            name = re.sub(pattern, new, name)
        # torch hub has one fused projection, transformers three.
        if "attn.qkv" in name:
            for part, rows in zip(("query", "key", "value"), weight.chunk(3), strict=True):
                renamed[name.replace("attn.qkv", f"attention.attention.{part}")] = rows
        else:
            renamed[name] = weight
    return renamed
