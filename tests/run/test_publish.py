"""A result takes its place only when it loads as it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from simpletuner.headers import METADATA, read_header
from simpletuner.run.publish import _publish_lora
from simpletuner.training.manifest import LORA_FILE
from tests.training.assembly import make_assembly


def test_a_file_that_was_not_written_as_trained_never_replaces_a_good_one(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = make_assembly(t2i_checkpoint)
    assert assembly.lora is not None
    good, checked = _publish_lora(tmp_path, assembly, {})
    assert (good, checked) == (tmp_path / LORA_FILE, len(load_file(good)))
    before, save = good.read_bytes(), assembly.lora.save

    def flawed(folder: Path, *, weights: Any = None, note: Mapping[str, str]) -> Path:
        path = save(folder, weights=weights, note=note)
        tensors = load_file(path)
        name = next(iter(tensors))
        save_file({**tensors, name: tensors[name] + 1}, path, metadata=read_header(path)[METADATA])
        return path

    monkeypatch.setattr(assembly.lora, "save", flawed)
    with pytest.raises(RuntimeError, match="does not load as it was saved"):
        _publish_lora(tmp_path, assembly, {})
    assert good.read_bytes() == before
