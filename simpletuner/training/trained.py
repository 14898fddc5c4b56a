"""The interface of trained weights (LoRA or full), and what all kinds of adapters share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.models.cost import Adapters
from simpletuner.models.source import ModelSource
from simpletuner.planning.checkpoint_folder import STATE_FOLDER
from simpletuner.training.drafts import Draft
from simpletuner.training.ema import Ema
from simpletuner.training.guard import not_finite, refuse_not_finite
from simpletuner.training.sharding import as_sharded, local

WEIGHTS_FILE = "trainable.safetensors"


@dataclass(frozen=True)
class Publication:
    """Inputs of publishing besides the trained weights.

    Attributes:
        adapter: loads a bare pipeline, to verify a LoRA file.
        source: the other parts of the base model, for a complete pipeline.
        dtype: dtype for sampling.
        shift: shift of the sampling schedule; None for the base model's.
        note: header entries that identify the result, including its step.
        predict: the model's prediction for one training batch, with the same batch and noise at
            each call.
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
        sharers: the processes among which the weights are sharded, and which call these methods
            together; only this process without sharding.
        ema: moving average, if `use_ema` is set.
    """

    transformer: nn.Module
    sharers: World
    ema: Ema | None

    @property
    def adapters(self) -> Adapters:
        """The adapter, for cost estimates; `NO_ADAPTERS` for a full fine-tune."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name, in a fixed order."""

    def drafts(self, note: Mapping[str, str]) -> Generator[Draft]:
        """The files of a checkpoint: weights and average for users, and weights exactly as trained.

        Write or copy each draft before requesting the next, and close the generator.
        """

    def load(self, folder: Path) -> None:
        """Restore the weights from a checkpoint, exactly.

        Raises:
            UserError: the checkpoint holds other weights, or NaN or infinity.
        """

    def disabled(self) -> AbstractContextManager[None]:
        """A context in which the transformer predicts as before training.

        Raises:
            RuntimeError: full fine-tunes do not keep that state.
        """

    def publish(self, output_dir: Path, publication: Publication) -> str:
        """Write the result and verify it by loading it as users will.

        Returns:
            a message for the user.

        Raises:
            RuntimeError: the result does not load as saved.
        """


class AdapterWeights:
    """The trained parameters of an adapter in a frozen transformer, saved and restored exactly.

    Every process holds all parameters.
    """

    transformer: nn.Module
    sharers = World()
    ema: Ema | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for name, parameter in self.transformer.named_parameters()
            if parameter.requires_grad
        }

    def exact_draft(self) -> Draft:
        """The parameters exactly as trained."""
        weights = {
            name: parameter.detach().contiguous() for name, parameter in self.parameters().items()
        }
        return Draft.of_tensors(f"{STATE_FOLDER}/{WEIGHTS_FILE}", weights)

    def load(self, folder: Path) -> None:
        keys = "lora_type, lora_rank and peft_lora_target_modules, or lycoris_config"
        load_parameters(self.parameters(), [folder / STATE_FOLDER / WEIGHTS_FILE], folder, keys)


def load_parameters(
    parameters: Mapping[str, nn.Parameter], files: Iterable[Path], origin: Path, keys: str
) -> None:
    """Fill parameters from safetensors files with exactly these parameters.

    Args:
        origin: the checkpoint, for messages.
        keys: config keys that determine the parameters and their shapes.

    Raises:
        UserError: the files hold other parameters or shapes, or NaN or infinity.
    """
    with open_weights(files) as weights:
        # All checks precede the first copy, so that a rejected checkpoint changes no weight.
        if weights.keys() != parameters.keys():
            raise UserError(f"{origin} was made with other trained layers; check {keys}.")
        for name, parameter in parameters.items():
            if list(parameter.shape) != weights[name].get_slice(name).get_shape():
                raise UserError(f"{origin}: {name} has another shape; check {keys}.")
        # One at a time, since all tensors may not fit into memory.
        damaged = {}
        for name, file in weights.items():
            tensor = file.get_tensor(name)
            if not_finite({name: tensor}):
                damaged[name] = tensor
        refuse_not_finite(damaged, origin)

        with torch.no_grad():
            for name, parameter in parameters.items():
                saved = as_sharded(weights[name].get_tensor(name), parameter)
                local(parameter).copy_(local(saved))


@contextmanager
def open_weights(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Open safetensors files: maps each tensor name to its open file."""
    with ExitStack() as opened:
        readers = [opened.enter_context(safe_open(file, "pt")) for file in files]
        yield {name: reader for reader in readers for name in reader.keys()}  # noqa: SIM118 - no mapping
