"""What a run trains of a transformer: one door for a LoRA, a whole model, and adapters to come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import nn

from simpletuner.errors import UserError
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.models.source import ModelSource
from simpletuner.training.ema import Ema
from simpletuner.training.finite import refuse_not_finite

EARLIER = "choose an earlier checkpoint"


@dataclass(frozen=True)
class Release:
    """What the result of a run is published with.

    Attributes:
        adapter: makes a bare pipeline, to load a LoRA file into.
        source: the other parts of the checkpoint, for a whole pipeline.
        dtype: that the model is sampled in.
        shift: of the sampling schedule where it is not the checkpoint's own.
        note: entries for headers: what the result belongs to, its step among them.
    """

    adapter: FamilyAdapter
    source: ModelSource
    dtype: torch.dtype
    shift: float | None
    note: Mapping[str, str]


class Trained(Protocol):
    """The trained weights of a transformer, and their way into files and back."""

    transformer: nn.Module

    def parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by name, in a fixed order."""
        ...

    def save(self, folder: Path, *, ema: Ema | None, note: Mapping[str, str]) -> None:
        """Write the weights into a checkpoint in the form users load, the moving average beside them."""
        ...

    def save_exact(self, folder: Path) -> None:
        """Write them into a checkpoint as they are, where `save` does not."""
        ...

    def load(self, folder: Path) -> None:
        """Restore them from a checkpoint, exactly.

        Raises:
            UserError: it holds other weights.
        """
        ...

    def disabled(self) -> AbstractContextManager[None]:
        """The transformer as it was before training, inside the block.

        Raises:
            RuntimeError: that is lost, since the base itself is trained.
        """
        ...

    def publish(self, output_dir: Path, release: Release, ema: Ema | None) -> str:
        """Write the result and check it the way users will load it; returns what to tell the user.

        Raises:
            RuntimeError: the result does not load as it was saved.
        """
        ...


def load_parameters(parameters: Mapping[str, nn.Parameter], files: Iterable[Path], origin: Path, keys: str) -> None:
    """Fill parameters from safetensors files that hold just these.

    Args:
        origin: the checkpoint, for messages.
        keys: configuration keys that decide which parameters there are, and their shapes.

    Raises:
        UserError: there are others, one has another shape, or holds NaN or infinity.
    """
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if weights.keys() != parameters.keys():
        raise UserError(f"{origin} was made with other trained layers; check {keys}.")
    refuse_not_finite(weights, origin, EARLIER)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != weights[name].shape:
                raise UserError(f"{origin}: {name} has another shape; check {keys}.")
            parameter.copy_(weights[name])
