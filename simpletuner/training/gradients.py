"""The gradient of a step: the weight of each sample in it, its size, clipping, and what is said if it is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from simpletuner.config.schema import OptimizerConfig
from simpletuner.distributed.sharding import from_all, local, local_parts
from simpletuner.errors import NonFiniteError, shorten
from simpletuner.training.finite import not_finite

# The scaler skips a float16 step that overflows and halves its scale. Below 1 it is not the scale that overflows.
LOWEST_SCALE = 1.0


def equalise_samples(parameters: Iterable[nn.Parameter], counts: Sequence[int]) -> None:
    """Rescale gradients summed with `loss_divisor` to those of the mean over all samples."""
    factor = len(counts) * counts[0] / sum(counts)
    if factor != 1:
        torch._foreach_mul_([local(each.grad) for each in parameters if each.grad is not None], factor)


def gradient_size(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> dict[str, Tensor]:
    """The size that `grad_clip_method` limits, on the device: `grad_absmax` (value) or `grad_norm` (norm).

    torch's `clip_grad_norm_` would scale by a tensor on the device even where nothing is clipped; here the size is read
    together with the losses, for clipping, for the log and for the check that it is finite.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return {}
    parts = local_parts(gradients)
    if config.grad_clip_method == "value":
        return {"grad_absmax": from_all(torch.stack(torch._foreach_norm(parts, float("inf"))), gradients).max()}
    norms = torch.stack([part.float() for part in torch._foreach_norm(parts, 2.0)])
    return {"grad_norm": from_all(norms, gradients).norm(2)}


def clip_gradients(parameters: Iterable[nn.Parameter], config: OptimizerConfig, sizes: Mapping[str, float]) -> None:
    """Clip in place to `max_grad_norm`; 0 clips nothing.

    Args:
        sizes: what `gradient_size` gave for these parameters, as numbers.
    """
    limit = config.max_grad_norm
    if not any(0 < limit < size for size in sizes.values()):
        return
    parts = local_parts([parameter.grad for parameter in parameters if parameter.grad is not None])
    if "grad_norm" in sizes:
        torch._foreach_mul_(parts, limit / sizes["grad_norm"])
    else:
        torch._foreach_clamp_min_(parts, -limit)
        torch._foreach_clamp_max_(parts, limit)


def stop_if_gradients_not_finite(
    sizes: Iterable[float],
    parameters: Mapping[str, nn.Parameter],
    scaler: torch.amp.GradScaler,
    files: Sequence[Sequence[str]],
    *,
    is_halfway: bool = False,
) -> None:
    """Check the gradient of a step before the update.

    In float16 the scaler skips such a step and tries the next one at half its scale, until the scale is below 1.

    Args:
        sizes: norm or largest value of the whole gradient, as measured by clipping.
        is_halfway: released gradients have updated some weights.

    Raises:
        NonFiniteError: naming the tensors in the order in which the backward pass reached them, and the files.
    """
    if all(map(math.isfinite, sizes)) or (scaler.is_enabled() and scaler.get_scale() >= LOWEST_SCALE):
        return
    gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    guilty = not_finite(gradients)[::-1]  # the backward pass goes from the last layer to the first
    raise gradient_error(guilty, files, is_halfway=is_halfway)


def gradient_error(guilty: Sequence[str], files: Sequence[Sequence[str]], *, is_halfway: bool) -> NonFiniteError:
    """The error for a gradient that is NaN or infinite.

    Args:
        guilty: its tensors, in the order in which the backward pass reached them; none if each by itself is finite.
        is_halfway: some weights are updated already.
    """
    what = f"of {shorten(guilty)}, in the order of the backward pass," if guilty else "of all tensors together"
    left = "were not touched"
    if is_halfway:
        left = "of this step are partly updated and are not saved: continue from the last checkpoint"
    return NonFiniteError(
        f"The gradient {what} is NaN or infinite, although the loss is finite. The weights {left}. "
        f"Trained on: {', '.join(name for names in files for name in names)}."
    )
