"""Applies LoRA files to a transformer for sampling only, without changing a weight or a module.

A forward hook adds `strength · B(A(x))` to the output of each layer, as peft does. It works on a plain, quantised or
streamed layer, and on one that holds a LoRA in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from simpletuner.models.lora_keys import COMFYUI_MAGNITUDE, MAGNITUDE
from simpletuner.training.finite import refuse_not_finite
from simpletuner.training.lora_files import read_lora_file, trained_magnitude


@dataclass
class LoraHook:
    """Forward hook of a linear layer or a pointwise convolution.

    Attributes:
        down, up: A `r in` and B `out r`, in the dtype of their products; of a convolution `r in 1 1` and `out r 1 1`.
        magnitude: of a DoRA, `out`.
        dora_scale: the same in ComfyUI's form, `out 1`.
    """

    down: Tensor
    up: Tensor
    strength: float
    magnitude: Tensor | None = None
    dora_scale: Tensor | None = None
    _ratio: Tensor | None = field(default=None, init=False)

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        apply: Any = linear if self.down.dim() == 2 else conv2d
        update = apply(apply(inputs[0].to(self.down.dtype), self.down), self.up) * self.strength
        if self.magnitude is not None or self.dora_scale is not None:
            if self._ratio is None:  # not before: the weights of a streamed layer are only here in its forward pass
                self._ratio = self._growth(layer).view(-1, *self.up.shape[2:])
            plain = output if layer.bias is None else output - layer.bias.view_as(self._ratio)
            update = (self._ratio - 1) * plain + self._ratio * update
        return (output + update).to(output.dtype)

    def _growth(self, layer: nn.Module) -> Tensor:
        """m / |W + D| of each row: a DoRA's weight is m (W + D) / |W + D| (arXiv:2402.09353)."""
        weight = dequantize_module_weight(layer).to(self.down.dtype).flatten(1)
        change = linear(self.down.flatten(1).T, self.up.flatten(1)).T
        magnitude = self.magnitude
        if self.dora_scale is not None:
            magnitude = trained_magnitude(self.dora_scale, weight, change.cpu()).to(weight.device)
        assert magnitude is not None
        return magnitude.flatten() / torch.linalg.norm(weight + self.strength * change, dim=1).to(weight.dtype)


Loras = Sequence[tuple[Path, float]]  # files and their strengths


@contextmanager
def applied_loras(transformer: nn.Module, loras: Loras, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """A context in which LoRA files are applied, each at its strength.

    Args:
        dtype: of the products with A and B.
        device: on which the transformer computes.

    Raises:
        UserError: a file does not fit the transformer, or holds NaN or infinity.
    """
    names = [name.removesuffix(".base_layer") for name, _ in transformer.named_modules()]
    handles = []
    try:
        for path, strength in loras:
            weights = read_lora_file(path, names, "LoRA")
            refuse_not_finite(weights, repr(str(path)), "choose another file")
            placed = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
            for layer in [name.removesuffix(".lora_A.weight") for name in placed if name.endswith(".lora_A.weight")]:
                down, up = (placed[f"{layer}.lora_{side}.weight"] for side in "AB")
                magnitudes = (placed.get(layer + suffix) for suffix in (MAGNITUDE, COMFYUI_MAGNITUDE))
                hook = LoraHook(down, up, strength, *magnitudes)
                handles.append(transformer.get_submodule(layer).register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()
