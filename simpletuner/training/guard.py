"""The size of gradients, clipping, and checks that stop NaN and infinity.

NaN and infinity reach neither weights nor files nor previews.

A step checks only numbers that it reads from the device anyway (the losses, and the gradient size
for clipping), so the checks cost no synchronisation. Weights are checked when they are saved,
loaded, published or rendered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simpletuner.config.schema import OptimizerConfig
from simpletuner.errors import NonFiniteError, UserError, shorten
from simpletuner.training.sharding import gather_values, local, local_shards

if TYPE_CHECKING:
    from simpletuner.training.ema import Ema
    from simpletuner.training.release import GradientRelease


def stop_if_losses_not_finite(losses: Sequence[float], files: Sequence[Sequence[str]]) -> None:
    """Check the losses of a step before the update.

    Args:
        losses: one per micro-batch.
        files: the samples of each micro-batch.

    Raises:
        NonFiniteError: naming the files of the affected micro-batches.
    """
    affected: list[str] = []
    for loss, names in zip(losses, files, strict=True):
        if not math.isfinite(loss):
            affected.extend(names)
    if affected:
        raise NonFiniteError(
            f"The loss is {', '.join(map(str, losses))}. The weights were not updated. "
            f"Trained on: {', '.join(affected)}."
        )


def stop_if_result_not_finite(weights: Mapping[str, Tensor], ema: Ema | None) -> None:
    """Check all trained weights and their average before they are saved, published or rendered.

    Raises:
        NonFiniteError: naming the tensors.
    """
    stop_if_weights_not_finite(weights)
    if ema is not None:  # separately, since it may be on another device
        stop_if_weights_not_finite(
            {f"EMA of {name}": tensor for name, tensor in ema.average.items()}
        )


def stop_if_weights_not_finite(weights: Mapping[str, Tensor]) -> None:
    """Check weights on one device, with a single synchronisation.

    Raises:
        NonFiniteError: naming the tensors.
    """
    affected = not_finite(weights)
    if affected:
        raise NonFiniteError(
            f"{len(affected)} of {len(weights)} trained tensors are NaN or infinite and were not "
            f"saved: {shorten(affected)}. Continue from an earlier checkpoint with a "
            "lower learning_rate."
        )


def refuse_not_finite(weights: Mapping[str, Tensor], origin: Path | str) -> None:
    """Check weights read from a checkpoint.

    Args:
        origin: the file or checkpoint, for the message.

    Raises:
        UserError: naming the tensors.
    """
    affected = not_finite(weights)
    if affected:
        raise UserError(
            f"{origin} holds NaN or infinite values in {shorten(affected)}; choose an earlier "
            "checkpoint."
        )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors with NaN or infinite values. Collective if they are sharded."""
    if not tensors:
        return []
    # The maximum norm is infinite or NaN exactly if a value is; a sum of squares could overflow.
    largest = gather_values(norms(tensors.values(), math.inf), tensors.values())
    # One row per process; `amax` propagates NaN.
    values = largest.view(-1, len(tensors)).amax(0).tolist()
    return [name for name, value in zip(tensors, values, strict=True) if not math.isfinite(value)]


@torch.no_grad()
def norms(tensors: Iterable[Tensor], order: float) -> Tensor:
    """The norm of each tensor, or of this process's shard: float32, on the device."""
    shards = local_shards(tensors)
    if not shards:
        return torch.zeros(0)
    # float32, since norms of bf16 gradients are bf16, whose 8 bits are too few for the sum of
    # hundreds of squares.
    return torch.stack([norm.float() for norm in torch._foreach_norm(shards, order)])


def equalise_samples(parameters: Iterable[nn.Parameter], counts: Sequence[int]) -> None:
    """Rescale gradients summed with `loss_divisor` to the mean over all samples."""
    factor = len(counts) * counts[0] / sum(counts)
    if factor == 1:
        return
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)


def gradient_size(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> dict[str, Tensor]:
    """The size limited by `grad_clip_method`, on the device, as `grad_absmax` or `grad_norm`.

    torch's `clip_grad_norm_` would scale by a tensor on the device even if nothing is clipped.
    Here, the size is read together with the losses: for clipping, for logging, and to check that it
    is finite.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local_norms = norms(gradients, norm_order(config))
    return total_size(gather_values(local_norms, gradients), config)


def norm_order(config: OptimizerConfig) -> float:
    """The order of the norm limited by `grad_clip_method`."""
    return math.inf if config.grad_clip_method == "value" else 2.0


def total_size(norms: Tensor, config: OptimizerConfig) -> dict[str, Tensor]:
    """The size of a gradient from the norms of its tensors; empty without tensors."""
    if not len(norms):
        return {}
    name = "grad_absmax" if config.grad_clip_method == "value" else "grad_norm"
    return {name: norms.norm(norm_order(config))}


def clip_gradients(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, sizes: Mapping[str, float]
) -> None:
    """Clip in place to `max_grad_norm`; 0 clips nothing.

    Args:
        sizes: the result of `gradient_size` for these parameters, as numbers.
    """
    limit = config.max_grad_norm
    if limit <= 0 or not any(size > limit for size in sizes.values()):
        return
    gradients = local_shards(
        parameter.grad for parameter in parameters if parameter.grad is not None
    )
    if not gradients:  # released gradients have been freed
        return
    if "grad_norm" in sizes:
        torch._foreach_mul_(gradients, limit / sizes["grad_norm"])
    else:
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)


# An overflowing float16 gradient is the scale's fault: the scaler skips the step and halves its
# scale. A gradient that still overflows at a scale below 1 is too large by itself.
LOWEST_SCALE = 1.0


def stop_if_gradients_not_finite(
    parameters: Mapping[str, nn.Parameter],
    scaler: torch.amp.GradScaler,
    release: GradientRelease | None,
    sizes: Iterable[float],
    files: Sequence[Sequence[str]],
) -> None:
    """Check the gradient of a step before the update.

    In float16, the scaler skips the step and halves its scale, until the scale is below 1.

    Args:
        parameters: whose gradients are checked, by name, in the order of the forward pass.
        release: has checked the gradients that it has freed; None if none are released.
        sizes: norm or largest absolute value of the whole gradient, as measured for clipping.
        files: the samples of each micro-batch.

    Raises:
        NonFiniteError: naming the tensors, in the order of the backward pass, and the files.
    """
    if all(math.isfinite(size) for size in sizes):
        return
    if scaler.is_enabled() and scaler.get_scale() >= LOWEST_SCALE:
        return

    gradients = {
        name: weight.grad for name, weight in parameters.items() if weight.grad is not None
    }
    affected = not_finite(gradients)[::-1]  # the backward pass begins with the last layer
    if release is not None:
        affected += release.not_finite()
    gradient = "The gradient of all tensors together"  # each is finite, but their total is not
    if affected:
        gradient = f"The gradient of {shorten(affected)}, in the order of the backward pass,"

    state = "were not updated"
    if release is not None and release.is_halfway:
        state = (
            "of this step are partly updated and are not saved: continue from the last checkpoint"
        )
    trained_on = ", ".join(chain.from_iterable(files))
    raise NonFiniteError(
        f"{gradient} is NaN or infinite, although the loss is finite. The weights {state}. "
        f"Trained on: {trained_on}."
    )
