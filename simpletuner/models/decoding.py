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
    """Whether an LTX-2 block depends on noise or timesteps, or changes its width; no published
    block does.
    """
    if not isinstance(block, LTX2VideoResnetBlock3d):
        return False
    return (block.norm3, block.per_channel_scale1, block.scale_shift_table) != (None, None, None)


def strips(height: int) -> Iterator[tuple[slice, slice, slice]]:
    """Row slices: a strip, the strip with one neighbour per side, and the position of the strip in
    the latter.
    """
    for top in range(0, height, ROWS):
        bottom = min(top + ROWS, height)
        # One neighbour per side, since kernels are three rows high.
        first = max(top - 1, 0)
        yield (
            slice(top, bottom),
            slice(first, min(bottom + 1, height)),
            slice(top - first, bottom - first),
        )


def in_strips(compute: Callable[..., Tensor], x: Tensor, *inputs: Any, **settings: Any) -> Tensor:
    """`compute(x)` of `... H W` in strips; an output row may depend on neighbouring rows, and rows
    may be upsampled.
    """
    out = x.new_empty(0)
    for own, reach, place in strips(x.shape[-2]):
        part = compute(x[..., reach, :], *inputs, **settings)
        scale = part.shape[-2] // (reach.stop - reach.start)
        if own.start == 0:
            out = part.new_empty((*part.shape[:-2], scale * x.shape[-2], part.shape[-1]))
        out[..., scale * own.start : scale * own.stop, :] = part[
            ..., scale * place.start : scale * place.stop, :
        ]
    return out


def resnet_in_strips(
    block: Any, x: Tensor, temb: None = None, generator: None = None, **settings: Any
) -> Tensor:
    """The output of a residual block, `B C H W` or `B C T H W`, written in place over its input."""
    # Statistics are computed over one sample.
    if len(x) > 1:
        return torch.cat([resnet_in_strips(block, sample, **settings) for sample in x.split(1)])
    first = normaliser(block.norm1, x)
    act = block.nonlinearity
    middle = in_strips(lambda rows: block.conv1(act(first(rows)), **settings), x)
    second = normaliser(block.norm2, middle)
    # In place is safe: from here on, a strip of the output reads only the same rows of `x`.
    out = x[:, : middle.shape[1]] if middle.shape[1] <= x.shape[1] else torch.empty_like(middle)
    for own, reach, place in strips(x.shape[-2]):
        rows = x[..., own, :]
        added = block.conv2(act(second(middle[..., reach, :])), **settings)[..., place, :]
        out[..., own, :] = added + (
            rows if block.conv_shortcut is None else block.conv_shortcut(rows)
        )
    return out


def normaliser(norm: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that normalises rows of a sample `1 C ... H W` with the statistics of all rows,
    like `norm`.
    """
    if not isinstance(norm, nn.GroupNorm):
        return norm  # normalises single positions
    mean, variance = channel_statistics(norm, x)
    weight = norm.weight.float()
    bias = norm.bias.float()
    eps = norm.eps
    # Batch norm accepts statistics as arguments; `group_norm` would compute them over the strip.
    return lambda rows: nn.functional.batch_norm(rows, mean, variance, weight, bias, eps=eps)


def channel_statistics(norm: nn.GroupNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel, `C`, float32, of the channel's group, combined from statistics
    of strips.
    """
    found = []
    shares = []
    for own, _, _ in strips(x.shape[-2]):
        groups = x[0, ..., own, :].float().unflatten(0, (norm.num_groups, -1)).flatten(1)
        found.append(torch.stack(torch.var_mean(groups, dim=1, correction=0)))
        shares.append((own.stop - own.start) / x.shape[-2])
    variances, means = torch.stack(found, dim=-1)  # each `groups strips`
    share = torch.tensor(shares, device=x.device)
    mean = (share * means).sum(1)
    # Var[x] = E[Var[x | strip]] + Var[E[x | strip]], with population variances (correction=0).
    variance = (share * (variances + (means - mean[:, None]) ** 2)).sum(1)
    channels = x.shape[1] // norm.num_groups
    return mean.repeat_interleave(channels), variance.repeat_interleave(channels)


def decode_tiles(
    decode: Callable[..., Any], stride: int, z: Tensor, *, return_dict: bool = True
) -> DecoderOutput | tuple[Tensor]:
    """`decode` of z `... H W` in overlapping tiles, blended with weights that fall off towards
    their edges.
    """
    total = z.new_empty(0)
    out = z.new_empty(0)
    for rows in spans(z.shape[-2], stride):
        for columns in spans(z.shape[-1], stride):
            part = decode(z[..., rows, columns], return_dict=False)[0]
            if not out.numel():
                size = [stride * side for side in z.shape[-2:]]
                out = part.new_zeros((*part.shape[:-2], *size), dtype=torch.float32)
                total = out.new_zeros(size)
            weight = fall_off(part.shape[-2], z.device)[:, None] * fall_off(
                part.shape[-1], z.device
            )
            down, across = (
                slice(stride * part.start, stride * part.stop) for part in (rows, columns)
            )
            out[..., down, across] += part * weight
            total[down, across] += weight
    # Normalised, since weights of overlapping tiles need not add up to 1.
    pixels = out.div_(total).to(part.dtype)
    return DecoderOutput(sample=pixels) if return_dict else (pixels,)


def spans(length: int, stride: int) -> Iterator[slice]:
    """Equal tiles along a side, in latent positions, evenly spread, with an overlap of at least
    `OVERLAP` pixels.
    """
    tile = min(TILE // stride, length)
    overlap = OVERLAP // stride
    count = max(1, ceil_div(length - overlap, tile - overlap))
    for index in range(count):
        start = index * (length - tile) // max(count - 1, 1)
        yield slice(start, start + tile)


def fall_off(length: int, device: torch.device) -> Tensor:
    """Blending weights along a side of a tile: 1 inside, less within `OVERLAP` pixels of its
    ends.
    """
    # At pixel centres, so that no weight is 0, since corners of the picture are in one tile only.
    places = torch.arange(length, device=device) + 0.5
    return (torch.minimum(places, length - places) / OVERLAP).clamp(max=1)
