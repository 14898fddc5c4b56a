"""Interleaved timing, one table of ratios, one JSON file. Free of torch, so that start-up can be
timed with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from simpletuner.annexes.report.environment import describe_device, describe_environment

Clock = Callable[[], float]


@dataclass(frozen=True)
class Ratio:
    """One line of the table.

    Attributes:
        name: what is compared with what.
        rounds: the ratio in each round.
        bar: the largest ratio that is good enough; None where the line is there to be read.
        note: what else to know.
    """

    name: str
    rounds: Sequence[float]
    bar: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def verdict(self) -> str:
        return "" if self.bar is None else "ok" if self.median <= self.bar else "MISSED"


def interleave(
    variants: Mapping[str, Callable[[], None]], rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Seconds of each variant in each round, after one round that does not count.

    All variants run in every round, every other round backwards, so that a machine that slows down
    slows all.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        order = list(variants) if number % 2 else list(reversed(variants))
        for name in order:
            started = clock()
            variants[name]()
            if number:
                seconds[name].append(clock() - started)
    return seconds


def compare(
    name: str,
    seconds: Mapping[str, Sequence[float]],
    a: str,
    b: str,
    bar: float | None = None,
    note: str = "",
) -> Ratio:
    """Variant `a` in units of variant `b`, round by round."""
    return Ratio(name, [x / y for x, y in zip(seconds[a], seconds[b], strict=True)], bar, note)


def arguments(
    description: str | None, sizes: Sequence[str] = (), *, rounds: int = 7
) -> argparse.ArgumentParser:
    """The flags that all scripts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rounds of every ratio here"
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    if sizes:
        parser.add_argument(
            "--size", choices=sizes, default="medium" if "medium" in sizes else sizes[0]
        )
        parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


def show(title: str, ratios: Sequence[Ratio], options: argparse.Namespace) -> None:
    """Print the table, and write the JSON file when asked to."""
    width = max(len(ratio.name) for ratio in ratios)
    print(title)
    print(f"{'':{width}}   median      min      max      bar")
    for ratio in ratios:
        bar = "" if ratio.bar is None else f"<= {ratio.bar:.3g}"
        numbers = f"{ratio.median:9.3f}{min(ratio.rounds):9.3f}{max(ratio.rounds):9.3f}{bar:>9}"
        print(f"{ratio.name:{width}}{numbers}  {ratio.verdict:6}  {ratio.note}".rstrip())
    if options.json:
        lines = [{**asdict(ratio), "median": ratio.median} for ratio in ratios]
        write_json(
            options.json,
            {"title": title, "options": flags_of(options), "ratios": lines},
            device_of(options),
        )


def write_json(path: Path, content: dict[str, Any], device: str) -> None:
    """The results, with what they were measured on."""
    measured = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe_environment(device),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({**content, "environment": measured}, indent=2) + "\n", encoding="utf-8"
    )


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the script was called with."""
    plain = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    return {name: value for name, value in plain.items() if name != "json"}


def device_of(options: argparse.Namespace) -> str:
    """The name of what it ran on; scripts without `--device` run on the CPU."""
    return describe_device() if vars(options).get("device") == "cuda" else "cpu"
