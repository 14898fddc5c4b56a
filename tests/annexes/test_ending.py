"""The last lines of `simpletuner start`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from simpletuner.annexes.report.sheet import SheetCell
from simpletuner.annexes.start.ending import ending_of
from simpletuner.cli.app import main
from simpletuner.reporting.metrics import METRICS_FILE
from tests.annexes.page.runs.test_table import compared, folder, measured

__all__ = ["folder"]


def command_in(lines: list[str]) -> list[str]:
    """The arguments of the command in the last lines."""
    [line] = [line for line in lines if "simpletuner convert" in line]
    return shlex.split(line.partition("simpletuner ")[2])


@pytest.mark.parametrize("held_out", [0, 4])
def test_last_lines_have_a_command_that_writes_the_best_file(folder: Path, held_out: int) -> None:
    compared(folder)
    if held_out:
        measured(folder, {100: 1.5, 200: 1.2, 300: 1.4})
        losses = {"step": 200, "losses": {"0.75": 1.1, "1": 1.2}}
        (folder / "sweep/losses.json").write_text(json.dumps(losses))

    lines = list(ending_of(folder, held_out))
    assert main(command_in(lines)) == 0

    best = "step200-strength0.75" if held_out else "step300"
    assert (folder / f"{folder.name}-{best}-comfyui.safetensors").is_file()
    assert any("checkpoint-200 at strength 0.75" in line for line in lines) == bool(held_out)


def test_best_step_without_a_checkpoint_is_the_result(folder: Path) -> None:
    cells = [SheetCell(step, "cat", "a cat", f"{step}.png", 8, 8) for step in (100, 300)]
    (folder / "sweep").mkdir()
    (folder / "sweep/sheet.json").write_text(json.dumps([asdict(cell) for cell in cells]))
    with (folder / METRICS_FILE).open("a") as record:
        for step, loss in ((100, 1.5), (300, 1.2)):
            record.write(json.dumps({"step": step, "loss/val/held": loss}) + "\n")

    lines = list(ending_of(folder, 4))

    assert command_in(lines) == ["convert", str(folder), "--to", "comfyui"]
    assert any("the result, of step 300, at strength 1" in line for line in lines)
