"""Conversions between the common batch layout and `Kandinsky5Transformer3DModel`, for pictures and clips.

Also the order of visual tokens in the blocks, and sampling latents from the VAE's posterior.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from simpletuner.diffusion.batch import TextEmbeds, upload
from simpletuner.models.adapter import BlockLayout, TokenRouting, raster_order
from simpletuner.models.kandinsky5.attention import TextPadding
from simpletuner.models.kandinsky5.options import TILE, TILE_SIDE, is_sparse
from simpletuner.models.loading import VaeEncoder

PATCH = 2  # latent positions per token, on each side


def channels_last(latents: Tensor) -> Tensor:
    """`B C F H W` to the transformer's `B F H W C`."""
    return latents.permute(0, 2, 3, 4, 1)


def collate_text(embeds: Sequence[TextEmbeds], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """Embeddings of a batch: text `B L D`, pooled `B D2`, and the mask `B L` of real tokens; None without padding."""
    prompts = [one["prompt_embeds"] for one in embeds]
    text = pad_sequence(prompts, batch_first=True).to(dtype)
    pooled = torch.stack([one["pooled_prompt_embeds"] for one in embeds]).to(dtype)
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) == max(lengths):  # compared on the host: no synchronisation with the device
        return text, pooled, None
    mask = torch.arange(text.shape[1]) < torch.tensor(lengths)[:, None]
    return text, pooled, upload(mask, text.device)


def predict_velocity(
    transformer: nn.Module,
    padding: TextPadding,
    hidden_states: Tensor,
    timesteps: Tensor,
    embeds: Sequence[TextEmbeds],
    *,
    rope_scale: tuple[float, float, float],
    dtype: torch.dtype,
    sparse_params: dict[str, Any] | None = None,
) -> Tensor:
    """Run the transformer as the pipelines do.

    Args:
        hidden_states: all input channels, `B F H W C`, float32; cast to `dtype` only here.
        timesteps: 1000 sigma, float32, `B`; in bfloat16 they would be off by up to 2.
        rope_scale: divisors of the positions in time, height and width.
        sparse_params: for checkpoints with block-sparse attention, see `nabla.sparse_params`.

    Returns:
        the predicted velocity, float32, `B C F H W`.
    """
    text, pooled, mask = collate_text(embeds, dtype)
    _, frames, height, width, _ = hidden_states.shape
    device = hidden_states.device
    with padding.hidden(mask):
        sample: Tensor = transformer(
            hidden_states=hidden_states.to(dtype),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=timesteps,
            visual_rope_pos=[
                torch.arange(frames, device=device),
                torch.arange(height // PATCH, device=device),
                torch.arange(width // PATCH, device=device),
            ],
            text_rope_pos=torch.arange(text.shape[1], device=device),
            scale_factor=rope_scale,
            sparse_params=sparse_params,
            return_dict=False,
        )
    return sample.float().permute(0, 4, 1, 2, 3)


# Positions of arguments of a visual block, after the tokens, the text and the time embedding.
ROPE, SPARSE_PARAMS = 3, 4
TEXT_BLOCKS, VISUAL_BLOCKS = "text_transformer_blocks", "visual_transformer_blocks"


def block_layout(transformer: nn.Module) -> BlockLayout:
    """Text blocks, then visual blocks. With NABLA the tokens of a tile are consecutive and stay together."""
    model: Any = transformer
    tiled = is_sparse(model.config)
    return BlockLayout(
        groups={name: model.get_submodule(name) for name in (TEXT_BLOCKS, VISUAL_BLOCKS)},
        visual=VISUAL_BLOCKS,
        width=model.config["model_dim"],
        order=tile_order if tiled else raster_order,
        routing=TokenRouting(TILE if tiled else 1, {ROPE: cut_rope, SPARSE_PARAMS: cut_window}),
    )


def tile_order(frames: int, rows: int, columns: int) -> Tensor:
    """Token order of NABLA: frame by frame, tile by tile, row by row within a tile."""
    grid = raster_order(frames, rows, columns)
    return grid.view(frames, rows // TILE_SIDE, TILE_SIDE, columns // TILE_SIDE, TILE_SIDE).transpose(2, 3).flatten()


def cut_rope(rope: Tensor, kept: Tensor) -> Tensor:
    """The rotations of the kept tokens: `B K 1 D/2 2 2` from `B S 1 D/2 2 2`, or from `1 S ...`."""
    samples = torch.arange(len(kept), device=kept.device)[:, None]
    return rope.expand(len(kept), *rope.shape[1:])[samples, kept]


def cut_window(params: dict[str, Any] | None, kept: Tensor) -> dict[str, Any] | None:
    """Parameters of block-sparse attention with the window `1 1 N N` cut to the kept tiles, `B 1 n n`."""
    if params is None:
        return None
    tiles = kept[:, ::TILE] // TILE
    window = params["sta_mask"][0, 0][tiles[:, :, None], tiles[:, None, :]]
    return {**params, "sta_mask": window[:, None]}


class SampledLatents(VaeEncoder):
    """Latents of pictures or clips: a sample from the VAE's posterior times the scaling factor."""

    @torch.no_grad()
    def encode(self, pixels: Tensor, seeds: Sequence[int]) -> Tensor:
        """z of pixels in [-1, 1], drawn with one seed per sample; float32, on the CPU."""
        posterior = self.posterior(pixels)
        mean, std = posterior.mean.float().cpu(), posterior.std.float().cpu()
        noise = [torch.randn(mean.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        z: Tensor = (mean + std * torch.stack(noise)) * self.vae.config.scaling_factor
        return z

    def decode(self, z: Tensor) -> Tensor:
        return self.pixels(z.to(self.device, self.dtype) / self.vae.config.scaling_factor)
