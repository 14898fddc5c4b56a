"""What a run trains of a transformer: one interface for a LoRA and for a full fine-tune."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from simpletuner.distributed.sharding import as_sharded, local
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.models.source import ModelSource
from simpletuner.training.ema import Ema
from simpletuner.training.finite import not_finite, refuse_not_finite
from simpletuner.training.manifest import STATE_FOLDER

EARLIER = "choose an earlier checkpoint"
WEIGHTS_FILE = "trainable.safetensors"


@dataclass(frozen=True)
class Release:
    """What publishing needs besides the trained weights.

    Attributes:
        adapter: loads a bare pipeline, to check a LoRA file with.
        source: the other parts of the base model, for a complete pipeline.
        dtype: in which the model is sampled.
        shift: of the sampling schedule; None if it is the base model's own.
        note: header entries that identify the result, its step among them.
        predict: the model's prediction for one training batch, the same batch and noise at each call.
    """

    adapter: FamilyAdapter
    source: ModelSource
    dtype: torch.dtype
    shift: float | None
    note: Mapping[str, str]
    predict: Callable[[], Tensor]


class Trained(Protocol):
    """The trained weights of a transformer: saving, loading, publishing.

    Attributes:
        sharers: the processes that hold a part of these weights each, and so call these methods together; this one
            alone if it has all of them.
    """

    transformer: nn.Module
    sharers: World

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters to optimize, by name, in a fixed order."""
        ...

    def save(self, folder: Path, *, ema: Ema | None, note: Mapping[str, str]) -> None:
        """Write the weights and their moving average into a checkpoint, in the form that users load."""
        ...

    def save_exact(self, folder: Path) -> None:
        """Write the weights into a checkpoint exactly as they are trained, unless `save` does so."""
        ...

    def load(self, folder: Path) -> None:
        """Restore the weights from a checkpoint, exactly.

        Raises:
            UserError: it holds other weights, or NaN or infinity.
        """
        ...

    def disabled(self) -> AbstractContextManager[None]:
        """A context in which the transformer is as it was before training.

        Raises:
            RuntimeError: the base model itself is trained, so that state is lost.
        """
        ...

    def publish(self, output_dir: Path, release: Release, ema: Ema | None) -> str:
        """Write the result and check it by loading it as users will; returns a message for the user.

        Raises:
            RuntimeError: the result does not load as it was saved.
        """
        ...


class AdapterWeights:
    """The trained parameters of an adapter inside a frozen transformer, saved and restored exactly.

    Every process has all of them.
    """

    transformer: nn.Module
    sharers = World()

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.transformer.named_parameters() if each.requires_grad}

    def save_exact(self, folder: Path) -> None:
        weights = {name: parameter.detach().cpu().contiguous() for name, parameter in self.parameters().items()}
        save_file(weights, folder / STATE_FOLDER / WEIGHTS_FILE)

    def load(self, folder: Path) -> None:
        keys = "lora_type, lora_rank and peft_lora_target_modules, or lycoris_config"
        load_parameters(self.parameters(), [folder / STATE_FOLDER / WEIGHTS_FILE], folder, keys)


def load_parameters(parameters: Mapping[str, nn.Parameter], files: Iterable[Path], origin: Path, keys: str) -> None:
    """Fill parameters from safetensors files that hold exactly these.

    Args:
        origin: the checkpoint, for messages.
        keys: configuration keys that decide which parameters exist and their shapes.

    Raises:
        UserError: the files hold other parameters or shapes, or NaN or infinity.
    """
    with open_weights(files) as weights:
        if weights.keys() != parameters.keys():
            raise UserError(f"{origin} was made with other trained layers; check {keys}.")
        for name, parameter in parameters.items():
            if list(parameter.shape) != weights[name].get_slice(name).get_shape():
                raise UserError(f"{origin}: {name} has another shape; check {keys}.")
        # One at a time: all of them may not fit into memory.
        spoilt = [name for name, file in weights.items() if not_finite({name: file.get_tensor(name)})]
        refuse_not_finite({name: weights[name].get_tensor(name) for name in spoilt}, origin, EARLIER)
        with torch.no_grad():
            for name, parameter in parameters.items():
                local(parameter).copy_(local(as_sharded(weights[name].get_tensor(name), parameter)))


@contextmanager
def open_weights(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """For each tensor in some safetensors files the open file that holds it."""
    with ExitStack() as opened:
        readers = [opened.enter_context(safe_open(file, "pt")) for file in files]
        yield {name: reader for reader in readers for name in reader.keys()}  # noqa: SIM118 - no mapping
