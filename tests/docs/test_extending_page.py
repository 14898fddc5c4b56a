"""The code in docs/EXTENDING.md runs as it stands, or is that of the program."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from simpletuner.reporting.events import EventStream, StepReport

PAGE = Path(__file__).parents[2] / "docs" / "EXTENDING.md"


def code_below(title: str) -> dict[str, Any]:
    """The names that the Python block below a title defines."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def test_the_subscriber_of_the_page_writes_the_loss(tmp_path: Path) -> None:
    events = EventStream()
    code_below("A subscriber of events")["subscribe"](events, tmp_path)

    events.publish(StepReport(1, 1, {"train_loss": 0.25}, 1.0))

    assert (tmp_path / "loss.prom").read_text() == "train_loss 0.25\n"


@pytest.mark.parametrize(
    ("title", "source"),
    [("A technique", "simpletuner/techniques/masked_loss.py"), ("An option", "simpletuner/config/schema.py")],
)
def test_an_example_of_the_page_is_that_of_the_program(title: str, source: str) -> None:
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)

    program = (PAGE.parents[1] / source).read_text(encoding="utf-8")

    assert block in program or indent(block, "    ") in program
