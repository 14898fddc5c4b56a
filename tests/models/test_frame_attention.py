"""Attention frame by frame gives the results of the stock VAE, without a mask of token pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.models.loading import attend_by_frame, frame_causal_attention
from tests.tools.families import CPU, make_video_adapter
from tests.tools.tiny import build_video_vae, make_checkpoint
from tests.tools.tolerances import MODEL, VAE, assert_close


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor, in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            numbers = result.untyped_storage().nbytes() // result.element_size()
            self.numbers = max(self.numbers, numbers)
        return result


def by_frame(coder: Any) -> bool:
    """Whether an encoder or decoder attends frame by frame."""
    return "forward" in vars(coder.mid_block)


@pytest.mark.parametrize("frames", [1, 5, 17])
@torch.no_grad()
def test_attention_by_frame_gives_the_result_of_the_stock_vae(frames: int) -> None:
    torch.manual_seed(0)
    vae = build_video_vae().eval()
    for parameter in vae.parameters():
        parameter.mul_(3)  # so that attention is far from even
    clip = torch.randn(2, 3, frames, 32, 48).clamp(-1, 1)
    latents = vae.encode(clip).latent_dist.mean
    decoded = vae.decode(latents).sample
    attend_by_frame(vae)

    assert by_frame(vae.encoder)
    assert by_frame(vae.decoder)
    assert_close(vae.encode(clip).latent_dist.mean, latents, terms=VAE)
    assert_close(vae.decode(latents).sample, decoded, terms=VAE)


@torch.no_grad()
def test_a_frame_attends_to_all_earlier_frames_and_to_no_later_one() -> None:
    torch.manual_seed(0)
    attn: Any = build_video_vae(16).eval().encoder.mid_block.attentions[0]
    hidden_states = torch.randn(1, 16, 3, 2, 2)
    causal = frame_causal_attention(attn, hidden_states)

    # The same tokens as one frame, where each attends to all.
    one_frame = hidden_states.reshape(1, 16, 1, 6, 2)
    full = frame_causal_attention(attn, one_frame).reshape(causal.shape)
    assert_close(causal[:, :, 2:], full[:, :, 2:], terms=MODEL)
    assert not torch.allclose(causal[:, :, :2], full[:, :, :2], atol=1e-4)


@torch.no_grad()
def test_attention_by_frame_allocates_nothing_quadratic_in_all_tokens() -> None:
    torch.manual_seed(0)
    vae = build_video_vae(16).eval()
    hidden_states = torch.randn(1, 16, 9, 16, 16)
    tokens = 9 * 16 * 16
    with LargestTensor() as stock:
        expected = vae.encoder.mid_block(hidden_states)
    attend_by_frame(vae)

    with LargestTensor() as by_frame:
        assert_close(vae.encoder.mid_block(hidden_states), expected, terms=VAE)
    assert stock.numbers >= tokens**2
    assert 0 < by_frame.numbers <= tokens**2 / 9, "one of nine frames' queries at most"


def test_caching_attends_by_frame_and_previews_stay_stock(tmp_path: Path) -> None:
    adapter: Any = make_video_adapter(make_checkpoint(tmp_path, "t2v"), "t2v")
    encoder = adapter.load_latent_encoder(CPU, torch.float32)
    transformer = adapter.load_transformer(torch.float32)
    pipeline = adapter.load_preview_pipeline(transformer, CPU, None).pipeline

    assert by_frame(encoder.vae.encoder)
    assert not by_frame(pipeline.vae.decoder)
