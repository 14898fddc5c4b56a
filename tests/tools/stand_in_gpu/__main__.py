"""Runs a command with the stand-in: `python -m tests.tools.stand_in_gpu python -c 'import torch'`.

Called by the Python of an environment with the CUDA build of torch, such as that which
`./scripts/test --stand-in-gpu` makes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from simpletuner.errors import UserError
from tests.tools.stand_in_gpu.build import build

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def main() -> None:
    folder = Path(sys.prefix) / "stand-in-gpu"
    try:
        libraries = build(folder)
    except UserError as error:
        sys.exit(f"error: {error}")
    os.environ["LD_PRELOAD"] = " ".join(map(str, libraries))
    os.environ["STAND_IN_GPU_LIBRARY"] = str(libraries[0])
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT}"
    programs = [str(Path(sys.prefix) / "bin"), str(HERE / "bin"), os.environ["PATH"]]
    os.environ["PATH"] = os.pathsep.join(programs)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
