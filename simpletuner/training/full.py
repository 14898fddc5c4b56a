"""A full fine-tune: every weight of the transformer is trained, and the result is a complete pipeline folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from huggingface_hub import hf_hub_download, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from simpletuner.atomic import build_folder, write_json
from simpletuner.config.json_files import read_json
from simpletuner.distributed.sharding import gathered
from simpletuner.distributed.world import World
from simpletuner.errors import Problem, shorten
from simpletuner.models.source import Part
from simpletuner.training.ema import Ema
from simpletuner.training.manifest import NOTE_FILE, PIPELINE_FOLDER
from simpletuner.training.trained import Release, load_parameters, open_weights

FOLDER, AVERAGED = "transformer", "transformer_ema"
INDEX_FILE = "model_index.json"
SCHEDULER_FILE = "scheduler_config.json"
WEIGHTS_PATTERN = SAFETENSORS_WEIGHTS_NAME.replace(".", "{suffix}.")


@dataclass
class FullModel:
    """A transformer that is trained as a whole."""

    transformer: nn.Module
    sharers: World = field(default_factory=World)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.transformer.named_parameters())

    def save(self, folder: Path, *, ema: Ema | None, note: Mapping[str, str]) -> None:
        self._write(folder / FOLDER)
        if ema is not None:
            with ema.applied():
                self._write(folder / AVERAGED)

    def save_exact(self, folder: Path) -> None:
        """Nothing to do: what `save` writes is exact."""

    def load(self, folder: Path) -> None:
        files = sorted((folder / FOLDER).glob("*.safetensors"))
        load_parameters(self.parameters(), files, folder, "pretrained_model_name_or_path")

    def disabled(self) -> AbstractContextManager[None]:
        raise RuntimeError("a full fine-tune changes the base model itself, so there is nothing to disable")

    def publish(self, output_dir: Path, release: Release, ema: Ema | None) -> str:
        """Write a folder for `from_pretrained`: the transformer (or its average) and copies of the other parts."""
        final = output_dir / PIPELINE_FOLDER
        with ExitStack() as building:  # which ends in the main process when all have written
            folder = self.sharers.on_main(lambda: building.enter_context(build_folder(final)))
            self.sharers.on_main(lambda: copy_parts(release, folder))
            with nullcontext() if ema is None else ema.applied():
                self._write(folder / FOLDER)
                self.verify(folder / FOLDER)
            self.sharers.on_main(lambda: write_json(folder / NOTE_FILE, dict(release.note)))
        return f"Saved {final}; it loads with from_pretrained."

    def verify(self, folder: Path) -> None:
        """Compare the files in a folder with the weights.

        Raises:
            RuntimeError: a tensor is missing or differs.
        """
        expected = self.transformer.state_dict()
        with open_weights(sorted(folder.glob("*.safetensors")) if self.sharers.is_main else ()) as saved:
            wrong = set(saved) - set(expected)
            for name, tensor in expected.items():
                trained = gathered(tensor)
                if self.sharers.is_main and not (name in saved and torch.equal(saved[name].get_tensor(name), trained)):
                    wrong.add(name)
        if found := self.sharers.broadcast(sorted(wrong)):
            raise RuntimeError(f"{folder}: {shorten(found)} is not what was trained")

    def _write(self, folder: Path) -> None:
        """Write what diffusers' `save_pretrained` writes, with one file at a time in memory."""
        model: Any = self.transformer
        weights = model.state_dict()
        # By full shapes: a sharded tensor would count as the part that is here.
        shapes = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in weights.items()}
        files = split_torch_state_dict_into_shards(shapes, filename_pattern=WEIGHTS_PATTERN, max_shard_size="5GB")
        self.sharers.on_main(lambda: model.save_config(folder))
        for file, names in files.filename_to_tensors.items():
            self._write_file(folder / file, {name: weights[name] for name in names})
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            self.sharers.on_main(lambda: write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index))

    def _write_file(self, path: Path, weights: Mapping[str, Tensor]) -> None:
        tensors = {}
        for name, weight in weights.items():
            full = gathered(weight)
            if self.sharers.is_main:
                tensors[name] = full.contiguous()
        self.sharers.on_main(lambda: save_file(tensors, path, {"format": "pt"}))


def copy_parts(release: Release, folder: Path) -> None:
    """Copy everything but the transformer of the base model into a pipeline folder."""
    for role, part in release.source.parts.items():
        if role != "transformer":
            # In the hub's cache files are links to blobs; the result must not depend on them.
            shutil.copytree(part.fetch(), folder / part.folder, symlinks=False)
    shutil.copyfile(index_file(release.source["scheduler"]), folder / INDEX_FILE)
    if release.shift is not None:
        set_shift(folder / release.source["scheduler"].folder / SCHEDULER_FILE, release.shift)


def set_shift(path: Path, shift: float) -> None:
    """Write the shift that previews were sampled with into a scheduler's config."""
    problems: list[Problem] = []
    settings = read_json(path, problems)
    if not isinstance(settings, dict):
        raise RuntimeError(f"{path}: {', '.join(map(str, problems)) or 'not a scheduler'}")
    write_json(path, {**settings, "shift": shift})


def index_file(part: Part) -> Path:
    """The index of the pipeline that a part belongs to."""
    if part.is_local:
        return Path(part.location).expanduser() / INDEX_FILE
    return Path(hf_hub_download(part.location, INDEX_FILE, revision=part.revision))
