"""The HunyuanVideo VAE's attention without its mask: the same numbers, and nothing that grows with the square.

In the middle of encoder and decoder each position sees all positions of its own and of earlier frames. diffusers
writes that down as a mask of tokens by tokens, which for a clip of 512x768 and 61 frames is larger than any card.
One frame after the other needs no mask: the queries of frame i are given the keys of frames 0 to i.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import HunyuanVideoMidBlock3D
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class FrameCausalProcessor:
    """An attention processor that goes from frame to frame."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        num_frames: int = 1,
    ) -> Tensor:
        """Attention over `B F·H·W C`, with the residual, as diffusers' `Attention` has it for autoencoders."""
        normed = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        query, key, value = (
            project(normed).unflatten(2, (attn.heads, -1)).transpose(1, 2)  # B heads F·H·W D
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        per_frame = normed.shape[1] // num_frames
        frames = []
        for start in range(0, normed.shape[1], per_frame):
            end = start + per_frame
            frames.append(scaled_dot_product_attention(query[:, :, start:end], key[:, :, :end], value[:, :, :end]))
        attended = attn.to_out[0](torch.cat(frames, dim=2).transpose(1, 2).flatten(2))
        result: Tensor = (attended + hidden_states) / attn.rescale_output_factor
        return result


def attend_by_frame(vae: nn.Module) -> int:
    """Let the middle of encoder and decoder attend frame by frame; returns how many attentions there are."""
    found = 0
    for block in vae.modules():
        if isinstance(block, HunyuanVideoMidBlock3D) and all(_is_plain(attn) for attn in block.attentions):
            for attn in block.attentions:
                attn.set_processor(FrameCausalProcessor())
            block.forward = partial(_forward, block)
            found += len(block.attentions)
    return found


def _is_plain(attn: Any) -> bool:
    """Whether it is the attention that `FrameCausalProcessor` computes; another one keeps its mask."""
    return attn is not None and (attn.spatial_norm, attn.norm_q, attn.norm_k) == (None, None, None)


def _forward(block: Any, hidden_states: Tensor) -> Tensor:
    """The block on `B C F H W`, with the frames' number in the mask's place."""
    hidden_states = block.resnets[0](hidden_states)
    for attn, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        shape = hidden_states.shape[2:]
        tokens = hidden_states.permute(0, 2, 3, 4, 1).flatten(1, 3)
        attended = attn(tokens, num_frames=shape[0])
        hidden_states = resnet(attended.unflatten(1, shape).permute(0, 4, 1, 2, 3))
    return hidden_states
