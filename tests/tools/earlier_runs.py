"""Two short runs of the demo, written by the last commit of version 0.1.0.

Each has a step that failed. `plain` set removed keys to their defaults; `layersync` was trained
with two removed features.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from simpletuner.config.sources import EXAMPLES
from tests.tools.workspace import Workspace

RUNS = Path(__file__).parents[1] / "data" / "runs-0.1.0.zip"
PLAIN_FAILURE = "runs/plain/failures/step-5"


def unpack_earlier_runs(folder: Path) -> Workspace:
    """A folder with both runs, and the demo's model and pictures where their configs look."""
    with zipfile.ZipFile(RUNS) as archive:
        archive.extractall(folder / "runs")
    (folder / "config").mkdir()
    (folder / "config" / "examples").symlink_to(EXAMPLES)
    return Workspace(folder)
