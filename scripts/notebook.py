"""Run the demo notebook and store its outputs, so that a code host shows pictures.

    python scripts/notebook.py

Needed after a change to its code, which takes a few minutes on a CPU. The cells run in this
process, in an empty folder. A small stand-in for IPython collects what they print and display; the
value of a last line is not shown.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "demo.ipynb"
CODE_HASH = "stored_outputs_of"  # key in the notebook's metadata
LARGEST_PICTURE = 60_000  # bytes
LARGEST_NOTEBOOK = 500_000
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/\w[\w.-]*/\S*")

Cell = dict[str, Any]
Output = dict[str, Any]


def code_cells(notebook: dict[str, Any]) -> list[Cell]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def code_hash(notebook: dict[str, Any]) -> str:
    """Changes with the code of any cell: later cells show what earlier ones computed."""
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


class CellOutputs(io.TextIOBase):
    """What a cell prints and displays, in order, in the format of a notebook."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []

    def write(self, text: str) -> int:
        if not self.outputs or self.outputs[-1]["output_type"] != "stream":
            self.outputs.append({"output_type": "stream", "name": "stdout", "text": ""})
        self.outputs[-1]["text"] += text
        return len(text)

    def display(self, picture: Image.Image) -> None:
        """Store a picture without the texts that its file may hold."""
        buffer = io.BytesIO()
        picture.convert("RGB").save(buffer, "PNG", optimize=True)
        data = {
            "image/png": base64.b64encode(buffer.getvalue()).decode(),
            "text/plain": [f"<picture of {picture.width}x{picture.height}>"],
        }
        self.outputs.append({"output_type": "display_data", "data": data, "metadata": {}})

    def stored(self) -> list[Output]:
        """The outputs, with text as lists of lines."""
        for output in self.outputs:
            if output["output_type"] == "stream":
                output["text"] = output["text"].splitlines(keepends=True)
        return self.outputs


def display(picture: Image.Image) -> None:
    """Stands in for IPython's: cells import it once, so it finds the cell that runs."""
    sys.stdout.display(picture)


@contextlib.contextmanager
def stand_in_for_ipython() -> Iterator[None]:
    """Within it, `from IPython.display import display` works, whether IPython is there or not."""
    names = ("IPython", "IPython.display")
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})
    sys.modules["IPython.display"].display = display
    try:
        yield
    finally:
        for name, earlier in before.items():
            sys.modules.pop(name)
            if earlier is not None:
                sys.modules[name] = earlier


def run_cells(cells: list[Cell]) -> None:
    """Run the cells as one session in the current folder, and store their outputs in them."""
    session: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells, start=1):
        outputs = CellOutputs()
        code = compile("".join(cell["source"]), f"cell {cell['id']}", "exec")
        with contextlib.redirect_stdout(outputs):
            exec(code, session)
        cell["outputs"] = outputs.stored()
        cell["execution_count"] = number


def run_notebook(notebook: dict[str, Any]) -> None:
    """Run the notebook in an empty folder and store its outputs."""
    cells = code_cells(notebook)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), stand_in_for_ipython():
        run_cells(cells)
    notebook["metadata"][CODE_HASH] = code_hash(notebook)


def printed(cell: Cell) -> str:
    """The text that a cell has printed."""
    streams = [output for output in cell["outputs"] if output["output_type"] == "stream"]
    return "".join(line for stream in streams for line in stream["text"])


def pictures(cell: Cell) -> list[bytes]:
    """The PNG files that a cell has displayed."""
    shown = [output for output in cell["outputs"] if output["output_type"] == "display_data"]
    return [base64.b64decode(output["data"]["image/png"]) for output in shown]


def faults(notebook: dict[str, Any]) -> list[str]:
    """Why the notebook should not be published as it is; empty if it can be."""
    found = []
    if notebook["metadata"].get(CODE_HASH) != code_hash(notebook):
        found.append("the code has changed since its outputs were stored")
    length = len(json.dumps(notebook))
    if length > LARGEST_NOTEBOOK:
        found.append(f"it has {length:,} bytes")
    for cell in code_cells(notebook):
        if not cell["outputs"]:
            found.append(f"cell {cell['id']} shows nothing")
        sizes = [len(picture) for picture in pictures(cell)]
        if max(sizes, default=0) > LARGEST_PICTURE:
            found.append(f"cell {cell['id']} shows a picture of {max(sizes):,} bytes")
        paths = ABSOLUTE_PATH.findall(printed(cell))
        found.extend(f"cell {cell['id']} prints the path {path}" for path in paths)
    return found


def main() -> int:
    """Store the outputs; 1 if they should not be published."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    run_notebook(notebook)
    found = faults(notebook)
    for fault in found:
        print(f"{NOTEBOOK.name}: {fault}", file=sys.stderr)
    if found:
        return 1
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
