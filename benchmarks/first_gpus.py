"""Measure how training scales over the GPUs of a machine, with one command under nine minutes.

    python -m benchmarks.first_gpus

Each case runs with one process and with several, every time in a new group of processes with a time
limit. One that fails, hangs or runs out of memory is reported with what it measured, and the next
group runs. Results are written to benchmarks/results/<n>x<device>.json after each group.

Weak scaling gives each process as many samples as one process had; strong scaling divides the same
samples among them. Traffic is counted, not timed: the bytes that collectives are called with,
relative to the least that ring algorithms send (Patarasuk and Yuan, Journal of Parallel and
Distributed Computing 69(2), 2009).
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
    print_lines,
    result_of,
    run_process,
    show_section,
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
    gpus = torch.cuda.device_count() if options.device == "cuda" else max(options.processes or [2])
    counts = options.processes or [count for count in (1, 2, 4, 8) if count <= max(gpus, 1)]
    problem = refuse(counts, gpus, device) or refuse_cases(options.only or (), CASES)
    if problem:
        print(problem, file=sys.stderr)
        return 2

    path = options.json or RESULTS / f"{max(counts)}x{file_name(device)}.json"
    print(f"{max(counts)} x {device}, size {options.size}")
    end_of_run = time.monotonic() + 60 * options.minutes
    results: dict[str, Any] = {}
    for count in in_order(counts):
        for case in options.only or CASES:
            group = f"{case}, {count} process{'es' if count > 1 else ''}"
            words = worker_words(case, count, max(counts), options)
            limit = min(LIMIT, end_of_run - time.monotonic())
            result = result_of(partial(run_process, words), limit)
            results[group] = result
            alone = results.get(f"{case}, 1 process", result)
            result["lines"] += speed_ups(result, alone, count)
            show_section(group, result)
            write_json(path, {"title": "Scaling", "size": options.size, "groups": results}, device)
    print(f"Written to {path}")
    has_failed = any(result["state"] == "failed" for result in results.values())
    return 1 if has_failed else 0


def refuse(counts: Sequence[int], gpus: int, device: str) -> str:
    """Why these numbers of processes cannot be compared; empty if they can."""
    most = max(counts)
    if most > gpus:
        return (
            f"{most} processes need as many GPUs; there are {gpus} ({device}). Or try --device "
            "cpu --size tiny."
        )
    wrong = [str(count) for count in counts if count < 1 or most % count]
    if wrong:
        return f"{', '.join(wrong)} does not divide {most} samples, the global batch."
    return ""


def refuse_cases(named: Iterable[str], known: Iterable[str]) -> str:
    """Which cases do not exist; empty if all do."""
    unknown = sorted(set(named) - set(known))
    if unknown:
        return f"No such case: {', '.join(unknown)}; there are {'; '.join(known)}."
    return ""


def in_order(counts: Sequence[int]) -> list[int]:
    """One process, with which the others are compared, then the most, in case time runs out."""
    fewest, *more = sorted(set(counts))
    return [fewest, *reversed(more)]


def worker_words(case: str, count: int, most: int, options: argparse.Namespace) -> list[str]:
    """The command of a case: a process, or several processes started by torchrun.

    Args:
        most: the largest number of processes; a global batch has as many samples.
    """
    torchrun = []
    if count > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    worker = ["-m", "benchmarks.first_gpus", "--worker", case, "--samples", str(most)]
    return [sys.executable, *torchrun, *worker, "--device", options.device, "--size", options.size]


def speed_ups(result: dict[str, Any], alone: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Samples per second relative to one process, as lines."""
    if count == 1:
        return []
    seconds = {line["name"]: line["value"] for line in result["lines"]}
    seconds_alone = {line["name"]: line["value"] for line in alone["lines"]}
    lines = []
    # Samples of a step relative to those of one process.
    for name, samples in ((WEAK, count), (STRONG, 1)):
        if name in seconds and name in seconds_alone:
            speed_up = samples * seconds_alone[name] / seconds[name]
            line = {"name": f"{name}, speed-up", "value": speed_up, "unit": f"of {count}"}
            lines.append({**line, "note": ""})
    return lines


def run_worker(options: argparse.Namespace) -> None:
    """Run a case in this process of a group; the main process prints the lines."""
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else `connect` would choose NCCL
    from benchmarks.scaling import CASES, end_with_parent, scale

    end_with_parent()
    lines = scale(CASES[options.worker], options.device, options.size, options.samples)
    if os.environ.get("RANK", "0") == "0":
        print_lines(lines)
    else:
        list(lines)  # the same work, without output


if __name__ == "__main__":
    main()
