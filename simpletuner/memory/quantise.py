"""Frozen linear layers with weights in few bits.

A quantised model is a base for LoRA: its weights never change, gradients pass through them to the adapters before.
Which layers may be quantised is family knowledge (`FamilySpec.quantised_layers`); everything else keeps the dtype it
was loaded in. Only one block at a time is on the accelerator while it is packed, and never unpacked as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from simpletuner.config.precision import Quantisation
from simpletuner.memory.weight_formats import Packed, WeightFormat, pack

Via = Literal["cpu", "accelerator", "pipeline"]


class FrozenProduct(torch.autograd.Function):
    """Inputs times a packed weight. The backward pass unpacks it again: an unpacked one is never kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, bias: Tensor | None, form: WeightFormat, *packed: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(*packed)
        return form.product(inputs, bias, *packed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        packed = ctx.saved_tensors
        inputs = gradient @ ctx.form.unpack(*packed) if ctx.needs_input_grad[0] else None
        return (inputs, None, None, *(None for _ in packed))


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight is packed into buffers named `packed_...`; adapters go beside it as usual."""

    def __init__(self, layer: nn.Linear, packed: Packed) -> None:
        nn.Module.__init__(self)  # nn.Linear would make a weight of full size
        self.in_features, self.out_features = layer.in_features, layer.out_features
        bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.register_parameter("bias", bias)
        self.form, tensors = packed
        self.names = tuple(f"packed_{name}" for name in tensors)
        for name, tensor in zip(self.names, tensors.values(), strict=True):
            self.register_buffer(name, tensor)

    @property
    def packed(self) -> tuple[Tensor, ...]:
        """The buffers, in the order of the format."""
        return tuple(self.get_buffer(name) for name in self.names)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight `out in`, made anew for whoever asks: adapters, when they are added, and DoRA."""
        return self.form.unpack(*self.packed)

    def forward(self, inputs: Tensor) -> Tensor:
        product: Tensor = FrozenProduct.apply(inputs, self.bias, self.form, *self.packed)
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={type(self.form).__name__}"


def quantise(
    model: nn.Module, layers: str, quantisation: Quantisation, *, via: Via = "cpu", accelerator: torch.device
) -> None:
    """Replace linear layers of a model by quantised ones, in place and where they are.

    Args:
        layers: regular expression that the whole dotted path of a layer must match.
        via: where weights are packed; the result is the same. `accelerator` brings one block at a time there,
            `pipeline` a single layer, `cpu` none.

    Raises:
        RuntimeError: the expression matches no linear layer.
    """
    chosen = [name for name, _ in linear_layers(model, layers)]
    if not chosen:
        raise RuntimeError(f"no linear layer of {type(model).__name__} matches {layers!r}")
    device = torch.device("cpu") if via == "cpu" else accelerator
    for _, group in groupby(chosen, key=block_of if via == "accelerator" else str):
        _quantise_together(model, list(group), quantisation, device)


def linear_layers(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers whose path matches, in the order of the model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and re.fullmatch(layers, name):
            yield name, module


def block_of(name: str) -> str:
    """The repeated block that a module is in: its path up to the first number."""
    return re.match(r"(.*?\.\d+)?", name).group()  # type: ignore[union-attr]


def _quantise_together(model: nn.Module, names: list[str], quantisation: Quantisation, device: torch.device) -> None:
    """Pack some layers on a device and put the results where the layers were."""
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    weights = {name: layer.weight.detach().to(device, non_blocking=True) for name, layer in layers.items()}
    for name, layer in layers.items():
        home = layer.weight.device
        form, tensors = pack(weights.pop(name), quantisation)
        packed = {key: tensor.to(home).contiguous() for key, tensor in tensors.items()}
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_module(attribute, QuantisedLinear(layer, (form, packed)))
