"""Moves loaded models to the device, and on a CPU to addresses that do not affect results.

Weights that are mapped from a file begin wherever the file's header ends. On CPUs without AVX2, MKL
sums the product of one row with a float32 matrix in another order if the matrix does not begin at a
multiple of 16 bytes. Two copies of one checkpoint with headers of different lengths would then give
different results, and so would offloading, which packs weights at addresses of its own.
"""

from __future__ import annotations

from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

ALIGNMENT = 64  # bytes, as in torch's own memory for a CPU


def place(model: Model, device: torch.device) -> Model:
    """Move a model to a device; on a CPU, every weight is aligned."""
    model.to(device)
    if device.type == "cpu":
        _align(model)
    return model


def _align(model: nn.Module) -> None:
    """Copy weights that begin at another address, one by one, so that memory never holds both."""
    for tensor in chain(model.parameters(), model.buffers()):
        # Wrappers of quantised weights have no address; what they wrap was computed, not mapped.
        if type(tensor) in (Tensor, nn.Parameter) and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
