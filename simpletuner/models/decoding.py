"""Decodes previews in less memory than a VAE's `decode`: in strips of rows, or in tiles as well.

At full size, a decoder holds several copies of its widest feature maps: upsampled, padded,
normalised. In strips, residual blocks and upsamplers compute `ROWS` rows at a time, from these rows
and the neighbours that their convolutions read. Group normalisation first computes its statistics
over all rows, so only the rounding changes. Tiles are decoded independently, without statistics and
neighbours of other tiles, so pixels change slightly, mostly at the seams. The Wan VAE decodes few
frames at a time, so strips would save almost nothing and are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    HunyuanVideoResnetBlockCausal3D,
    HunyuanVideoUpsampleCausal3D,
)
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import (
    LTX2VideoResnetBlock3d,
    LTX2VideoUpsampler3d,
)
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from simpletuner.config.schema import Decoding
from simpletuner.models.loading import attend_by_frame
from simpletuner.models.vae_cost import OVERLAP, TILE
from simpletuner.rounding import ceil_div

ROWS = 8  # rows per strip, which also computes its two neighbours: a quarter more work
RESNETS = (ResnetBlock2D, HunyuanVideoResnetBlockCausal3D, LTX2VideoResnetBlock3d)
UPSAMPLERS = (Upsample2D, HunyuanVideoUpsampleCausal3D, LTX2VideoUpsampler3d)


def decode_in(how: Decoding, vae: Any, stride: int) -> None:
    """Let a VAE decode whole, in strips, or in tiles that are decoded in strips.

    Args:
        stride: pixels per latent position on each side.
    """
    if how == "whole":
        return
    attend_by_frame(vae)
    if not isinstance(vae, AutoencoderKLWan):
        use_strips(vae)
    if how == "tiles":
        vae.decode = partial(decode_tiles, vae.decode, stride)


def use_strips(vae: Any) -> None:
    """Run residual blocks, upsamplers and the last convolution of a VAE in strips."""
    for module in vae.modules():
        if isinstance(module, RESNETS) and not has_more_inputs(module):
            module.forward = partial(resnet_in_strips, module)
        elif isinstance(module, UPSAMPLERS) or module is vae.decoder.conv_out:
            module.forward = partial(in_strips, module.forward)


def has_more_inputs(block: Any) -> bool:
    """Whether an LTX-2 block depends on noise or timesteps, or changes its width.

    No published block does.
    """
    if not isinstance(block, LTX2VideoResnetBlock3d):
        return False
    inputs = (block.norm3, block.per_channel_scale1, block.scale_shift_table)
    return any(module is not None for module in inputs)


@dataclass(frozen=True)
class Strip:
    """A strip of a picture's rows.

    Attributes:
        rows: the rows of the strip.
        read: these rows and one neighbour per side, since kernels are three rows high.
        inner: `rows` within `read`.
    """

    rows: slice
    read: slice
    inner: slice


def strips(height: int) -> Iterator[Strip]:
    """The strips of a picture, from top to bottom."""
    for top in range(0, height, ROWS):
        bottom = min(top + ROWS, height)
        first = max(top - 1, 0)
        yield Strip(
            rows=slice(top, bottom),
            read=slice(first, min(bottom + 1, height)),
            inner=slice(top - first, bottom - first),
        )


def in_strips(compute: Callable[..., Tensor], x: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    """`compute(x)` of `... H W` in strips.

    A row of the output may depend on neighbouring rows, and `compute` may upsample rows.
    """
    out = x.new_empty(0)
    for strip in strips(x.shape[-2]):
        part = compute(x[..., strip.read, :], *inputs, **settings)
        scale = part.shape[-2] // (strip.read.stop - strip.read.start)
        if strip.rows.start == 0:
            out = part.new_empty((*part.shape[:-2], scale * x.shape[-2], part.shape[-1]))
        out[..., _scaled(strip.rows, scale), :] = part[..., _scaled(strip.inner, scale), :]
    return out


def _scaled(rows: slice, scale: int) -> slice:
    return slice(scale * rows.start, scale * rows.stop)


def resnet_in_strips(
    block: Any, x: Tensor, temb: None = None, generator: None = None, **settings: Any
) -> Tensor:
    """The output of a residual block, `B C H W` or `B C T H W`, written in place over its input."""
    if len(x) > 1:  # statistics are computed over one sample
        return torch.cat([resnet_in_strips(block, sample, **settings) for sample in x.split(1)])
    act = block.nonlinearity
    # The whole of `middle` is needed before the second half, for the statistics of its norm.
    first_norm = normaliser(block.norm1, x)
    middle = in_strips(lambda rows: block.conv1(act(first_norm(rows)), **settings), x)
    second_norm = normaliser(block.norm2, middle)
    # In place is safe: from here on, a strip of the output reads only the same rows of `x`.
    channels = middle.shape[1]
    out = x[:, :channels] if channels <= x.shape[1] else torch.empty_like(middle)
    for strip in strips(x.shape[-2]):
        residual = block.conv2(act(second_norm(middle[..., strip.read, :])), **settings)
        rows = x[..., strip.rows, :]
        if block.conv_shortcut is not None:
            rows = block.conv_shortcut(rows)
        out[..., strip.rows, :] = residual[..., strip.inner, :] + rows
    return out


def normaliser(norm: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """`norm` for some rows of a sample `1 C ... H W`, with the statistics of all its rows."""
    if not isinstance(norm, nn.GroupNorm):
        return norm  # normalises single positions
    mean, variance = channel_statistics(norm, x)
    weight = norm.weight.float()
    bias = norm.bias.float()
    eps = norm.eps
    # Batch norm accepts statistics as arguments; `group_norm` would compute them over the strip.
    return lambda rows: nn.functional.batch_norm(rows, mean, variance, weight, bias, eps=eps)


def channel_statistics(norm: nn.GroupNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel's group, combined from strips: float32, `C` each."""
    statistics = []
    shares = []
    for strip in strips(x.shape[-2]):
        rows = x[0, ..., strip.rows, :].float()
        groups = rows.unflatten(0, (norm.num_groups, -1)).flatten(1)
        statistics.append(torch.stack(torch.var_mean(groups, dim=1, correction=0)))
        shares.append((strip.rows.stop - strip.rows.start) / x.shape[-2])
    variances, means = torch.stack(statistics, dim=-1)  # `groups strips` each
    share = torch.tensor(shares, device=x.device)
    mean = (share * means).sum(1)
    # Var[x] = E[Var[x | strip]] + Var[E[x | strip]], with population variances (correction=0).
    variance = (share * (variances + (means - mean[:, None]) ** 2)).sum(1)
    channels = x.shape[1] // norm.num_groups
    return mean.repeat_interleave(channels), variance.repeat_interleave(channels)


