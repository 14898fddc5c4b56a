"""Convolutions in slices of time give the latents of whole ones, with less in memory at a time."""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import HunyuanVideoCausalConv3d
from torch import Tensor, nn

from simpletuner.models.loading import attend_by_frame, slice_convolutions
from tests.tools.peak_memory import Peak
from tests.tools.tiny import build_video_vae
from tests.tools.tolerances import VAE, assert_close


def coded(vae: nn.Module, clip: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Latents, the decoded clip, and what either takes at most beside weights and inputs."""
    there = [*vae.parameters(), *vae.buffers(), clip]
    with torch.no_grad():
        with Peak(there) as encoding:
            latents = vae.encode(clip).latent_dist.mean
        with Peak([*there, latents]) as decoding:
            decoded = vae.decode(latents).sample
    return latents, decoded, encoding.most, decoding.most


def test_sliced_convolutions_give_the_same_result_at_a_lower_peak() -> None:
    torch.manual_seed(0)
    vae = build_video_vae().eval()
    attend_by_frame(vae)
    clip = torch.randn(1, 3, 17, 64, 64)
    whole = coded(vae, clip)
    assert slice_convolutions(vae) > 10
    sliced = coded(vae, clip)
    assert_close(sliced[0], whole[0], terms=VAE)
    assert_close(sliced[1], whole[1], terms=VAE)
    assert sliced[2] < 0.9 * whole[2]
    assert sliced[3] < 0.9 * whole[3]


def test_sliced_convolutions_are_right_for_all_strides_kernels_and_lengths() -> None:
    for stride in (1, 2):
        for kernel in (1, 3):
            for frames in (1, 3, 5, 8, 9):
                conv = HunyuanVideoCausalConv3d(2, 3, kernel, stride=(stride, 1, 1))
                x = torch.randn(1, 2, frames, 4, 4)
                expected = conv(x)
                slice_convolutions(conv)
                assert_close(conv(x), expected, terms=27 * 2)
