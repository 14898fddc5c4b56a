"""Decoding in strips equals whole decoding up to rounding; decoding in tiles has a small error."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from simpletuner.config.schema import Decoding
from simpletuner.models import decoding, loading
from simpletuner.models.decoding import decode_in, decode_tiles, spans
from simpletuner.models.registry import FAMILIES
from simpletuner.models.vae_cost import OVERLAP, TILE, VaeLoad
from tests.tools.cases import first_of
from tests.tools.peak_memory import Peak, attention
from tests.tools.tiny import build_image_vae, build_video_vae
from tests.tools.tiny_sana import build_ltx2_vae, build_wan_vae
from tests.tools.tolerances import VAE, assert_close

# The builder of a tiny VAE, a latent shape of several strips and tiles, the stride, and the shape
# of the pixels.
TINY = [
    pytest.param(build_image_vae, (2, 16, 3, 21), 8, (2, 3, 24, 168), id="Flux"),
    pytest.param(
        partial(build_video_vae, 16), (1, 16, 3, 3, 21), 8, (1, 3, 9, 24, 168), id="HunyuanVideo"
    ),
    pytest.param(build_wan_vae, (1, 16, 2, 3, 21), 8, (1, 3, 5, 24, 168), id="Wan"),
    pytest.param(build_ltx2_vae, (1, 128, 2, 3, 5), 32, (1, 3, 9, 96, 160), id="LTX-2"),
]


@pytest.mark.parametrize("build", [build_image_vae, partial(build_video_vae, 16)])
def test_strips_reach_every_residual_block(build: Callable[[], Any]) -> None:
    vae = build()

    decode_in("strips", vae, 8)

    blocks = [module for module in vae.modules() if isinstance(module, decoding.RESNETS)]
    assert blocks
    assert all("forward" in vars(block) for block in blocks)
    assert "forward" in vars(vae.decoder.conv_out)


@pytest.mark.slow(1)
@pytest.mark.parametrize(("build", "shape", "stride", "pixels"), TINY)
@torch.no_grad()
def test_strips_change_only_rounding_and_tiles_little(
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[], Any],
    shape: tuple[int, ...],
    stride: int,
    pixels: tuple[int, ...],
) -> None:
    monkeypatch.setattr(decoding, "TILE", 128)
    monkeypatch.setattr(decoding, "OVERLAP", 64)
    torch.manual_seed(0)
    vae = build().eval()
    z = torch.randn(shape)

    decoded = {}
    for how in ("whole", "strips", "tiles"):
        configured = copy.deepcopy(vae)
        decode_in(how, configured, stride)
        (decoded[how],) = configured.decode(z, return_dict=False)
        assert torch.equal(configured.decode(z).sample, decoded[how])

    whole = decoded["whole"]
    assert torch.equal(vae.decode(z).sample, whole)
    assert_close(decoded["strips"], whole, terms=VAE)
    assert decoded["tiles"].shape == pixels
    error = (decoded["tiles"] - whole).pow(2).mean().sqrt() / whole.std()
    print(f"tiles: relative error {error:.3f}")
    assert 0 < error < 0.5
    # A picture of one tile is decoded as it is.
    small = z[..., : 128 // stride]
    assert_close(configured.decode(small).sample, vae.decode(small).sample, terms=VAE)


@pytest.mark.parametrize("length", [3, 48, 49, 64, 96, 104, 160])
def test_tiles_cover_a_side_evenly(length: int) -> None:
    tiles = list(spans(length, 8))

    assert {tile.stop - tile.start for tile in tiles} == {min(length, TILE // 8)}
    assert (tiles[0].start, tiles[-1].stop) == (0, length)
    assert all(left.stop - right.start >= OVERLAP // 8 for left, right in itertools.pairwise(tiles))


@torch.no_grad()
def test_blended_tiles_that_agree_equal_the_whole() -> None:
    z = torch.randn(1, 3, 2, 60, 100)

    def enlarge(part: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        return (part.repeat_interleave(8, -1).repeat_interleave(8, -2),)

    (pixels,) = decode_tiles(enlarge, 8, z, return_dict=False)

    assert_close(pixels, enlarge(z, False)[0], terms=8)


FLUX: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 16,
    "layers_per_block": 2,
}
# Family and flavour, the class of its VAE, and the preview: width, height, frames.
REAL = [
    ("kandinsky5-image", "t2i-lite-sft", "AutoencoderKL", FLUX, (512, 512, 1), ("strips",)),
    (
        "kandinsky5-video",
        "t2v-lite-sft-5s",
        "AutoencoderKLHunyuanVideo",
        {},
        (768, 512, 17),
        ("strips", "tiles"),
    ),
    ("sanavideo", "2b-480p", "AutoencoderKLWan", {}, (832, 480, 33), ("tiles",)),
    ("sanavideo", "2b-720p", "AutoencoderKLLTX2Video", {}, (1280, 704, 81), ("strips", "tiles")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flavour", "name", "settings", "size", "how"),
    first_of([(*case[:5], how) for case in REAL for how in case[5]], 2),
)
def test_the_planned_peak_of_decoding_is_measured_at_full_size(
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    flavour: str,
    name: str,
    settings: dict[str, Any],
    size: tuple[int, int, int],
    how: Decoding,
) -> None:
    """Tensors without numbers go through the published architecture.

    Of the tiles, a low one and one of the equal ones are decoded.
    """
    spec = FAMILIES[family].for_flavour(flavour)
    width, height, frames = size
    dtype = torch.float32 if family == "sanavideo" else torch.bfloat16
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    tiles = [slice(0, 2), slice(0, TILE // spec.vae_stride)]
    monkeypatch.setattr(
        decoding, "spans", lambda length, stride: tiles[length == width // stride :]
    )
    with torch.device("meta"), torch.no_grad():
        vae = getattr(diffusers, name)(**settings).to(dtype)
        latent = spec.latent_size(width, height, frames)
        channels = vae.config.z_dim if name == "AutoencoderKLWan" else vae.config.latent_channels
        z = torch.empty(
            1, channels, *(latent if spec.media == "video" else latent[1:]), dtype=dtype
        )
        decode_in(how, vae, spec.vae_stride)
        with Peak([*vae.parameters(), *vae.buffers(), z]) as peak:
            pixels = vae.decode(z).sample
    assert pixels.shape[-2:] == (height, width)
    load = VaeLoad(1, frames, width, height, strips=True, tiled=how == "tiles", tile=TILE)
    planned = spec.cost.vae.decode(load) * dtype.itemsize
    print(f"{name} {how}: measured {peak.most / 1e9:.3f} GB, planned {planned / 1e9:.3f} GB")

    assert 0.8 * planned < peak.most < 1.1 * planned


# As those of the demos.
SHALLOW = [(*case[:3], case[3] | {"layers_per_block": 1}) for case in REAL[:2]]


@pytest.mark.parametrize(
    ("family", "flavour", "name", "settings"), [*(case[:4] for case in REAL), *SHALLOW]
)
def test_the_planned_flops_of_decoding_are_counted(
    family: str, flavour: str, name: str, settings: dict[str, Any]
) -> None:
    spec = FAMILIES[family].for_flavour(flavour)
    size = (256, 256, 17 if spec.media == "video" else 1)
    with torch.device("meta"), torch.no_grad():
        vae = getattr(diffusers, name)(**settings).eval()
        latent = spec.latent_size(*size)
        channels = vae.config.z_dim if name == "AutoencoderKLWan" else vae.config.latent_channels
        with FlopCounterMode(display=False) as counter:
            vae.decode(torch.empty(1, channels, *(latent if spec.media == "video" else latent[1:])))
    planned = replace(spec.cost.vae, settings=settings).decode_flops(VaeLoad(1, size[2], *size[:2]))

    assert counter.get_total_flops() == pytest.approx(planned, rel=0.15)


@pytest.mark.parametrize(
    ("size", "numbers"), [((768, 512, 17), 2**30 * 1.5), ((1024, 512, 61), 2**31)]
)
def test_the_planned_upsampling_is_counted(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int], numbers: float
) -> None:
    """Of Kandinsky 5 Video, whose VAE torch cannot be trusted with from 2**31 numbers on."""
    upsampled: list[int] = []
    stock = nn.functional.interpolate

    def interpolate(x: torch.Tensor, **settings: Any) -> torch.Tensor:
        out = stock(x, **settings)
        upsampled.append(out.numel())
        return out

    monkeypatch.setattr(nn.functional, "interpolate", interpolate)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    spec = FAMILIES["kandinsky5-video"]
    width, height, frames = size
    with torch.device("meta"), torch.no_grad():
        vae = diffusers.AutoencoderKLHunyuanVideo()
        loading.attend_by_frame(vae)
        vae.decode(torch.empty(1, 16, *spec.latent_size(width, height, frames)))

    assert max(upsampled) == spec.cost.vae.upsampled(VaeLoad(1, frames, width, height)) == numbers
