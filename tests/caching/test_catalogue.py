"""What a run needs in its caches."""

from __future__ import annotations

import shutil

from tests.workspace import DATASETS, Workspace


def test_a_picture_in_two_datasets_is_cached_in_both(workspace: Workspace) -> None:
    """Each dataset has a folder of its own, so equal pictures must not hide one another."""
    shutil.copytree(workspace.path("datasets/pictures"), workspace.path("datasets/again"))
    again = {**DATASETS[0], "id": "again", "instance_data_dir": "datasets/again"}
    workspace.write_datasets([DATASETS[0], again, DATASETS[1]])
    assert workspace.run("cache", "fill") == 0
    counts = [
        len(list(workspace.path(f"output/cache/vae/kandinsky5-image/{name}").rglob("*.zst")))
        for name in ("pictures", "again")
    ]
    assert counts == [8, 8]
    assert workspace.run("cache", "explain", str(workspace.path("datasets/again/p0.png"))) == 0


def test_each_dataset_decides_whether_its_entries_are_compressed(workspace: Workspace) -> None:
    workspace.write_datasets([{**DATASETS[0], "compress_cache": False}, DATASETS[1]])
    assert workspace.run("cache", "fill") == 0
    latents = [path.name for path in workspace.path("output/cache/vae").rglob("*.safetensors*")]
    assert len(latents) == 8
    assert all(name.endswith(".safetensors") for name in latents)
