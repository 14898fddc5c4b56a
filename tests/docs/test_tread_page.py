"""The numbers of docs/TREAD.md are computed, not remembered."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.tread import speed_up_table

PAGE = Path(__file__).parents[2] / "docs" / "TREAD.md"


def test_documented_tread_speed_ups_match_the_estimate() -> None:
    rows = re.findall(
        r"^\| (0\.\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [list(row) for row in rows] == speed_up_table()[1:]
