"""The Python page and the notebook run as sessions, with fewer steps."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from simpletuner.annexes.figures import still
from tests.docs.languages import FENCE
from tests.docs.test_docs import ROOT

NOTEBOOK = json.loads((ROOT / "docs" / "notebooks" / "demo.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def shortened(text: str, **counts: int) -> str:
    """The text with other values of keys, each of which occurs once."""
    for key, count in counts.items():
        text, replacements = re.subn(rf'(\b{key}"?[:=] ?)\d+', rf"\g<1>{count}", text)
        assert replacements == 1, key
    return text


@pytest.mark.slow
def test_python_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "PYTHON.md").read_text(encoding="utf-8")
    session = "\n".join(text for kind, text in FENCE.findall(page) if kind == "python")

    with contextlib.chdir(tmp_path):
        exec(compile(shortened(session, max_train_steps=2, steps=2), "PYTHON.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()

    assert lines[0].endswith("True")
    assert [line.split()[0] for line in lines[1:5]] == ["learning_rte", "max_train_steps", "1", "2"]
    assert lines[5].startswith("output/python/pytorch_lora_weights.safetensors 2 ")
    assert len(lines) == 7
    assert list((tmp_path / "samples").glob("*.png"))


@pytest.mark.slow
def test_notebook_trains_the_demo_and_shows_previews(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    displayed: list[Any] = []
    # A notebook brings IPython with it; the package does not need it.
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["IPython.display"]).update(
        display=displayed.append, Image=lambda filename: Path(filename).absolute()
    )
    text = "\n".join("".join(cell["source"]) for cell in CODE)

    with contextlib.chdir(tmp_path):
        text = shortened(text, max_train_steps=2, validation_num_inference_steps=1)
        exec(compile(text, "demo.ipynb", "exec"), {})

    assert [still(path).size for path in displayed] == [(96, 96)] * 4, (
        "before, after, and two samples"
    )
    assert "step 0: a small glimmer" in capsys.readouterr().out


def test_notebook_is_stored_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in CODE:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
