"""What a run executes: `python tests/tools/executed_lines.py TREE REPORT backward|end` trains the
packaged demo.

Up to its first backward pass without previews, which would sample before training starts: their
calls grow with the steps of the sampler. Or to its end, three steps with previews, checkpoints and
the result.

A file is executed when one of its functions is called, not when it is imported. A hop is a call of
a function of one file by a function of another, both in the package; calls that a library passes on
are none. Generators that go on count as called.
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
ROADS = {
    "backward": ["--validation_disable=true"],
    "end": [
        "--max_train_steps=3",
        "--checkpoint_step_interval=2",
        "--validation_step_interval=2",
        "--validation_num_inference_steps=2",
    ],
}

executed: defaultdict[str, set[int]] = defaultdict(
    set
)  # first lines of functions that were called, by file
hops = 0


def file_of_function(frame: FrameType | None) -> str | None:
    """The file of a function of the package; modules and classes that are being made have no locals
    of their own.
    """
    if (
        frame is None
        or not is_of_package(frame.f_code.co_filename)
        or not frame.f_code.co_flags & FUNCTION
    ):
        return None
    return frame.f_code.co_filename


@cache
def is_of_package(file: str) -> bool:
    """Asked at every call of any function."""
    return file.startswith(PACKAGE) and file.endswith(".py")


def watch(frame: FrameType, event: str, argument: object) -> None:
    """Count a call; the first backward pass may be the end. Nothing else of the function is
    traced.
    """
    global hops
    if file := file_of_function(frame):
        executed[file].add(frame.f_code.co_firstlineno)
        hops += file_of_function(frame.f_back) not in (None, file)
    elif (
        TO_BACKWARD
        and frame.f_code.co_name == "backward"
        and frame.f_code.co_filename.endswith(BACKWARD)
    ):
        leave(0)


def leave(code: int) -> NoReturn:
    """Write the report and end the process, whatever its threads do."""
    sys.settrace(None)
    imported = sum(name.partition(".")[0] == "simpletuner" for name in sys.modules)
    counts = {"files imported": imported, "hops between files": hops}
    REPORT.write_text(
        json.dumps(
            {"executed": {file: sorted(lines) for file, lines in executed.items()}}
            | {"counts": counts}
        )
    )
    os._exit(code)


if __name__ == "__main__":
    from simpletuner.cli.app import main

    threading.settrace(watch)
    sys.settrace(watch)
    main(["train", "--example", "demo", "--torch_num_threads=1", *ROADS[END]])
    leave(END == "backward")  # there was no backward pass
