"""Loading a VAE, and making it or a model's shell take less memory without changing a number.

- 3D convolutions in slices of time, and the HunyuanVideo VAE's attention without its mask: equal results, lower peaks
- models with all their layers and no weights, to check files against
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import HunyuanVideoCausalConv3d, HunyuanVideoMidBlock3D
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from simpletuner.config.schema import CachingConfig
from simpletuner.errors import UserError
from simpletuner.models.source import Part, shorten


def load_whole(model_class: Any, part: Part, **settings: Any) -> Any:
    """A model with every weight from its files: the libraries would draw what is missing at random.

    Args:
        model_class: of diffusers or transformers.
        settings: more arguments of its `from_pretrained`.

    Raises:
        UserError: a weight is missing, or has another shape than the config says.
    """
    where = f"{part.key}: the {part.folder} in {part.location!r}"
    try:
        model, found = model_class.from_pretrained(
            part.fetch(), variant=part.variant, output_loading_info=True, **settings
        )
    except (RuntimeError, ValueError, KeyError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{where} cannot be loaded: {reason}") from error
    absent = sorted(found["missing_keys"])
    if absent:
        raise UserError(f"{where} is incomplete: {shorten(absent)} not in its files.")
    return model


def load_vae(vae_class: Any, part: Part, caching: CachingConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """A frozen VAE on a device, with slices and tiles as configured."""
    vae = load_whole(vae_class, part, torch_dtype=dtype)
    vae.requires_grad_(False).eval().to(device)
    if caching.vae_enable_slicing:
        vae.enable_slicing()
    if caching.vae_enable_tiling:
        vae.enable_tiling()
    return vae


OUTPUT_FRAMES = 1


def slice_convolutions(vae: nn.Module, frames: int = OUTPUT_FRAMES) -> int:
    """Let the causal convolutions of a HunyuanVideo VAE compute so many frames at a time; returns how many there are.

    Each slice is padded by itself, so that no padded copy of the whole clip is made.
    """
    convolutions = [module for module in vae.modules() if isinstance(module, HunyuanVideoCausalConv3d)]
    for module in convolutions:
        module.forward = partial(sliced_forward, module, frames)
    return len(convolutions)


def sliced_forward(module: Any, frames: int, x: Tensor) -> Tensor:
    """The convolution of `B C T H W`; output frames are written where they belong, `frames` of them at a time."""
    conv, (*sides, before, _) = module.conv, module.time_causal_padding
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    total = (x.shape[2] + before - kernel) // stride + 1
    out = x.new_empty(0)
    for start in range(0, total, frames):
        stop = min(start + frames, total)
        first, last = start * stride - before, (stop - 1) * stride + kernel - before  # of the input
        padding = (*sides, max(-first, 0), 0)
        part = conv(functional.pad(x[:, :, max(first, 0) : last], padding, mode=module.pad_mode))
        if start == 0:
            out = part.new_empty((*part.shape[:2], total, *part.shape[3:]))
        out[:, :, start:stop] = part
    return out


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


def hollow_out(model: nn.Module) -> nn.Module:
    """Replace the parameters of a model on the meta device by CPU ones that share a single zero each.

    They have the right shapes and take no memory, so a LoRA can be loaded beside them; on the meta device loading
    would silently copy nothing.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            stand_in = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
            setattr(module, name, nn.Parameter(stand_in, requires_grad=False))
    return model
