"""Convolutions in slices of time give the results of whole ones at a lower peak of memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import HunyuanVideoCausalConv3d
from torch import Tensor, nn

from simpletuner.models.loading import attend_by_frame, slice_convolutions
from tests.tools.peak_memory import Peak
from tests.tools.tiny import build_video_vae
from tests.tools.tolerances import VAE, assert_close


@dataclass
class Coded:
    """A clip after encoding and decoding, and the peaks beside weights and inputs."""

    latents: Tensor
    decoded: Tensor
    encoding_peak: int
    decoding_peak: int


def coded(vae: nn.Module, clip: Tensor) -> Coded:
    """Encode and decode a clip."""
    excluded = [*vae.parameters(), *vae.buffers(), clip]
    with torch.no_grad():
        with Peak(excluded) as encoding:
            latents = vae.encode(clip).latent_dist.mean
        with Peak([*excluded, latents]) as decoding:
            decoded = vae.decode(latents).sample
    return Coded(latents, decoded, encoding.most, decoding.most)


def test_sliced_convolutions_give_the_same_result_at_a_lower_peak() -> None:
    torch.manual_seed(0)
    vae = build_video_vae().eval()
    attend_by_frame(vae)
    clip = torch.randn(1, 3, 17, 64, 64)
    whole = coded(vae, clip)

    convolutions = slice_convolutions(vae)
    sliced = coded(vae, clip)

    assert convolutions > 10
    assert_close(sliced.latents, whole.latents, terms=VAE)
    assert_close(sliced.decoded, whole.decoded, terms=VAE)
    assert sliced.encoding_peak < 0.9 * whole.encoding_peak
    assert sliced.decoding_peak < 0.9 * whole.decoding_peak


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("frames", [1, 3, 5, 8, 9])
def test_sliced_convolutions_are_right_for_all_strides_kernels_and_lengths(
    stride: int, kernel: int, frames: int
) -> None:
    conv = HunyuanVideoCausalConv3d(2, 3, kernel, stride=(stride, 1, 1))
    x = torch.randn(1, 2, frames, 4, 4)
    expected = conv(x)

    slice_convolutions(conv)

    assert_close(conv(x), expected, terms=27 * 2)  # a kernel of 3 x 3 x 3, two channels
