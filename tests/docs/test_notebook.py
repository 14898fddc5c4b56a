"""The notebook runs, with fewer steps, and what it shows was made by the code that it shows."""

from __future__ import annotations

import copy
import io
import json
import runpy
from typing import Any

import pytest
from PIL import Image

from tests.docs.sessions import shortened
from tests.docs.test_docs import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "notebook.py"))
STORED = json.loads((ROOT / "docs" / "notebooks" / "demo.ipynb").read_text(encoding="utf-8"))


@pytest.fixture
def notebook() -> dict[str, Any]:
    return copy.deepcopy(STORED)


def widths(cell: dict[str, Any]) -> list[int]:
    """Of the displayed pictures, in pixels."""
    return [Image.open(io.BytesIO(file)).width for file in SCRIPT["pictures"](cell)]


@pytest.mark.slow
def test_notebook_trains_the_demo_and_shows_previews(notebook: dict[str, Any]) -> None:
    quick = {"max_train_steps": 2, "validation_num_inference_steps": 1}
    for cell in SCRIPT["code_cells"](notebook):
        if cell["id"] == "plan":
            cell["source"] = [shortened("".join(cell["source"]), **quick)]

    SCRIPT["run_notebook"](notebook)

    cells = {cell["id"]: cell for cell in SCRIPT["code_cells"](notebook)}
    assert SCRIPT["printed"](cells["train"]).splitlines()[:2] == [
        "previews at step 0:",
        "previews at step 2:",
    ]
    assert widths(cells["train"]) == [504, 504], "four pictures, twice"
    assert widths(cells["table"]) == [760, 760], "six, twice"
    assert widths(cells["sample"]) == [376], "three"


def test_notebook_is_stored_with_what_its_code_shows(notebook: dict[str, Any]) -> None:
    assert SCRIPT["faults"](notebook) == [], "python scripts/notebook.py runs it anew"
    assert [len(widths(cell)) for cell in SCRIPT["code_cells"](notebook)] == [1, 0, 4, 2, 1, 1]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_a_changed_cell_makes_stored_outputs_stale(notebook: dict[str, Any]) -> None:
    SCRIPT["code_cells"](notebook)[0]["source"].append("# more")

    faults = SCRIPT["faults"](notebook)

    assert faults == ["the code has changed since its outputs were stored"]


def test_a_path_of_the_machine_is_not_published(notebook: dict[str, Any]) -> None:
    plan = next(cell for cell in SCRIPT["code_cells"](notebook) if cell["id"] == "plan")
    plan["outputs"][0]["text"].append("no file /home/ann/pictures/one.png\n")

    faults = SCRIPT["faults"](notebook)

    assert faults == ["cell plan prints the path /home/ann/pictures/one.png"]
