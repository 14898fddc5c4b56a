"""The Python page runs as a session, with fewer steps."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.docs.languages import FENCE
from tests.docs.sessions import shortened
from tests.docs.test_docs import ROOT


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
