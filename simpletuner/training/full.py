"""A full fine-tune: every weight of the transformer is trained, and the result is a complete pipeline folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import safe_open
from torch import Tensor, nn

from simpletuner.atomic import build_folder, write_json
from simpletuner.config.json_files import read_json
from simpletuner.errors import Problem, shorten
from simpletuner.models.source import Part
from simpletuner.training.ema import Ema
from simpletuner.training.manifest import NOTE_FILE, PIPELINE_FOLDER
from simpletuner.training.trained import Release, load_parameters

FOLDER, AVERAGED = "transformer", "transformer_ema"
INDEX_FILE = "model_index.json"
SCHEDULER_FILE = "scheduler_config.json"


@dataclass
class FullModel:
    """A transformer that is trained as a whole."""

    transformer: nn.Module

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
        with build_folder(output_dir / PIPELINE_FOLDER) as folder:
            for role, part in release.source.parts.items():
                if role != "transformer":
                    # In the hub's cache files are links to blobs; the result must not depend on them.
                    shutil.copytree(part.fetch(), folder / part.folder, symlinks=False)
            shutil.copyfile(index_file(release.source["scheduler"]), folder / INDEX_FILE)
            if release.shift is not None:
                set_shift(folder / release.source["scheduler"].folder / SCHEDULER_FILE, release.shift)
            with nullcontext() if ema is None else ema.applied():
                self._write(folder / FOLDER)
                self.verify(folder / FOLDER)
            write_json(folder / NOTE_FILE, dict(release.note))
        return f"Saved {output_dir / PIPELINE_FOLDER}; it loads with from_pretrained."

    def verify(self, folder: Path) -> None:
        """Compare the files in a folder with the weights.

        Raises:
            RuntimeError: a tensor is missing or differs.
        """
        expected = dict(self.transformer.state_dict())
        for name, tensor in saved_tensors(folder):
            if name not in expected or not torch.equal(tensor, expected.pop(name).cpu()):
                raise RuntimeError(f"{folder}: {name} is not what was trained")
        if expected:
            raise RuntimeError(f"{folder} lacks {shorten(sorted(expected))}")

    def _write(self, folder: Path) -> None:
        model: Any = self.transformer
        model.save_pretrained(folder)


def saved_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all safetensors files in a folder, one at a time."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                yield name, file.get_tensor(name)


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
