"""3D convolutions in slices of time: the same numbers, a lower peak of memory.

A convolution over a whole clip needs room for all frames at once. Since its output frame t reads only the frames
t·stride to t·stride + kernel - 1, the output can be computed a few frames at a time. Norms and attention of a VAE see
the whole clip as before, so unlike tiling this changes latents by rounding at most.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

OUTPUT_FRAMES = 4


def slice_convolutions(model: nn.Module, frames: int = OUTPUT_FRAMES) -> int:
    """Let every 3D convolution of a model compute `frames` output frames at a time; returns how many there are.

    Convolutions that pad in time themselves are left as they are: padding belongs to the ends of a clip, not of a
    slice.
    """
    found = 0
    for module in model.modules():
        if isinstance(module, nn.Conv3d) and module.padding[0] == 0:
            module.forward = partial(sliced_forward, module, module.forward, frames)  # type: ignore[method-assign]
            found += 1
    return found


def sliced_forward(conv: nn.Conv3d, whole: Callable[[Tensor], Tensor], frames: int, x: Tensor) -> Tensor:
    """The convolution of `B C T H W`, `frames` output frames at a time."""
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    total = (x.shape[2] - conv.dilation[0] * (kernel - 1) - 1) // stride + 1
    reach = conv.dilation[0] * (kernel - 1) + 1
    parts = [
        whole(x[:, :, start * stride : (min(start + frames, total) - 1) * stride + reach])
        for start in range(0, total, frames)
    ]
    return torch.cat(parts, dim=2)
