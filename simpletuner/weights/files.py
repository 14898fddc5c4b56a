"""Reads the names and shapes of weights from the headers of files, and finds damaged ones."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # of parameters, by name

INDEX_SUFFIX = ".safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")
NO_WEIGHTS = "it contains no weights"


class WeightsError(ValueError):
    """A weight file that cannot be used; the message continues the file's name."""


def tensor_shapes(path: Path) -> dict[str, Shape]:
    """Names and shapes in a safetensors file.

    Raises:
        WeightsError: as for `weights_header`.
    """
    return {name: shape for name, (_, shape) in weights_header(path).items()}


def weights_header(path: Path) -> dict[str, tuple[str, Shape]]:
    """Dtype and shape of each tensor in a safetensors file whose data is complete.

    Raises:
        WeightsError: the file is not a safetensors file, or is truncated.
    """
    try:
        status = path.stat()
        return _header(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise WeightsError(f"cannot be read: {error.strerror}") from None


@lru_cache(maxsize=256)
def _header(path: Path, size: int, mtime_ns: int) -> dict[str, tuple[str, Shape]]:
    """The header, cached by size and modification time, since several parts of a plan read it."""
    try:
        with safe_open(path, "np") as file:
            header = {}
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                weight = file.get_slice(name)
                header[name] = (weight.get_dtype(), tuple(weight.get_shape()))
            return header
    except SafetensorError as error:
        advice = "download it again, if by git then with git lfs"
        raise WeightsError(f"is not a complete safetensors file ({error}); {advice}") from None


def first_rows_fit_bf16(path: Path, names: Sequence[str]) -> bool:
    """Whether bf16 represents the first row of these weights of a safetensors file exactly."""
    header = weights_header(path)
    dtypes = {header[name][0] for name in names}
    if dtypes <= {"BF16"}:
        return True
    if not dtypes <= {"BF16", "F32"}:
        return False
    with safe_open(path, "np") as file:
        for name in names:
            if header[name][0] == "BF16":
                continue
            row = file.get_slice(name)[:1]
            # bf16 is the upper half of a float32.
            if (row.view("uint32") & 0xFFFF).any():
                return False
    return True


def weights_fault(folder: Path) -> str | None:
    """The fault of a model folder that has a config.json; None if its weights are complete."""
    if read_object(folder / "config.json") is None:
        return "config.json cannot be read"
    files = [path for path in sorted(folder.iterdir()) if path.suffix in WEIGHT_SUFFIXES]
    if not files:
        return NO_WEIGHTS
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    faults = chain(map(_index_fault, indexes), map(_file_fault, files))
    for fault in faults:
        if fault:
            return fault
    return None


def _index_fault(index: Path) -> str | None:
    """The fault of the list of a model's files."""
    shards = (read_object(index) or {}).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        return f"{index.name} cannot be read"
    absent = sorted({shard for shard in shards.values() if not index.with_name(shard).is_file()})
    if not absent:
        return None
    return f"it lacks {', '.join(absent)}"


def _file_fault(path: Path) -> str | None:
    """The fault of a weight file visible in its header, or None."""
    try:
        if path.suffix == ".safetensors":
            tensor_shapes(path)
    except WeightsError as error:
        return f"{path.name} {error}"
    return None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if it cannot be read, or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    return content


def pickled_shapes(path: Path) -> dict[str, Shape]:
    """Names and shapes in a torch.save file, without executing its code.

    Empty for files from before torch 1.6, and for other content.
    """
    status = path.stat()
    return _pickled_shapes(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _pickled_shapes(path: Path, size: int, mtime_ns: int) -> dict[str, Shape]:
    """The shapes, cached by size and modification time, since several parts of a plan read them."""
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save writes a zip: archive/data.pkl has names and shapes, archive/data/… the
            # values.
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            with archive.open(names[0]) as file:
                weights = _Shapes(file).load()
    except Exception:  # noqa: BLE001 - damaged archives raise any error; loading reports it
        return {}
    if not isinstance(weights, dict) or not all(map(_is_shape, weights.values())):
        return {}
    return dict(weights)


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(side) is int for side in value)


class _Shapes(pickle.Unpickler):
    """Reads shapes instead of tensors, and refuses everything that weights do not need."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name in the file; a name that is not listed is an error."""
        if module == "torch" and name.endswith("Storage"):
            return None
        return {
            ("collections", "OrderedDict"): OrderedDict,
            # Rebuilds only the shape of a tensor; a parameter is rebuilt from a tensor.
            ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, shape, *rest: shape,
            ("torch._utils", "_rebuild_parameter"): lambda shape, *rest: shape,
        }[module, name]

    def persistent_load(self, pid: Any) -> None:
        """Skip the values of a tensor."""
