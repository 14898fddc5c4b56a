"""What a run executes before its first backward pass: `python tests/road.py TREE REPORT` trains the packaged demo.

A file is executed when one of its functions is called, not when it is imported. A hop is a call of a function of one
file by a function of another, both in the package; calls that a library passes on are none. Generators that go on count
as called. Without previews, which would sample before training starts: their calls grow with the steps of the sampler.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType

TREE, REPORT = Path(sys.argv[1]), Path(sys.argv[2])
PACKAGE = f"{TREE}/simpletuner/"
BACKWARD = ("torch/_tensor.py", "torch/autograd/__init__.py")

executed: set[str] = set()
hops = 0


def file_of_function(frame: FrameType | None) -> str | None:
    """The file of a function of the package; modules and classes that are being made have no locals of their own."""
    if frame is None or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return None
    file = frame.f_code.co_filename
    return file if file.startswith(PACKAGE) and file.endswith(".py") else None


def watch(frame: FrameType, event: str, argument: object) -> None:
    """Count a call; the first backward pass writes the report and ends the process."""
    global hops
    if event != "call":
        return
    if file := file_of_function(frame):
        executed.add(file)
        hops += file_of_function(frame.f_back) not in (None, file)
    elif frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith(BACKWARD):
        imported = sum(name.partition(".")[0] == "simpletuner" for name in sys.modules)
        counts = {"files imported": imported, "hops between files": hops}
        REPORT.write_text(json.dumps({"executed": sorted(executed), "counts": counts}))
        os._exit(0)


if __name__ == "__main__":
    from simpletuner.cli.app import main

    threading.setprofile(watch)
    sys.setprofile(watch)
    main(["train", "--example", "demo", "--validation_disable=true", "--torch_num_threads=1"])
    sys.exit(1)  # there was no backward pass
