"""LoRA files applied to a transformer for sampling, without changing a weight or a module.

A forward hook adds `strength · B(A(x))` to the output of each layer, as peft does. This works on
plain, quantised and streamed layers, and on layers with a LoRA in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from simpletuner.training.lora_files import (
    MAGNITUDES,
    layer_names,
    read_lora_file,
    trained_magnitude,
)


@dataclass
class LoraHook:
    """Forward hook of a linear layer or a pointwise convolution.

    Attributes:
        down, up: A `r in` and B `out r`, in the compute dtype; for a convolution, `r in 1 1` and
            `out r 1 1`.
        magnitude: magnitude of a DoRA, `out`.
        dora_scale: magnitude in ComfyUI's form, `out 1`.
    """

    down: Tensor
    up: Tensor
    strength: float
    magnitude: Tensor | None = None
    dora_scale: Tensor | None = None
    _ratio: Tensor | None = field(default=None, init=False)

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        apply: Any = linear if self.down.dim() == 2 else conv2d
        reduced = apply(inputs[0].to(self.down.dtype), self.down)
        update = apply(reduced, self.up) * self.strength
        if self.magnitude is not None or self.dora_scale is not None:
            if self._ratio is None:
                # Not before: weights of a streamed layer are on the device only in its forward
                # pass.
                self._ratio = self._row_ratios(layer).view(-1, *self.up.shape[2:])
            # DoRA scales the product W x, not the bias.
            plain = output if layer.bias is None else output - layer.bias.view_as(self._ratio)
            # ratio (W x + D x) - W x, since the output already contains W x.
            update = (self._ratio - 1) * plain + self._ratio * update
        return (output + update).to(output.dtype)

    def _row_ratios(self, layer: nn.Module) -> Tensor:
        """m / |W + D| per row: a DoRA's weight is m (W + D) / |W + D| (arXiv:2402.09353)."""
        weight = dequantize_module_weight(layer).to(self.down.dtype).flatten(1)
        change = linear(self.down.flatten(1).T, self.up.flatten(1)).T  # D = B A, `out in`
        magnitude = self.magnitude
        if self.dora_scale is not None:
            magnitude = trained_magnitude(self.dora_scale, weight, change.cpu()).to(weight.device)
        assert magnitude is not None
        norm = torch.linalg.norm(weight + self.strength * change, dim=1).to(weight.dtype)
        return magnitude.flatten() / norm


Loras = Sequence[tuple[Path, float]]  # (file, strength)


@contextmanager
def applied_loras(
    transformer: nn.Module, loras: Loras, dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    """A context with LoRA files, already checked by the plan, applied at their strengths.

    Args:
        dtype: compute dtype of A and B.
        device: compute device of the transformer.

    Raises:
        UserError: a file does not fit the transformer.
    """
    names = layer_names(transformer)
    with ExitStack() as hooks:
        for path, strength in loras:
            weights = read_lora_file(path, names, "LoRA")
            placed = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
            for name in placed:
                if not name.endswith(".lora_A.weight"):
                    continue
                layer = name.removesuffix(".lora_A.weight")
                hook = LoraHook(
                    placed[f"{layer}.lora_A.weight"],
                    placed[f"{layer}.lora_B.weight"],
                    strength,
                    magnitude=placed.get(layer + MAGNITUDES["magnitude"]),
                    dora_scale=placed.get(layer + MAGNITUDES["comfyui magnitude"]),
                )
                handle = transformer.get_submodule(layer).register_forward_hook(hook)
                hooks.callback(handle.remove)
        yield
