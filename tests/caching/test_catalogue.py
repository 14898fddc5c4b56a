"""The cache entries that a run needs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from simpletuner.caching import keys
from simpletuner.caching.catalogue import Catalogue, DatasetCaches, picture_fingerprint
from simpletuner.config.types import Size
from simpletuner.data.buckets import Geometry
from simpletuner.data.sample import Sample
from simpletuner.hashing import hash_json, hash_text
from simpletuner.weights import files
from tests.tools.catalogues import ENCODER
from tests.tools.workspace import DATASETS, Workspace


def test_a_picture_in_two_datasets_is_cached_in_both(workspace: Workspace) -> None:
    """Datasets have separate folders, so equal pictures must not hide one another."""
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


def test_the_conversions_of_a_picture_in_a_prompt_are_part_of_its_key() -> None:
    plain = Sample(
        "before", "a.png", Path(), "a" * 64, (8, 8), Geometry("1.0", Size(8, 8), Size(8, 8), (0, 0))
    )
    converted = replace(plain, conversions=("converted to sRGB",))

    fingerprint = hash_json(
        {"content": "a" * 64, "size": (8, 8), "resized": (8, 8), "crop": (0, 0)}
    )

    assert picture_fingerprint(plain) == fingerprint, "older entries stay valid"
    assert picture_fingerprint(converted) != fingerprint


def make_catalogue(tmp_path: Path, **caches: Any) -> Catalogue:
    """The catalogue of one dataset, `pictures`, whose captions lose their blanks."""
    latents = tmp_path / "latents"
    return Catalogue(
        {"pictures": DatasetCaches(latents, tmp_path / "texts", compress=True, **caches)},
        tmp_path / "texts",
        True,
        ENCODER,
        ENCODER,
        template="a {}",
        bare_template="{}",
        max_length=8,
        clean=str.strip,
        prompt_holds_picture=False,
    )


def test_captions_are_completed_and_prompts_are_not(tmp_path: Path) -> None:
    catalogue = make_catalogue(tmp_path, complete=lambda caption: f"{caption} in motion")

    assert catalogue.text("pictures", "a cat", None).key.caption == "a cat in motion"
    assert catalogue.text("pictures", "blurry", None, negative=True).key.caption == "blurry"
    assert catalogue.text(None, "a dog", None).key.caption == "a dog"


def test_captions_are_cached_after_cleaning(tmp_path: Path) -> None:
    catalogue = make_catalogue(tmp_path)

    padded = catalogue.text("pictures", " a cat ", None)
    blank = catalogue.text("pictures", "  ", None)

    assert padded.key == catalogue.text("pictures", "a cat", None).key
    assert padded.key.caption == "a cat"
    assert blank.bare, "a caption of blanks is the empty one"
    assert blank.key == catalogue.text("pictures", "", None).key


def test_datasets_decide_whether_their_entries_are_compressed(workspace: Workspace) -> None:
    sizes = {}
    for compress in (True, False):
        workspace.write_datasets([{**DATASETS[0], "compress_cache": compress}, DATASETS[1]])
        assert workspace.run("cache", "fill", f"output_dir=output-{compress}") == 0
        latents = list(workspace.path(f"output-{compress}/cache/vae").rglob("*.safetensors.zst"))
        assert len(latents) == 8
        sizes[compress] = sum(path.stat().st_size for path in latents)

    assert sizes[True] < sizes[False]


def test_a_start_computes_every_digest_once(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plan and filling ask for the same entries; a picture of one caption has two keys."""
    for caption in workspace.path("datasets/pictures").glob("*.txt"):
        caption.write_text(f"picture {caption.stem}")
    evaluated = {**DATASETS[0], "id": "seen", "dataset_type": "eval", "repeats": None}
    workspace.write_datasets([DATASETS[0], DATASETS[1], evaluated])

    settings = "eval_steps_interval=2", "validation_disable=true"
    assert workspace.run("cache", "fill", *settings) == 0

    hashed: list[str] = []
    headers: list[str] = []
    monkeypatch.setattr(keys, "hash_text", lambda text: hashed.append(text) or hash_text(text))
    monkeypatch.setattr(
        files, "safe_open", lambda path, kind: headers.append(str(path)) or safe_open(path, kind)
    )
    files._header.cache_clear()
    assert workspace.run("cache", "fill", *settings) == 0

    pictures = 8
    latents = 2 * pictures  # of the trained and of the evaluated folder
    captions = pictures + 1  # the empty caption too
    digests = [text for text in hashed if '"kind":' in text]
    assert len(digests) == latents + captions
    assert workspace.train(*settings) == 0
    # The plan opens the transformer once more, for the first rows of its modulation.
    headers.remove(next(path for path in headers if "/transformer/" in path))
    assert len(headers) == len(set(headers)) == 4
