"""The trained weights of a transformer: a common interface for LoRAs and full fine-tunes, and the full fine-tune."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from simpletuner.atomic import build_folder, write_json
from simpletuner.distributed.world import World
from simpletuner.errors import UserError, shorten
from simpletuner.memory.offload.image import wraps
from simpletuner.models.adapter import FamilyAdapter
from simpletuner.models.cost import NO_ADAPTERS, Adapters
from simpletuner.models.source import ModelSource
from simpletuner.planning.checkpoint_folder import NOTE_FILE, PIPELINE_FOLDER, STATE_FOLDER
from simpletuner.training.ema import Ema
from simpletuner.training.guard import not_finite, refuse_not_finite
from simpletuner.training.sharding import as_sharded, gathered, is_part, local, replaced
from simpletuner.weights.part import INDEX_FILE

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
        predict: the model's prediction for one training batch, with the same batch and noise at each call.
    """

    adapter: FamilyAdapter
    source: ModelSource
    dtype: torch.dtype
    shift: float | None
    note: Mapping[str, str]
    predict: Callable[[], Tensor]


@dataclass(frozen=True)
class Draft:
    """A file of a checkpoint before it is written.

    Attributes:
        name: path in the checkpoint's folder.
        write: writes content to a path.
        content: nested dictionaries and lists of tensors, on any device.
    """

    name: str
    write: Callable[[Path, Any], object]
    content: Any = None

    def write_into(self, folder: Path) -> None:
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write(path, self.content)

    @classmethod
    def of_tensors(cls, name: str, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> Draft:
        """A safetensors file."""
        return cls(name, lambda path, content: save_file(content, path, header), tensors)


def copy_drafts(drafts: Iterable[Draft], device: torch.device) -> Callable[[], list[Draft]]:
    """Copy the content of drafts to host memory, since training changes the originals.

    Returns:
        a function that waits for the copies, callable from any thread.
    """
    copies = [replace(draft, content=replaced(draft.content, _to_host)) for draft in drafts]
    copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return partial(_arrived, copies, copied)


def _arrived(copies: list[Draft], copied: torch.cuda.Event | None) -> list[Draft]:
    if copied is not None:
        copied.synchronize()
    return copies


def _to_host(path: str, tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda" or wraps(tensor):
        return tensor.detach().to("cpu", copy=True)
    return page_locked_copy(tensor.detach())


def page_locked_copy(tensor: Tensor) -> Tensor:
    """A copy of a GPU tensor in pinned memory, complete once the current stream has executed it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Trained(Protocol):
    """The trained weights of a transformer: saving, loading, publishing.

    Attributes:
        sharers: the processes among which the weights are sharded, and which call these methods together; only this
            process without sharding.
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
        """The weights and their moving average for a checkpoint: in the form that users load, and exactly as trained.

        Write or copy each draft before requesting the next, and close the generator.
        """

    def load(self, folder: Path) -> None:
        """Restore the weights from a checkpoint, exactly.

        Raises:
            UserError: the checkpoint holds other weights, or NaN or infinity.
        """

    def disabled(self) -> AbstractContextManager[None]:
        """A context in which the transformer is as before training.

        Raises:
            RuntimeError: full fine-tunes do not keep that state.
        """

    def publish(self, output_dir: Path, publication: Publication) -> str:
        """Write the result and verify it by loading it as users will; returns a message for the user.

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
        return {name: each for name, each in self.transformer.named_parameters() if each.requires_grad}

    def exact(self) -> Draft:
        """The parameters exactly as trained."""
        weights = {name: parameter.detach().contiguous() for name, parameter in self.parameters().items()}
        return Draft.of_tensors(f"{STATE_FOLDER}/{WEIGHTS_FILE}", weights)

    def load(self, folder: Path) -> None:
        keys = "lora_type, lora_rank and peft_lora_target_modules, or lycoris_config"
        load_parameters(self.parameters(), [folder / STATE_FOLDER / WEIGHTS_FILE], folder, keys)


def load_parameters(parameters: Mapping[str, nn.Parameter], files: Iterable[Path], origin: Path, keys: str) -> None:
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
        spoilt = [name for name, file in weights.items() if not_finite({name: file.get_tensor(name)})]
        refuse_not_finite({name: weights[name].get_tensor(name) for name in spoilt}, origin)
        with torch.no_grad():
            for name, parameter in parameters.items():
                local(parameter).copy_(local(as_sharded(weights[name].get_tensor(name), parameter)))


@contextmanager
def open_weights(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Open safetensors files: maps each tensor name to its open file."""
    with ExitStack() as opened:
        readers = [opened.enter_context(safe_open(file, "pt")) for file in files]
        yield {name: reader for reader in readers for name in reader.keys()}  # noqa: SIM118 - no mapping


FOLDER, AVERAGED = "transformer", "transformer_ema"
WEIGHTS_PATTERN = SAFETENSORS_WEIGHTS_NAME.replace(".", "{suffix}.")


@dataclass
class FullModel:
    """A full fine-tune of a transformer; the result is a complete pipeline folder."""

    transformer: nn.Module
    sharers: World = field(default_factory=World)
    ema: Ema | None = None

    @property
    def adapters(self) -> Adapters:
        return NO_ADAPTERS

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.transformer.named_parameters())

    def drafts(self, note: Mapping[str, str]) -> Generator[Draft]:
        yield from self._files(FOLDER)
        if self.ema is not None:
            with self.ema.applied():
                yield from self._files(AVERAGED)

    def load(self, folder: Path) -> None:
        files = sorted((folder / FOLDER).glob("*.safetensors"))
        load_parameters(self.parameters(), files, folder, "pretrained_model_name_or_path")

    def disabled(self) -> AbstractContextManager[None]:
        raise RuntimeError("a full fine-tune changes the base model itself, so there is nothing to disable")

    def publish(self, output_dir: Path, publication: Publication) -> str:
        """Write a folder for `from_pretrained`: the transformer (or its average) and copies of the other parts."""
        final = output_dir / PIPELINE_FOLDER
        with ExitStack() as building:  # renames the folder in the main process once all have written
            folder = self.sharers.on_main(lambda: building.enter_context(build_folder(final)))
            self.sharers.on_main(lambda: copy_parts(publication, folder))
            with nullcontext() if self.ema is None else self.ema.applied():
                for draft in self._files(FOLDER):
                    self.sharers.on_main(partial(draft.write_into, folder))
                self.verify(folder / FOLDER)
            self.sharers.on_main(lambda: write_json(folder / NOTE_FILE, dict(publication.note)))
        return f"Saved {final}; it loads with from_pretrained."

    def verify(self, folder: Path) -> None:
        """Compare the files in a folder with the weights.

        Raises:
            RuntimeError: a tensor is missing or differs.
        """
        expected = self.transformer.state_dict()
        with ExitStack() as reading:
            files = sorted(folder.glob("*.safetensors"))
            saved = self.sharers.main_only(lambda: reading.enter_context(open_weights(files))) or {}
            wrong = set(saved) - set(expected)
            for name, tensor in expected.items():
                trained = gathered(tensor)  # collective; the main process compares
                if not (name in saved and torch.equal(saved[name].get_tensor(name), trained)):
                    wrong.add(name)
        if differing := self.sharers.broadcast(sorted(wrong)):
            raise RuntimeError(f"{folder}: {shorten(differing)} is not what was trained")

    def _files(self, name: str) -> Iterator[Draft]:
        """The files of diffusers' `save_pretrained` in a folder of that name, gathered one file at a time."""
        model: Any = self.transformer
        weights = model.state_dict()
        # By full shapes, since a sharded tensor would count only its local shard.
        shapes = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in weights.items()
        }
        # Half of diffusers' 10 GB, since a whole file is in memory before it is written.
        files = split_torch_state_dict_into_shards(shapes, filename_pattern=WEIGHTS_PATTERN, max_shard_size="5GB")
        yield Draft(f"{name}/config.json", lambda path, _: model.save_config(path.parent))
        for file, keys in files.filename_to_tensors.items():
            tensors: dict[str, Any] = {}
            for key in keys:
                # Gathering is collective; only the main process keeps the result.
                whole = gathered(weights[key]) if is_part(weights[key]) else weights[key].detach()
                tensors[key] = self.sharers.main_only(whole.contiguous)
            yield Draft.of_tensors(f"{name}/{file}", tensors, {"format": "pt"})
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            yield Draft(f"{name}/{SAFE_WEIGHTS_INDEX_NAME}", write_json, index)


def copy_parts(publication: Publication, folder: Path) -> None:
    """Copy all parts of the base model except the transformer to a pipeline folder."""
    for role, part in publication.source.parts.items():
        if role != "transformer":
            # Files in the hub's cache are links to blobs; the result must not depend on them.
            shutil.copytree(part.fetch(), folder / part.folder, symlinks=False)
    scheduler = publication.source["scheduler"]
    shutil.copyfile(scheduler.fetch_index(), folder / INDEX_FILE)
    if publication.shift is not None:  # the shift of previews
        path = folder / scheduler.folder / "scheduler_config.json"
        write_json(path, {**json.loads(path.read_bytes()), "shift": publication.shift})
