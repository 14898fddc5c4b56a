"""Convolutions in slices of time give the latents of whole ones, with less in memory at a time."""

from __future__ import annotations

import torch
from torch import nn

from simpletuner.models.loading import slice_convolutions
from tests.closeness import VAE, assert_close
from tests.tiny import build_video_vae


def test_latents_are_the_same_and_slices_are_short() -> None:
    torch.manual_seed(0)
    vae = build_video_vae().eval()
    clip = torch.randn(1, 3, 17, 32, 32)
    with torch.no_grad():
        whole = vae.encode(clip).latent_dist.mean
        lengths: list[int] = []
        handles = [
            module.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[2]))
            for module in vae.encoder.modules()
            if isinstance(module, nn.Conv3d)
        ]
        vae.encode(clip)
        longest = max(lengths)
        for handle in handles:
            handle.remove()
        assert slice_convolutions(vae) > 10
        seen: list[int] = []
        for module in vae.encoder.modules():
            if isinstance(module, nn.Conv3d):
                inner = module.forward.args[1]  # type: ignore[attr-defined]

                def spy(x: torch.Tensor, inner: object = inner) -> torch.Tensor:
                    seen.append(x.shape[2])
                    return inner(x)  # type: ignore[operator, no-any-return]

                module.forward = type(
                    module.forward
                )(  # type: ignore[method-assign]
                    module.forward.func,
                    module.forward.args[0],
                    spy,
                    *module.forward.args[2:],  # type: ignore[attr-defined]
                )
        sliced = vae.encode(clip).latent_dist.mean
        decoded = vae.decode(sliced).sample
    assert_close(sliced, whole, terms=VAE)
    assert decoded.shape == clip.shape
    assert longest == 19
    assert max(seen) <= 2 * (4 - 1) + 3, "four output frames of stride 2 read nine frames"


def test_strides_and_ends() -> None:
    for stride in (1, 2):
        for frames in (3, 5, 8, 9):
            conv = nn.Conv3d(2, 3, 3, stride=(stride, 1, 1), padding=(0, 1, 1))
            x = torch.randn(1, 2, frames, 4, 4)
            expected = conv(x)
            slice_convolutions(conv, frames=2)
            assert_close(conv(x), expected, terms=27 * 2)
