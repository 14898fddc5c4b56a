"""Full float32 on a GPU for models and layers that need it.

TF32, which `disable_tf32` switches off for everything, keeps 10 of a factor's 23 bits. That is enough for a run in
float32 and for the float32 weights of a LoRA. It would defeat the purpose of a float32 VAE, and of the layers that
diffusers keeps in float32 in a bf16 model; stock pipelines compute these layers in full.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@contextmanager
def full_float32() -> Iterator[None]:
    """A context without TF32. The setting is global: it also affects other threads."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed = products.allow_tf32, convolutions.allow_tf32
    try:
        products.allow_tf32 = convolutions.allow_tf32 = False
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = allowed


@torch.library.custom_op(
    "simpletuner::full_linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
def full_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b in full float32; an operation, since compiled code cannot change torch's settings."""
    with full_float32():
        return functional.linear(x, weight, bias)


@full_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], len(weight)))


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    rows = gradient.flatten(0, -2)
    return (
        full_linear(gradient, weight.t(), None) if ctx.needs_input_grad[0] else None,
        full_linear(rows.t(), x.flatten(0, -2).t(), None) if ctx.needs_input_grad[1] else None,
        rows.sum(0) if ctx.needs_input_grad[2] else None,
    )


full_linear.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))


def keep_full_float32(transformer: nn.Module) -> None:
    """Compute the linear layers that the class of a transformer keeps in float32 in full."""
    model: Any = transformer
    kept = set(model._keep_in_fp32_modules or ())
    for name, layer in transformer.named_modules():
        if isinstance(layer, nn.Linear) and kept & {*name.split(".")}:
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    """As `nn.Linear`; a weight that is stored in bf16 is cast to the dtype of the input."""
    out: Tensor = full_linear(x, layer.weight.to(x.dtype), layer.bias)
    return out
