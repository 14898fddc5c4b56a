from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner.config.schema import DatasetDefaults
from simpletuner.data.entries import DataContext
from simpletuner.models.kandinsky5.spec import KANDINSKY5_IMAGE


@pytest.fixture
def context(tmp_path: Path) -> DataContext:
    defaults = DatasetDefaults(resolution=64)
    return DataContext(
        defaults,
        KANDINSKY5_IMAGE,
        "t2i",
        tmp_path / "latents",
        tmp_path / "texts",
        tmp_path / "downloads",
    )
