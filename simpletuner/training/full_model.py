"""A full fine-tune of a transformer, and its result: a complete pipeline folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from huggingface_hub import split_torch_state_dict_into_shards
from torch import nn

from simpletuner.atomic import build_folder, write_json
from simpletuner.distributed.world import World
from simpletuner.errors import shorten
from simpletuner.models.cost import NO_ADAPTERS, Adapters
from simpletuner.planning.checkpoint_folder import NOTE_FILE, PIPELINE_FOLDER
from simpletuner.training.drafts import Draft
from simpletuner.training.ema import Ema
from simpletuner.training.sharding import gathered, is_shard
from simpletuner.training.trained import Publication, load_parameters, open_weights
from simpletuner.weights.part import INDEX_FILE

FOLDER = "transformer"
AVERAGE_FOLDER = "transformer_ema"
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
                yield from self._files(AVERAGE_FOLDER)

    def load(self, folder: Path) -> None:
        files = sorted((folder / FOLDER).glob("*.safetensors"))
        load_parameters(self.parameters(), files, folder, "pretrained_model_name_or_path")

    def disabled(self) -> AbstractContextManager[None]:
        raise RuntimeError(
            "a full fine-tune changes the base model itself, so there is nothing to disable"
        )

    def publish(self, output_dir: Path, publication: Publication) -> str:
        """Write a pipeline folder for `from_pretrained`, and verify it.

        It has the transformer, or its average, and copies of the other parts of the base model.
        """
        final = output_dir / PIPELINE_FOLDER
        # Renames the folder in the main process, after all processes have written.
        with ExitStack() as building:
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
                trained = gathered(tensor)  # collective; only the main process has read the files
                if name not in saved or not torch.equal(saved[name].get_tensor(name), trained):
                    wrong.add(name)
        differing = self.sharers.broadcast(sorted(wrong))
        if differing:
            raise RuntimeError(f"{folder}: {shorten(differing)} is not what was trained")

    def _files(self, folder: str) -> Iterator[Draft]:
        """The files of diffusers' `save_pretrained` in a folder, gathered one file at a time."""
        model: Any = self.transformer
        weights = model.state_dict()
        # By full shapes, since a sharded tensor would count only its local shard.
        shapes = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            for name, weight in weights.items()
        }
        # Half of diffusers' 10 GB, since a whole file is in memory before it is written.
        files = split_torch_state_dict_into_shards(
            shapes, filename_pattern=WEIGHTS_PATTERN, max_shard_size="5GB"
        )
        yield Draft(f"{folder}/config.json", lambda path, _: model.save_config(path.parent))
        for file, keys in files.filename_to_tensors.items():
            tensors: dict[str, Any] = {}
            for key in keys:
                weight = weights[key].detach()
                if is_shard(weight):
                    weight = gathered(weight)  # collective; only the main process keeps the result
                tensors[key] = self.sharers.main_only(weight.contiguous)
            yield Draft.of_tensors(f"{folder}/{file}", tensors, {"format": "pt"})
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            yield Draft(f"{folder}/{SAFE_WEIGHTS_INDEX_NAME}", write_json, index)


def copy_parts(publication: Publication, folder: Path) -> None:
    """Copy all parts of the base model except the transformer to a pipeline folder."""
    for role, part in publication.source.parts.items():
        if role == "transformer":
            continue
        # Files in the hub's cache are links to blobs; the result must not depend on them.
        shutil.copytree(part.fetch(), folder / part.folder, symlinks=False)
    scheduler = publication.source["scheduler"]
    shutil.copyfile(scheduler.fetch_index(), folder / INDEX_FILE)
    if publication.shift is not None:  # the shift of previews
        path = folder / scheduler.folder / "scheduler_config.json"
        write_json(path, {**json.loads(path.read_bytes()), "shift": publication.shift})