def decode_tiles(
    decode: Callable[..., Any], stride: int, z: Tensor, *, return_dict: bool = True
) -> DecoderOutput | tuple[Tensor]:
    """`decode` of z `... H W` in overlapping tiles, whose weights fall off towards their edges."""
    total = z.new_empty(0)
    out = z.new_empty(0)
    for rows in spans(z.shape[-2], stride):
        for columns in spans(z.shape[-1], stride):
            part = decode(z[..., rows, columns], return_dict=False)[0]
            if not out.numel():
                size = [stride * side for side in z.shape[-2:]]
                out = part.new_zeros((*part.shape[:-2], *size), dtype=torch.float32)
                total = out.new_zeros(size)
            down = fall_off(part.shape[-2], z.device)
            across = fall_off(part.shape[-1], z.device)
            weight = down[:, None] * across
            pixel_rows = _scaled(rows, stride)
            pixel_columns = _scaled(columns, stride)
            out[..., pixel_rows, pixel_columns] += part * weight
            total[pixel_rows, pixel_columns] += weight
    # Normalised, since weights of overlapping tiles need not add up to 1.
    pixels = out.div_(total).to(part.dtype)
    return DecoderOutput(sample=pixels) if return_dict else (pixels,)


def spans(length: int, stride: int) -> Iterator[slice]:
    """Equal tiles along a side, in latent positions, that overlap by `OVERLAP` pixels or more."""
    tile = min(TILE // stride, length)
    overlap = OVERLAP // stride
    count = max(1, ceil_div(length - overlap, tile - overlap))
    for index in range(count):
        start = index * (length - tile) // max(count - 1, 1)
        yield slice(start, start + tile)


def fall_off(length: int, device: torch.device) -> Tensor:
    """Blending weights along a tile's side: 1 inside, less within `OVERLAP` pixels of its ends."""
    # At pixel centres, so that no weight is 0, since corners of the picture are in one tile only.
    centres = torch.arange(length, device=device) + 0.5
    return (torch.minimum(centres, length - centres) / OVERLAP).clamp(max=1)
