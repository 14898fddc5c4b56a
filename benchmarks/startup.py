"""How long a user waits: for help, for a dry run, and from the command to the end of step 1.

Each command is a separate process, timed in units of `python -c "import torch"` in the same round.
CPU time is compared, which other processes on the machine disturb least; the ratio of wall times is
in the note. This file does not import torch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing import Ratio, arguments, show

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "simpletuner" / "examples" / "demo" / "checkpoint" / "transformer"
FIRST_STEP = "step 1/"
UNIT = "import torch"
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes
BARS = {"help": 0.25, "step 1": 4.0, "demo to step 1": 4.0}
MAKE_FOLDER = """
import sys
from pathlib import Path
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import Workspace
folder = Path(sys.argv[1])
Workspace.create(folder / "run", make_checkpoint(folder / "checkpoint"), max_train_steps=50)
"""


@dataclass(frozen=True)
class Usage:
    """CPU and wall seconds of a process, and the peak of its memory in bytes."""

    cpu: float
    wall: float
    peak: float


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        folder: where it runs.
        until: it is killed at the first line of its output that begins so.
        fresh: folders that are deleted before it starts.
    """

    words: Sequence[str]
    folder: Path
    until: str | None = None
    fresh: Sequence[Path] = ()

    def run(self, python: str) -> Usage:
        """Run the command.

        Raises:
            RuntimeError: it failed, or ended without the line.
        """
        for path in self.fresh:
            shutil.rmtree(path, ignore_errors=True)
        started = time.perf_counter()
        process = subprocess.Popen(
            [python, *self.words],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        try:
            seen = False
            for line in process.stdout:
                if self.until is not None and line.startswith(self.until):
                    seen = True
                    break
        except BaseException:
            process.kill()
            raise
        wall = time.perf_counter() - started
        if seen:
            process.kill()
        process.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if not seen:
            wall = time.perf_counter() - started
            if self.until is not None or process.returncode:
                raise RuntimeError(f"{' '.join(self.words)} ended with {process.returncode}")
        return Usage(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * RSS_UNIT)


def environment() -> dict[str, str]:
    """One thread, this repository, and compiled modules, as an installed package has them."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def commands(folder: Path) -> dict[str, Command]:
    """The timed commands by name."""
    run = folder / "run"
    cold = (run / "output", run / "cache")
    product = ("-m", "simpletuner")
    no_previews = "validation_disable=true"
    previews = ("validation_disable=false", "validation_num_inference_steps=2")
    timed = {
        UNIT: Command(("-c", "import torch"), folder),
        "help": Command((*product, "--help"), folder),
        "dry run": Command((*product, "train", "--dry-run"), run),
        "step 1": Command((*product, "train", no_previews), run, FIRST_STEP, cold),
        "step 1, two previews before": Command(
            (*product, "train", *previews), run, FIRST_STEP, cold
        ),
        "step 1, all cached": Command((*product, "train", no_previews), run, FIRST_STEP),
    }
    if DEMO.is_dir():
        output = folder / "demo"
        words = (*product, "train", "example=demo", f"output_dir={output}")
        timed["demo to step 1"] = Command((*words, no_previews), folder, FIRST_STEP, (output,))
    return timed


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else None, rounds=5)
    parser.add_argument(
        "--python", default=sys.executable, help="of an environment with the package's dependencies"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="lines of the table to measure; by default all"
    )
    options = parser.parse_args()
    # Exit by an exception, which kills the running command.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    measured: dict[str, list[Usage]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timed = {
            title: command
            for title, command in commands(folder).items()
            if title == UNIT or not options.only or title in options.only
        }
        if any(command.folder == folder / "run" for command in timed.values()):
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run(
                [sys.executable, "-c", MAKE_FOLDER, name],
                check=True,
                env=environment,
                stderr=subprocess.DEVNULL,
            )
        for number in range(options.rounds + 1):
            for title, command in timed.items():
                usage = command.run(options.python)
                if number:  # the first round fills the page cache
                    measured.setdefault(title, []).append(usage)
    unit = measured.pop(UNIT)
    ratios = []
    for title, rounds in measured.items():
        pairs = list(zip(rounds, unit, strict=True))
        cpu_ratios = [usage.cpu / base.cpu for usage, base in pairs]
        wall_ratios = [usage.wall / base.wall for usage, base in pairs]
        note = f"wall {statistics.median(wall_ratios):.2f}"
        if title == "dry run":
            fastest = min(usage.wall for usage in rounds)
            note += f"; fastest {fastest:.2f} s (must be under 2 s)"
        ratios.append(Ratio(title, cpu_ratios, BARS.get(title), note))
    scipy = "with" if _has_scipy(options.python) else "without"
    show(f"Start-up in units of `import torch`, {scipy} scipy in the environment", ratios, options)


def _has_scipy(python: str) -> bool:
    """transformers and diffusers import scipy if it is installed; only the extra `dev` needs it."""
    if python == sys.executable:
        return importlib.util.find_spec("scipy") is not None
    code = "import importlib.util; print(importlib.util.find_spec('scipy') is not None)"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip() == "True"


if __name__ == "__main__":
    main()
