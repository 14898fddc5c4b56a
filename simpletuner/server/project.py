"""What a server serves: one project folder, and the folders it may look into. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from simpletuner.config.locate import DATASET_FILE


@dataclass(frozen=True)
class Project:
    """The folder in which `simpletuner server` was started.

    Attributes:
        folder: the working directory of the runs; absolute and resolved.
        roots: further folders that the page may show, `--root`; absolute and resolved.
        config: the config file that the page opens first.
    """

    folder: Path
    roots: tuple[Path, ...] = ()
    config: Path = Path("config/config.json")

    @property
    def dataset_file(self) -> Path:
        """The dataset file of a config that names none."""
        return self.config.with_name(DATASET_FILE)
