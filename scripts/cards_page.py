"""Write what cards can train: a table of the docs, and examples/needs.json; `--check` compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from simpletuner.annexes.fitting.card_table import ROWS, CardRow, planned
from simpletuner.annexes.fitting.nominal import nominal_files
from simpletuner.annexes.fitting.ready import weigh
from simpletuner.annexes.guide import NEEDS_FILE
from simpletuner.budget.budget import Budget, remaining_seconds
from simpletuner.budget.device import CARDS
from simpletuner.config.device import AskedDevice
from simpletuner.config.sources import EXAMPLES, Arguments, example_names
from simpletuner.errors import Problems
from simpletuner.planning.build import plan_training
from simpletuner.planning.plans import Plan
from simpletuner.reporting.wording import duration_text

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "TROUBLESHOOTING.md"
NEEDS = EXAMPLES / NEEDS_FILE
CARDS_SHOWN = (
    "4060",
    "3060",
    "4070",
    "4060-ti",
    "4080",
    "3090",
    "4090",
    "5090",
    "a100",
    "h100",
)
MODELS_SHOWN = (
    "Kandinsky 5 Image",
    "Sana Video 480p",
    "Kandinsky 5 Video Lite",
    "Kandinsky 5 Video Pro",
)
MEMORIES = (8, 12, 16, 24)  # GB of cards that examples are tried on
USUAL_CARD = "4090"  # for which their time is given
TABLE = re.compile(r"^\| `--device` \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)


def cards_table() -> str:
    """How long 1,000 steps take: a row for each card, a column for each model."""
    rows = [row for row in ROWS if row.kind == "LoRA" and row.model in MODELS_SHOWN]
    columns = {row.model: dict(_times(row)) for row in rows}
    titles = [f"{row.model}, {row.usual_size}" for row in rows]
    lines = [
        f"| `--device` | memory | {' | '.join(titles)} |",
        "|---|---|" + "---|" * len(rows),
    ]
    for card in CARDS_SHOWN:
        times = " | ".join(column[card] for column in columns.values())
        lines.append(f"| `{card}` | {CARDS[card].gibibytes:g} GB | {times} |")
    return "\n".join(lines)


def _times(row: CardRow) -> Iterator[tuple[str, str]]:
    """The time at the usual size, by card."""
    with planned(row, row.usual_size) as plan:
        for card in CARDS_SHOWN:
            budget = weigh(plan, Problems(), AskedDevice(device=card))
            seconds = sum(remaining_seconds(budget))
            yield card, duration_text(seconds) if budget.fits else "does not fit"


def needs_of(name: str) -> dict[str, Any]:
    """The least memory with which an example fits as it is, and its time."""
    with nominal_files(Arguments(selectors={"example": name})) as (arguments, _):
        plan = plan_training(arguments)
        fitting = [size for size in MEMORIES if _weighed(plan, size).fits]
        usual = _weighed(plan)
    return {
        "gigabytes": min(fitting),
        "devices": plan.config.launch.num_processes,
        "seconds": round(sum(remaining_seconds(usual))),
        "on": USUAL_CARD,
    }


def _weighed(plan: Plan, gigabytes: float | None = None) -> Budget[Plan]:
    asked = AskedDevice(device=USUAL_CARD, device_memory=gigabytes)
    return weigh(plan, Problems(), asked)


def written() -> dict[Path, str]:
    """The files with today's numbers."""
    page = PAGE.read_text(encoding="utf-8")
    needs = {name: needs_of(name) for name in example_names() if not name.startswith("demo")}
    return {
        PAGE: TABLE.sub(lambda _: cards_table(), page),
        NEEDS: json.dumps(needs, indent=2) + "\n",
    }


def main(arguments: list[str]) -> None:
    """Write the files, or exit with 1 when `--check` finds one stale."""
    # The same on every machine: the card is elsewhere, and its host's memory is not known.
    with patch("simpletuner.budget.device.query_gpu", return_value=None):
        files = written()
    for path, text in files.items():
        is_current = path.is_file() and path.read_text(encoding="utf-8") == text
        if is_current:
            continue
        if "--check" in arguments:
            sys.exit(f"{path.relative_to(ROOT)} is stale; ./scripts/docs writes it anew.")
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
