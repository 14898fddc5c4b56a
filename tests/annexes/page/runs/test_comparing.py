"""How far a comparison of checkpoints is, and how many renders it needs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from simpletuner.annexes.page.runs.chosen_file import SavedWeights
from simpletuner.annexes.page.runs.comparing import has_begun, seconds_since, wanted_cells
from simpletuner.annexes.report.sheet import CONTENT
from simpletuner.annexes.runs.run import Run
from simpletuner.planning.checkpoint_folder import SWEEP_FOLDER
from simpletuner.planning.lock import this_process

BEGAN = 5000.0  # Unix time at which the process of the comparison began


def write_at(path: Path, moment: float) -> None:
    """Write an empty file that was changed at a Unix time."""
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.utime(path, (moment, moment))


def test_renders_of_an_earlier_comparison_are_not_timed(tmp_path: Path) -> None:
    moments = {"a.png": 1000.0, "b.png": BEGAN, "c.png": BEGAN + 20}
    for name, moment in moments.items():
        write_at(tmp_path / name, moment)

    assert seconds_since(Run("run", tmp_path), {*moments}, BEGAN) == 20


@pytest.mark.parametrize(
    ("listed", "begun"),
    [
        (BEGAN - 1, False),  # by an earlier comparison
        (BEGAN, True),
    ],
)
def test_a_comparison_has_begun_when_it_has_listed_its_cells(
    tmp_path: Path, listed: float, begun: bool
) -> None:
    owner = replace(this_process(), since=BEGAN)
    write_at(tmp_path / SWEEP_FOLDER / CONTENT, listed)

    assert has_begun(Run("run", tmp_path), owner) is begun


@pytest.mark.parametrize(
    ("is_full", "untrained"),
    [
        (False, {("a cat", 0, 0.0)}),
        (True, set()),  # the sweep of a full fine-tune does not load the untrained model
    ],
)
def test_only_loras_are_compared_with_the_untrained_model(
    tmp_path: Path, is_full: bool, untrained: set[tuple[str, int, float]]
) -> None:
    saved = SavedWeights((100,), None, is_full=is_full, can_compare=True)

    wanted = wanted_cells(Run("run", tmp_path), ["a cat"], {1.0}, {100}, saved)

    assert wanted == {("a cat", 100, 1.0), *untrained}
