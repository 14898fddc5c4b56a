"""What the tests of datasets share: the settings of a run of pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner.config.schema import DatasetDefaults
from simpletuner.data.entries import DataContext
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE


@pytest.fixture
def context(tmp_path: Path) -> DataContext:
    return DataContext(
        defaults=DatasetDefaults(resolution=64),
        spec=KANDINSKY5_IMAGE,
        task="t2i",
        latent_root=tmp_path / "latents",
        text_root=tmp_path / "texts",
        download_root=tmp_path / "downloads",
    )
