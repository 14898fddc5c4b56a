"""Measure a new GPU with one command of less than nine minutes, given twice.

    python -m benchmarks.first_gpu

Each section runs in a separate process with a time limit. One that fails, hangs or runs out of
memory is reported with what it measured, and the next section runs. Results are written to
benchmarks/results/<device>.json after each section. The next run starts with sections without a
result, then repeats those that failed. The variants of a section run one after the other, with the
device for themselves, so that their peaks can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.timing import write_json

if TYPE_CHECKING:
    from benchmarks.gpu_sections import Line

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
# No command on a rented machine should last longer.
MINUTES = 8.9
# Seconds for the imports of a process, in addition to the limit of its section.
IMPORTS = 10.0
SIZES = ("real", "tiny")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--size", default="real", choices=SIZES, help="real: Lite and Image as people train them"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", help="these; by default all that are not done"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="by default benchmarks/results/<device>.json"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for this run")
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="FACTOR", help="multiplies every time limit"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        run_section(options)
    else:
        sys.exit(run_all(options))


def run_all(options: argparse.Namespace) -> int:
    """Run the sections one by one; returns 1 if one failed."""
    from benchmarks.gpu_sections import SECTIONS, SUSPECTS
    from simpletuner.annexes.report.environment import describe_device

    device = describe_device() if options.device == "cuda" else "cpu"
    unknown = sorted(set(options.only or ()) - SECTIONS.keys())
    problem = ""
    if options.device == "cuda" and "CUDA" not in device:
        problem = f"There is no CUDA device here ({device}); try --device cpu --size tiny."
    elif unknown:
        problem = f"No such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}."
    if problem:
        print(problem, file=sys.stderr)
        return 2

    path = options.json or RESULTS / f"{file_name(device)}.json"
    print(f"{device}, size {options.size}", flush=True)
    end_of_run = time.monotonic() + 60 * options.minutes * options.patience
    results = earlier_results(path, options.size)
    remaining: list[str] = []
    for name in options.only or sections_to_run(SECTIONS, results):
        limit = (SECTIONS[name][1] + IMPORTS) * options.patience
        if time.monotonic() + limit > end_of_run:  # a shorter section may still fit
            remaining.append(name)
            continue
        results[name] = result_of(partial(run_process, section_words(name, options)), limit)
        if results[name]["state"] == "failed" and name in SUSPECTS:
            results[name]["reason"] += f". Suspect: {SUSPECTS[name]}"
        show_section(name, results[name])
        content = {"title": "First run on a device", "size": options.size, "sections": results}
        write_json(path, content, device)

    advice = ""
    if remaining:
        advice = f"; the same command runs what is left: {', '.join(remaining)}"
    print(f"Written to {path}{advice}")
    has_failed = any(result["state"] == "failed" for result in results.values())
    return 1 if has_failed else 0


def earlier_results(path: Path, size: str) -> dict[str, Any]:
    """Results of sections that have run at this size, by name."""
    content = json.loads(path.read_text()) if path.exists() else {}
    return dict(content["sections"]) if content.get("size") == size else {}


def sections_to_run(sections: Iterable[str], results: dict[str, Any]) -> list[str]:
    """Sections without a result, then those that failed."""
    ordered = list(sections)
    new = [name for name in ordered if name not in results]
    failed = [name for name in ordered if results.get(name, {}).get("state") == "failed"]
    return new + failed


# Exit code (None for a process that was killed at its limit), stdout and stderr.
Ended = tuple[int | None, str, str]


def result_of(run: Callable[[float], Ended], limit: float) -> dict[str, Any]:
    """The result of a section: its state, lines and seconds.

    A section prints a JSON object per line: one for each measurement, and its state as the last.

    Args:
        run: starts the process of the section.
        limit: seconds until it is killed.
    """
    started = time.monotonic()
    code, out, errors = run(limit)
    seconds = round(time.monotonic() - started, 1)
    # A killed process may have written half a line.
    complete = [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    objects: list[dict[str, Any]] = [json.loads(line) for line in complete]
    lines = [measured for measured in objects if "value" in measured]
    if code == 0:
        return {**objects[-1], "seconds": seconds, "lines": lines}

    if code is None:
        reason = f"took longer than {limit:.0f} s"
        seconds = limit
    else:
        reason = cause(errors) or f"ended with {code}"
    return {"state": "failed", "reason": reason, "seconds": seconds, "lines": lines}


def cause(errors: str) -> str:
    """The error that ended a process, or the first error of several processes.

    torchrun adds an error (ChildFailedError) and a summary after those of its processes. Errors of
    CUDA have several lines, of which the first says what happened. Without an error, it is the last
    line.
    """
    raised: list[str] = re.findall(
        r"^(?:\[rank\d+\]: )?(?:\w+\.)*(\w*(?:Error|Exception)\b.*)", errors, re.MULTILINE
    )
    if raised:
        return raised[0] if raised[-1].startswith("ChildFailedError") else raised[-1]
    lines = errors.strip().splitlines()
    return lines[-1] if lines else ""


def run_process(words: Sequence[str], limit: float) -> Ended:
    """Run a program for at most so many seconds.

    It is killed with its children: compilers would keep its output open, and the device's memory.
    """
    with subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, *process.communicate()
        except BaseException:  # Ctrl-C does not reach the new session
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, errors


def section_words(name: str, options: argparse.Namespace) -> list[str]:
    """The command of a section.

    It is not a fork of this process: diffusers queries the GPU when it is imported, and CUDA does
    not work in forks of a process that has done so.
    """
    worker = [sys.executable, "-m", "benchmarks.first_gpu", "--section", name]
    return [*worker, "--device", options.device, "--size", options.size]


def run_section(options: argparse.Namespace) -> None:
    """Run a section in this process."""
    from benchmarks.gpu_sections import SECTIONS, Machine

    function, _ = SECTIONS[options.section]
    print_lines(function(Machine(options.device, options.size)))


def print_lines(lines: Iterable[Line]) -> None:
    """Print every line as soon as it is measured, and the state as the last; see `result_of`."""
    from benchmarks.gpu_sections import SkippedError

    result = {"state": "done", "reason": ""}
    try:
        for line in lines:
            print(json.dumps(vars(line)), flush=True)
    except SkippedError as reason:
        result = {"state": "skipped", "reason": str(reason)}
    print(json.dumps(result))


def show_section(name: str, result: dict[str, Any]) -> None:
    """Print the table of a section."""
    reason = f": {result['reason']}" if result["reason"] else ""
    print(f"\n{name} ({result['state']}, {result['seconds']:.0f} s){reason}", flush=True)
    for line in result["lines"]:
        print(
            f"  {line['name']:52} {line['value']:10.3f} {line['unit']:20} {line['note']}".rstrip()
        )


def file_name(device: str) -> str:
    """`NVIDIA H100 80GB HBM3, 79 GiB, CUDA 13.0` as a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", device.partition(",")[0].lower()).strip("-")


if __name__ == "__main__":
    main()
