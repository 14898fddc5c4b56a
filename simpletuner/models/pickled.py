"""Names and shapes of weights in `.bin` files of torch.save. Free of torch; executes no code from them."""

from __future__ import annotations

import pickle
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any


def pickled_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a file of torch.save; empty if it is older than torch 1.6, or holds anything else."""
    status = path.stat()
    return _shapes(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _shapes(path: Path, size: int, mtime_ns: int) -> dict[str, tuple[int, ...]]:
    """Cached by size and modification time: several parts of a plan ask for the same file."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                weights = _Shapes(file).load()
    except Exception:  # noqa: BLE001 - damaged archives and opcodes raise anything; loading reports the fault
        return {}
    return dict(weights) if isinstance(weights, dict) and all(map(_is_shape, weights.values())) else {}


class _StateDict(dict[str, Any]):
    """A dict that takes attributes, in which `state_dict()` of a module keeps its versions."""


class _Shapes(pickle.Unpickler):
    """Reads shapes instead of tensors, and refuses everything that weights do not need."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.endswith("Storage"):
            return None
        return {
            ("collections", "OrderedDict"): _StateDict,
            ("torch._utils", "_rebuild_tensor_v2"): _shape_of,
            ("torch._utils", "_rebuild_parameter"): _same,
        }[module, name]

    def persistent_load(self, pid: Any) -> None:
        """The values of a tensor, which are not read."""


def _shape_of(storage: None, offset: int, shape: tuple[int, ...], *rest: Any) -> tuple[int, ...]:
    """torch's arguments for rebuilding a tensor, reduced to the shape."""
    return shape


def _same(shape: tuple[int, ...], *rest: Any) -> tuple[int, ...]:
    """A parameter is rebuilt from a tensor."""
    return shape


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(length) is int for length in value)
