"""A result takes its place only when it loads as it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from simpletuner.headers import METADATA, read_header
from simpletuner.models.registry import FAMILIES
from simpletuner.models.source import ModelSource
from simpletuner.training.full import FullModel
from simpletuner.training.manifest import LORA_FILE, PIPELINE_FOLDER
from simpletuner.training.trained import Release
from tests.fidelity.family import make_config
from tests.training.assembly import lora_of, make_assembly


def make_release(checkpoint: Path, adapter: Any) -> Release:
    spec = FAMILIES["kandinsky5-image"]
    source = ModelSource.from_config(spec, spec.flavours[0], make_config(checkpoint))
    return Release(adapter, source, torch.float32, None, {"simpletuner.step": "1"})


def spoil(path: Path) -> None:
    """Change one number of a file."""
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + 1}, path, metadata=read_header(path)[METADATA])


def test_a_file_that_was_not_written_as_trained_never_replaces_a_good_one(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = make_assembly(t2i_checkpoint)
    lora, release = lora_of(assembly), make_release(t2i_checkpoint, assembly.adapter)
    good = tmp_path / LORA_FILE
    assert f"all {len(lora.state_dict())} tensors load" in lora.publish(tmp_path, release, None)
    before, write = good.read_bytes(), lora.write

    def flawed(folder: Path, *, weights: Any = None, note: Mapping[str, str]) -> Path:
        path = write(folder, weights=weights, note=note)
        spoil(path)
        return path

    monkeypatch.setattr(lora, "write", flawed)
    with pytest.raises(RuntimeError, match="does not load as it was saved"):
        lora.publish(tmp_path, release, None)
    assert good.read_bytes() == before


def test_a_pipeline_that_was_not_written_as_trained_is_not_published(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = make_assembly(t2i_checkpoint, model_type="full")
    full, release = assembly.trained, make_release(t2i_checkpoint, assembly.adapter)
    assert isinstance(full, FullModel)
    write = full._write

    def flawed(folder: Path) -> None:
        write(folder)
        spoil(next(folder.glob("*.safetensors")))

    monkeypatch.setattr(full, "_write", flawed)
    with pytest.raises(RuntimeError, match="is not what was trained"):
        full.publish(tmp_path, release, None)
    assert not (tmp_path / PIPELINE_FOLDER).exists()
