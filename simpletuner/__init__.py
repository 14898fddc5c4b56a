"""Fine-tunes Kandinsky 5 Image, Kandinsky 5 Video and Sana Video.

For programs and notebooks: `simpletuner.train`, `simpletuner.plan` and `simpletuner.sample`
(docs/PYTHON.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simpletuner.api import plan as plan
    from simpletuner.api import sample as sample
    from simpletuner.api import train as train


def __getattr__(name: str) -> Any:
    """The functions of `simpletuner.api`, imported lazily, since the commands do not need them."""
    if name in ("plan", "train", "sample"):
        return getattr(import_module("simpletuner.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
