"""Linear layers with packed weights, and the quantisation of a model's layers in place."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from simpletuner.config.precision import Quantisation
from simpletuner.errors import shorten
from simpletuner.memory.heap import trim_heap
from simpletuner.memory.quantisation.formats import Packed, WeightFormat
from simpletuner.memory.quantisation.nf4 import pack_nf4
from simpletuner.memory.quantisation.quanto import pack_quanto
from simpletuner.memory.quantisation.scaled_rows import MULTIPLE, ScaledRows
from simpletuner.memory.quantisation.torchao import pack_torchao

logger = logging.getLogger(__name__)

Via = Literal["cpu", "accelerator", "pipeline"]


def pack(weight: Tensor, quantisation: Quantisation) -> Packed:
    """Pack a weight `out in`: its format, and its tensors by name, in the format's order.

    Scales and unpacked weights have the weight's dtype.
    """
    packers = {"quanto": pack_quanto, "torchao": pack_torchao, "bnb": pack_nf4}
    with torch.no_grad():
        return packers[quantisation.library](weight.detach(), quantisation.kind)


class FrozenProduct(torch.autograd.Function):
    """Matmul with a packed weight.

    The backward pass unpacks it again, so autograd does not save the unpacked weight.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, bias: Tensor | None, form: WeightFormat, *packed: Tensor
    ) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(*packed)
        return form.product(inputs, bias, *packed)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        packed = ctx.saved_tensors
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = ctx.form.input_gradient(gradient, *packed)
        # None for the bias, the format and the packed tensors, which are frozen.
        return (input_gradient, None, None, *(None for _ in packed))


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight is packed into buffers named `packed_...`.

    It supports adapters as usual.
    """

    def __init__(self, layer: nn.Linear, packed: Packed) -> None:
        nn.Module.__init__(self)  # nn.Linear would allocate a full-size weight
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        bias = None
        if layer.bias is not None:
            bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
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
        """The weight `out in`, unpacked at each access.

        Read by DoRA, and by peft when it adds adapters.
        """
        return self.form.unpack(*self.packed)

    def forward(self, inputs: Tensor) -> Tensor:
        if not inputs.requires_grad:
            # torch 2.11 cannot compile a `Function` whose inputs need no gradient.
            return self.form.product(inputs, self.bias, *self.packed)
        return FrozenProduct.apply(inputs, self.bias, self.form, *self.packed)


def quantise(
    model: nn.Module,
    layers: str,
    quantisation: Quantisation,
    *,
    via: Via = "cpu",
    accelerator: torch.device,
    within: Sequence[nn.Module] = (),
) -> None:
    """Replace linear layers of a model with quantised layers, in place and on the same device.

    Args:
        layers: regular expression that must match the full dotted path of a layer.
        within: quantise only layers in these modules; by default in the whole model.
        via: device of the packing, with equal results: the CPU, or the accelerator, one block
            (`accelerator`) or one layer (`pipeline`) at a time.

    Raises:
        RuntimeError: the expression matches no linear layer.
    """
    chosen = dict(linear_layers(model, layers))
    if not chosen:
        raise RuntimeError(f"no linear layer of {type(model).__name__} matches {layers!r}")
    inside: set[nn.Module] = set()
    for part in within or [model]:
        inside.update(part.modules())
    names = []
    for name, layer in chosen.items():
        # Layers from an earlier call are already packed.
        if layer in inside and type(layer) is not QuantisedLinear:
            names.append(name)
    device = torch.device("cpu") if via == "cpu" else accelerator
    for _, names_of_block in groupby(names, key=block_of):
        if via == "accelerator":
            _quantise_together(model, list(names_of_block), quantisation, device)
        else:
            for name in names_of_block:
                _quantise_together(model, [name], quantisation, device)
        trim_heap()


def linear_layers(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers with a matching path, in the order of the model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and re.fullmatch(layers, name):
            yield name, module


def block_of(name: str) -> str:
    """The repeated block that contains a module: its path up to the first number."""
    return re.match(r"(.*?\.\d+)?", name).group()  # type: ignore[union-attr]


def _quantise_together(
    model: nn.Module, names: list[str], quantisation: Quantisation, device: torch.device
) -> None:
    """Pack layers on a device, and move the results back to the device of each layer."""
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    weights = {
        name: layer.weight.detach().to(device, non_blocking=True) for name, layer in layers.items()
    }
    for name, layer in layers.items():
        home = layer.weight.device
        # Popped, so that each weight is freed once it is packed.
        form, tensors = pack(weights.pop(name), quantisation)
        packed = {key: tensor.to(home).contiguous() for key, tensor in tensors.items()}
        parent, _, attribute = name.rpartition(".")
        quantised = QuantisedLinear(layer, (form, packed))
        model.get_submodule(parent).register_module(attribute, quantised)


def use_quantised_products(model: nn.Module) -> None:
    """Let quantised layers multiply without unpacking their weights, where sizes allow it."""
    unsupported: list[str] = []
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantisedLinear):
            continue
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            unsupported.append(name)
        else:
            layer.form = ScaledRows(rounds_inputs=True, rounds_gradients=True)
    if unsupported:
        message = (
            "quantized_matmul: %s are multiplied unpacked, since their sizes are not "
            "multiples of %d."
        )
        logger.info(message, shorten(unsupported), MULTIPLE)
