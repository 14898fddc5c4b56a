"""Count what the packaged demo executes.

    python tests/tools/executed_lines.py TREE REPORT backward|end

With `backward`, it trains up to the first backward pass, without previews: they would be sampled
before training starts, and their calls grow with the steps of the sampler. With `end`, it trains
three steps with previews, checkpoints and the result.

A file is executed when one of its functions is called, not when it is imported. A hop is a call
from a function of one file to a function of another, both in the package, without a library
between. A generator that continues counts as called.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NoReturn

TREE = Path(sys.argv[1])
REPORT = Path(sys.argv[2])
END = sys.argv[3]
PACKAGE = f"{TREE}/simpletuner/"
FUNCTION = inspect.CO_OPTIMIZED
BACKWARD = ("torch/_tensor.py", "torch/autograd/__init__.py")
TO_BACKWARD = END == "backward"
SETTINGS = {
    "backward": ["--validation_disable=true"],
    "end": [
        "--max_train_steps=3",
        "--checkpoint_step_interval=2",
        "--validation_step_interval=2",
        "--validation_num_inference_steps=2",
    ],
}

# First lines of the called functions, by file.
executed: defaultdict[str, set[int]] = defaultdict(set)
hops = 0


def file_of_function(frame: FrameType | None) -> str | None:
    """The file of a frame that runs a function of the package, else None.

    Frames of modules and of class bodies lack the flag of functions.
    """
    if frame is None:
        return None
    code = frame.f_code
    if is_in_package(code.co_filename) and code.co_flags & FUNCTION:
        return code.co_filename
    return None


@cache
def is_in_package(file: str) -> bool:
    """Cached, since it is called at every call of any function."""
    return file.startswith(PACKAGE) and file.endswith(".py")


def watch(frame: FrameType, event: str, argument: object) -> None:
    """Count a call, and end at the first backward pass if asked to.

    It returns None, so that the lines of the function are not traced.
    """
    global hops
    file = file_of_function(frame)
    if file is not None:
        executed[file].add(frame.f_code.co_firstlineno)
        if file_of_function(frame.f_back) not in (None, file):
            hops += 1
        return

    is_backward = frame.f_code.co_name == "backward"
    if TO_BACKWARD and is_backward and frame.f_code.co_filename.endswith(BACKWARD):
        leave(0)


def leave(code: int) -> NoReturn:
    """Write the report and end the process, whatever its threads do."""
    sys.settrace(None)
    imported = [name for name in sys.modules if name.partition(".")[0] == "simpletuner"]
    report = {
        "executed": {file: sorted(lines) for file, lines in executed.items()},
        "counts": {"files imported": len(imported), "hops between files": hops},
    }
    REPORT.write_text(json.dumps(report))
    os._exit(code)


if __name__ == "__main__":
    from simpletuner.cli.app import main

    threading.settrace(watch)
    sys.settrace(watch)
    main(["train", "--example", "demo", "--torch_num_threads=1", *SETTINGS[END]])
    # A run to its backward pass does not get here.
    leave(1 if TO_BACKWARD else 0)
