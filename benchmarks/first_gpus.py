"""How training scales over the GPUs of a machine, in one command and under nine minutes.

    python -m benchmarks.first_gpus

Each case runs with one process and with several, every time as a group of processes of its own with
a time limit, so one that fails, hangs or runs out of memory is reported with what it found, and the
others go on. Results go to benchmarks/results/<n>x<device>.json as soon as they are there.

Weak scaling gives each process as many samples as one had, strong scaling divides the same samples
among them. What is sent is counted, not timed: the bytes that collectives are called with, relative
to the least that ring algorithms send (Patarasuk and Yuan, Journal of Parallel and Distributed
Computing 69(2), 2009).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.first_gpu import (
    MINUTES,
    RESULTS,
    SIZES,
    file_name,
    result_of,
    run_process,
    show_section,
    tell,
)
from benchmarks.timing import write_json

LIMIT = 100.0  # seconds for one case with one number of processes
WEAK = "step, batch per process constant"
STRONG = "step, global batch constant"
SHARED = "step, one sample whose tokens are shared"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--size",
        default="real",
        choices=(*SIZES, "medium"),
        help="real: Lite and Pro on short clips",
    )
    parser.add_argument(
        "--processes",
        nargs="+",
        type=int,
        metavar="N",
        help="by default 1, 2, 4, 8, as far as there are GPUs",
    )
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases; by default all")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="by default benchmarks/results/<n>x<device>.json"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything together")
    parser.add_argument("--worker", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(options)
        return
    sys.exit(run_all(options))


def run_all(options: argparse.Namespace) -> int:
    """Run all cases; returns 1 if one failed."""
    import torch

    from benchmarks.scaling import CASES
    from simpletuner.annexes.report.environment import describe_device

    device = describe_device() if options.device == "cuda" else "cpu"
    there = torch.cuda.device_count() if options.device == "cuda" else max(options.processes or [2])
    counts = options.processes or [count for count in (1, 2, 4, 8) if count <= max(there, 1)]
    if complaint := refuse(counts, there, device) or refuse_cases(options.only or (), CASES):
        print(complaint, file=sys.stderr)
        return 2
    path = options.json or RESULTS / f"{max(counts)}x{file_name(device)}.json"
    print(f"{max(counts)} x {device}, size {options.size}")
    ends = time.monotonic() + 60 * options.minutes
    results: dict[str, Any] = {}
    for count in in_order(counts):
        for case in options.only or CASES:
            group = f"{case}, {count} process{'es' if count > 1 else ''}"
            words = worker_words(case, count, max(counts), options)
            result = results[group] = result_of(
                partial(run_process, words), min(LIMIT, ends - time.monotonic())
            )
            result["lines"] += speed_ups(result, results.get(f"{case}, 1 process", result), count)
            show_section(group, result)
            write_json(path, {"title": "Scaling", "size": options.size, "groups": results}, device)
    print(f"Written to {path}")
    return 1 if any(result["state"] == "failed" for result in results.values()) else 0


def refuse(counts: Sequence[int], there: int, device: str) -> str:
    """Why these numbers of processes cannot be compared; empty if they can."""
    most = max(counts)
    if most > there:
        return (
            f"{most} processes need as many GPUs; there are {there} ({device}). Or try --device "
            "cpu --size tiny."
        )
    wrong = [str(count) for count in counts if count < 1 or most % count]
    return f"{', '.join(wrong)} does not divide {most} samples, the global batch." if wrong else ""


def refuse_cases(named: Iterable[str], known: Iterable[str]) -> str:
    """Which cases there are not; empty if there are all."""
    unknown = sorted(set(named) - set(known))
    return f"No such case: {', '.join(unknown)}; there are {'; '.join(known)}." if unknown else ""


def in_order(counts: Sequence[int]) -> list[int]:
    """One process, which the others are compared with, then the most: what is missed most when time
    runs out.
    """
    ordered = sorted(set(counts))
    return [*ordered[:1], *reversed(ordered[1:])]


def worker_words(case: str, count: int, most: int, options: argparse.Namespace) -> list[str]:
    """The command of a case: by itself, or as several processes started by torchrun.

    Args:
        most: the largest number of processes; a global batch has as many samples.
    """
    several = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        if count > 1
        else []
    )
    worker = ["-m", "benchmarks.first_gpus", "--worker", case, "--samples", str(most)]
    return [sys.executable, *several, *worker, "--device", options.device, "--size", options.size]


def speed_ups(result: dict[str, Any], alone: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Samples per second relative to one process."""
    seconds, before = (
        {line["name"]: line["value"] for line in each["lines"]} for each in (result, alone)
    )
    return [
        {
            "name": f"{name}, speed-up",
            "value": samples * before[name] / seconds[name],
            "unit": f"of {count}",
            "note": "",
        }
        for name, samples in ((WEAK, count), (STRONG, 1))
        if count > 1 and name in seconds and name in before
    ]


def run_worker(options: argparse.Namespace) -> None:
    """In each process of a group: the main one prints the lines, and the state as the last."""
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # `connect` would choose NCCL
    from benchmarks.scaling import CASES, end_with_parent, scale

    end_with_parent()
    lines = scale(CASES[options.worker], options.device, options.size, options.samples)
    if os.environ.get("RANK", "0") == "0":
        tell(lines)
    else:
        list(lines)


if __name__ == "__main__":
    main()
