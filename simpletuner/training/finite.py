"""Keep NaN and infinity out of weights, files and previews.

A step checks only what it reads from the device anyway (the losses, and the gradient size that clipping needs), so the
checks cost no synchronisation. Weights are checked when they are saved, loaded, published or rendered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from simpletuner.distributed.sharding import from_all, local_parts
from simpletuner.errors import NonFiniteError, UserError, shorten

if TYPE_CHECKING:  # they import this module
    from simpletuner.training.ema import Ema
    from simpletuner.training.state import Assembly


def stop_if_losses_not_finite(losses: Sequence[float], files: Sequence[Sequence[str]]) -> None:
    """Check the losses of a step before the update.

    Args:
        losses: one per micro-batch.
        files: the samples of each micro-batch.

    Raises:
        NonFiniteError: naming the files of the affected micro-batches.
    """
    guilty = [name for loss, names in zip(losses, files, strict=True) if not math.isfinite(loss) for name in names]
    if guilty:
        raise NonFiniteError(
            f"The loss is {', '.join(map(str, losses))}. The weights were not touched. Trained on: {', '.join(guilty)}."
        )


def stop_if_result_not_finite(assembly: Assembly, ema: Ema | None) -> None:
    """Check everything trained, the moving average included, before it is saved, published or rendered.

    Raises:
        NonFiniteError: naming the tensors.
    """
    stop_if_weights_not_finite(assembly.parameters | assembly.module_parameters)
    if ema is not None:  # on its own, since it may be on another device
        stop_if_weights_not_finite({f"EMA of {name}": tensor for name, tensor in ema.average.items()})


def stop_if_weights_not_finite(weights: Mapping[str, Tensor]) -> None:
    """Check weights of one device, for which the host waits once.

    Raises:
        NonFiniteError: naming the tensors.
    """
    guilty = not_finite(weights)
    if guilty:
        raise NonFiniteError(
            f"{len(guilty)} of {len(weights)} trained tensors are NaN or infinite and were not saved: "
            f"{shorten(guilty)}. Continue from the last checkpoint with a lower learning_rate."
        )


def refuse_not_finite(weights: Mapping[str, Tensor], origin: Path | str, advice: str) -> None:
    """Check weights that were read from a file.

    Args:
        origin: the file or checkpoint, for the message.
        advice: what to do instead.

    Raises:
        UserError: naming the tensors.
    """
    guilty = not_finite(weights)
    if guilty:
        raise UserError(f"{origin} holds NaN or infinite values in {shorten(guilty)}; {advice}.")


@contextmanager
def watched_outputs(model: nn.Module) -> Iterator[list[str]]:
    """A context in which modules whose output is NaN or infinite are added to the list, the first one first.

    Every output is read from the device, which is slow.
    """
    found: list[str] = []

    def check(name: str, module: nn.Module, given: object, output: object) -> None:
        outputs = output if isinstance(output, tuple | list) else [output]
        if not all(each.isfinite().all() for each in outputs if isinstance(each, Tensor)):
            found.append(name or type(module).__name__)

    hooks = [module.register_forward_hook(partial(check, name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors with a value that is NaN or infinite; collective if they are sharded."""
    if not tensors:
        return []
    with torch.no_grad():
        # The maximum norm is infinite or NaN exactly where a value is. A sum of squares could overflow.
        norms = torch._foreach_norm(local_parts(tensors.values()), float("inf"))
        largest = from_all(torch.stack([each.float() for each in norms]), tensors.values())
    values = largest.view(-1, len(tensors)).amax(0).tolist()
    return [name for name, value in zip(tensors, values, strict=True) if not math.isfinite(value)]
