"""Nothing that is NaN or infinite reaches a weight, a file or a preview.

What is looked at here was read from the device anyway (losses, the size of the gradient that clipping needs), or is
about to be written; a step does not wait once more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from simpletuner.errors import NonFiniteError, shorten

# float16 steps are skipped while the scaler halves its scale. Below 1 gradients would overflow without any scaling.
LOWEST_SCALE = 1.0


def stop_if_losses_not_finite(losses: Sequence[float], files: Sequence[Sequence[str]]) -> None:
    """Look at the losses of a step before the update.

    Args:
        losses: one per micro-batch.
        files: the samples of each micro-batch.

    Raises:
        NonFiniteError: naming the files of the micro-batches at fault.
    """
    guilty = [name for loss, names in zip(losses, files, strict=True) if not math.isfinite(loss) for name in names]
    if guilty:
        raise NonFiniteError(
            f"The loss is {', '.join(map(str, losses))}. The weights were not touched. Trained on: {', '.join(guilty)}."
        )


def stop_if_gradients_not_finite(
    sizes: Iterable[float],
    parameters: Mapping[str, nn.Parameter],
    scaler: torch.amp.GradScaler,
    files: Sequence[Sequence[str]],
) -> None:
    """Look at the gradient of a step before the update.

    In float16 the scaler skips such a step and tries the next one at half its scale, until the scale is below 1.

    Args:
        sizes: of the whole gradient, as clipping measured it (norm or largest value).

    Raises:
        NonFiniteError: naming the tensors, those that the backward pass reached first in front, and the files.
    """
    if all(map(math.isfinite, sizes)) or (scaler.is_enabled() and scaler.get_scale() >= LOWEST_SCALE):
        return
    gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    guilty = not_finite(gradients)[::-1]  # the backward pass goes from the last layer to the first
    what = f"of {shorten(guilty)}, in the order of the backward pass," if guilty else "of all tensors together"
    raise NonFiniteError(
        f"The gradient {what} is NaN or infinite, although the loss is finite. The weights were not touched. "
        f"Trained on: {', '.join(name for names in files for name in names)}."
    )


def stop_if_weights_not_finite(weights: Mapping[str, Tensor]) -> None:
    """Look at weights that are about to be saved, published or rendered with; waits for the device once.

    Raises:
        NonFiniteError: naming the tensors.
    """
    guilty = not_finite(weights)
    if guilty:
        raise NonFiniteError(
            f"{len(guilty)} of {len(weights)} trained tensors are NaN or infinite and were not saved: "
            f"{shorten(guilty)}. Continue from the last checkpoint with a lower learning_rate."
        )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors with a value that is NaN or infinite."""
    if not tensors:
        return []
    with torch.no_grad():
        # The largest absolute value is infinite or NaN where any value is; a sum of squares could overflow.
        largest = torch.stack([each.float() for each in torch._foreach_norm(list(tensors.values()), float("inf"))])
    return [name for name, value in zip(tensors, largest.tolist(), strict=True) if not math.isfinite(value)]
