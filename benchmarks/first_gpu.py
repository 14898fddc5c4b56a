"""Everything to be learned on a new GPU, in one command of less than nine minutes, given twice.

    python -m benchmarks.first_gpu

Each section runs in a process of its own with a time limit, so one that fails, hangs or runs out of
memory is reported with what it found, and the others go on. Results go to
benchmarks/results/<device>.json as soon as they are there. The next time, sections without a result
run first, then those that failed. The variants of a section run one after the other, each with the
device for itself, so that their peaks are their own.
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
# Longer than this no command on a rented machine should last.
MINUTES = 8.9
IMPORTS = (
    10.0  # seconds that a process may take to import everything, beside the limit of its section
)
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
    if options.device == "cuda" and "CUDA" not in device:
        print(
            f"There is no CUDA device here ({device}); try --device cpu --size tiny.",
            file=sys.stderr,
        )
        return 2
    path = options.json or RESULTS / f"{file_name(device)}.json"
    unknown = set(options.only or ()) - SECTIONS.keys()
    if unknown:
        print(
            f"No such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}.",
            file=sys.stderr,
        )
        return 2
    print(f"{device}, size {options.size}", flush=True)
    ends = time.monotonic() + 60 * options.minutes * options.patience
    results = earlier_results(path, options.size)
    left: list[str] = []
    for name in options.only or to_run(SECTIONS, results):
        limit = (SECTIONS[name][1] + IMPORTS) * options.patience
        if time.monotonic() + limit > ends:  # a shorter one may fit
            left.append(name)
            continue
        results[name] = result_of(partial(run_process, section_words(name, options)), limit)
        if results[name]["state"] == "failed" and name in SUSPECTS:
            results[name]["reason"] += f". Suspect: {SUSPECTS[name]}"
        show_section(name, results[name])
        content = {"title": "First run on a device", "size": options.size, "sections": results}
        write_json(path, content, device)
    print(
        f"Written to {path}"
        + (f"; the same command runs what is left: {', '.join(left)}" if left else "")
    )
    return 1 if any(result["state"] == "failed" for result in results.values()) else 0


def earlier_results(path: Path, size: str) -> dict[str, Any]:
    """Those of sections that have run at this size, by name."""
    content = json.loads(path.read_text()) if path.exists() else {}
    return dict(content["sections"]) if content.get("size") == size else {}


def to_run(sections: Iterable[str], results: dict[str, Any]) -> list[str]:
    """Those without a result, then those that failed."""
    failed = [name for name in sections if name in results and results[name]["state"] == "failed"]
    return [*(name for name in sections if name not in results), *failed]


# Exit code, None for a process that was killed at its limit, and what it wrote to stdout and
# stderr.
Ended = tuple[int | None, str, str]


def result_of(run: Callable[[float], Ended], limit: float) -> dict[str, Any]:
    """What became of a section: its state, lines and seconds.

    Args:
        run: starts its process.
        limit: seconds that it may take.
    """
    started = time.monotonic()
    code, out, errors = run(limit)
    whole = [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    told: list[dict[str, Any]] = [json.loads(line) for line in whole]
    lines = [each for each in told if "value" in each]
    seconds = round(time.monotonic() - started, 1)
    if code is None:
        return {
            "state": "failed",
            "reason": f"took longer than {limit:.0f} s",
            "seconds": limit,
            "lines": lines,
        }
    if code:
        return {
            "state": "failed",
            "reason": cause(errors) or f"ended with {code}",
            "seconds": seconds,
            "lines": lines,
        }
    return {**told[-1], "seconds": seconds, "lines": lines}


def cause(errors: str) -> str:
    """The last line of a process, or what the one of several that failed first raised, before what
    torchrun adds.
    """
    raised = re.findall(
        r"^(?:\[rank\d+\]: )?(?:\w+\.)*(\w*(?:Error|Exception)\b.*)", errors, re.MULTILINE
    )
    several = raised and raised[-1].startswith("ChildFailedError")
    return raised[0] if several else "".join(errors.strip().splitlines()[-1:])


def run_process(words: Sequence[str], limit: float) -> Ended:
    """Run a program for at most so many seconds.

    It is killed with all that it started: compilers would hold its output open, and the device's
    memory.
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
        except BaseException:  # Ctrl-C does not reach a session of its own
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, errors


def section_words(name: str, options: argparse.Namespace) -> list[str]:
    """The command of a section. No fork of this process: diffusers asks for a GPU when it is
    imported, and CUDA does not work in forks of a process that has asked.
    """
    worker = [sys.executable, "-m", "benchmarks.first_gpu", "--section", name]
    return [*worker, "--device", options.device, "--size", options.size]


def run_section(options: argparse.Namespace) -> None:
    """In the process of a section."""
    from benchmarks.gpu_sections import SECTIONS, Machine

    function, _ = SECTIONS[options.section]
    tell(function(Machine(options.device, options.size)))


def tell(lines: Iterable[Line]) -> None:
    """Print each line as soon as it is known, and the state as the last."""
    from benchmarks.gpu_sections import SkippedError

    result = {"state": "done", "reason": ""}
    try:
        for line in lines:
            print(json.dumps(vars(line)), flush=True)
    except SkippedError as reason:
        result = {"state": "skipped", "reason": str(reason)}
    print(json.dumps(result))


def show_section(name: str, result: dict[str, Any]) -> None:
    """The section's part of the table."""
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
