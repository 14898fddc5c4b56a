"""The identity of a checkpoint follows its content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from simpletuner.caching.keys import checkpoint_identity


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    large = {f"layer.{n}.weight": torch.randn(64, 100, generator=generator) for n in range(6)}
    return large | {"bias": torch.randn(3, generator=generator), "empty": torch.zeros(0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vae = tmp_path / "vae"
    vae.mkdir()
    save_file(weights(), vae / "model.safetensors")
    (vae / "config.json").write_text(json.dumps({"scale": 0.5, "_diffusers_version": "0.42"}))
    (vae / "merges.txt").write_text("a b\n")
    return vae


def test_the_identity_does_not_depend_on_the_path(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)

    assert checkpoint_identity(copy) == checkpoint_identity(folder)


def test_links_as_in_a_hub_snapshot_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()

    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(path)

    assert checkpoint_identity(snapshot) == checkpoint_identity(folder)


def test_files_that_are_not_part_of_a_model_do_not_count(folder: Path) -> None:
    before = checkpoint_identity(folder)
    (folder / "README.md").write_text("about")

    (folder / "config.json").write_text(
        json.dumps({"_name_or_path": "/x", "scale": 0.5, "_diffusers_version": "0.43"})
    )

    assert checkpoint_identity(folder) == before


@pytest.mark.parametrize("name", ["layer.0.weight", "layer.5.weight", "bias"])
def test_a_change_of_any_tensor_changes_the_identity(folder: Path, name: str) -> None:
    before = checkpoint_identity(folder)
    changed = weights()
    changed[name] = changed[name] + 1e-3

    save_file(changed, folder / "model.safetensors")

    assert checkpoint_identity(folder) != before


def test_names_dtypes_configs_and_files_change_the_identity(folder: Path) -> None:
    identities = {checkpoint_identity(folder)}
    save_file(
        {f"x.{name}": tensor for name, tensor in weights().items()}, folder / "model.safetensors"
    )
    identities.add(checkpoint_identity(folder))
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights().items()},
        folder / "model.safetensors",
    )
    identities.add(checkpoint_identity(folder))
    (folder / "config.json").write_text(json.dumps({"scale": 0.6}))
    identities.add(checkpoint_identity(folder))
    (folder / "merges.txt").write_text("b a\n")
    identities.add(checkpoint_identity(folder))
    (folder / "merges.txt").rename(folder / "vocab.txt")

    identities.add(checkpoint_identity(folder))

    assert len(identities) == 6


def test_pickled_weights_count_too(folder: Path) -> None:
    (folder / "model.bin").write_bytes(bytes(100_000))
    before = checkpoint_identity(folder)

    (folder / "model.bin").write_bytes(bytes(99_999) + b"\x01")

    assert checkpoint_identity(folder) != before


def test_broken_files_still_have_an_identity(folder: Path) -> None:
    before = checkpoint_identity(folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    (folder / "config.json").write_text("{")
    assert checkpoint_identity(folder) != before
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    checkpoint_identity(folder)


def test_several_folders_make_one_identity(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")

    both = checkpoint_identity(folder, tmp_path / "tokenizer")

    assert len(both) == 64
    assert both not in (
        checkpoint_identity(folder),
        checkpoint_identity(tmp_path / "tokenizer", folder),
    )


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        checkpoint_identity(tmp_path / "missing")
