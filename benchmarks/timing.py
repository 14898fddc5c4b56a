"""Interleaved timing, a table of ratios and a JSON file; without torch, to time start-up, too."""

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
        bar: the largest ratio that is good enough; None if any is.
        note: further numbers.
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
        if self.bar is None:
            return ""
        return "ok" if self.median <= self.bar else "MISSED"


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
    variant: str,
    unit: str,
    bar: float | None = None,
    note: str = "",
) -> Ratio:
    """The seconds of a variant in units of another's, round by round."""
    pairs = zip(seconds[variant], seconds[unit], strict=True)
    return Ratio(name, [seconds_of_variant / base for seconds_of_variant, base in pairs], bar, note)


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
    """Write results with the date, the device and the versions of packages."""
    environment = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe_environment(device),
    }
    text = json.dumps({**content, "environment": environment}, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the script, without the name of its JSON file."""
    flags = {}
    for name, value in vars(options).items():
        if name != "json":
            flags[name] = str(value) if isinstance(value, Path) else value
    return flags


def device_of(options: argparse.Namespace) -> str:
    """The name of the device; scripts without `--device` run on the CPU."""
    return describe_device() if vars(options).get("device") == "cuda" else "cpu"
