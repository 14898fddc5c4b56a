"""The sharded tensors of a run's state (moments of the optimizer, moving average) in checkpoints.

In `state.pt` each is represented by a tensor without values, on `meta`; the values are next to it in a folder of
torch.distributed.checkpoint, in which every process writes its parts. They load with any number of processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from simpletuner.distributed.sharding import as_sharded, gathered, is_part, room_for
from simpletuner.distributed.world import World

SHARDS_FOLDER = "shards"


def without_shards(state: Any, folder: Path | None, sharers: World) -> Any:
    """A state as one process can save it. Collective if there are several.

    Args:
        folder: where every process writes its parts of the sharded tensors, which leaves tensors without values in the
            state; None gathers them on the CPU of the main process.
    """
    if sharers.size == 1:
        return state
    if folder is None:
        return _replaced(state, partial(_whole, keep=sharers.is_main))
    found: dict[str, Tensor] = {}
    rest = _replaced(state, partial(_set_aside, found))
    # What this machine has written, the main process can flush.
    save(found, storage_writer=FileSystemWriter(folder / SHARDS_FOLDER, sync_files=not sharers.is_on_one_machine))
    return rest


def load_shards(state: Any, folder: Path, parameters: Iterable[nn.Parameter]) -> Any:
    """A state from `state.pt` with the values of its sharded tensors, distributed as the parameters are. Collective."""
    found: dict[str, Tensor] = {}
    parameter = next(iter(parameters))
    whole = _replaced(state, partial(_make_room, found, parameter))
    if found:
        # torch warns that it loads in one process.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # Several processes that share no weights read all of them, each for itself.
            load(found, checkpoint_id=folder / SHARDS_FOLDER, no_dist=not is_part(parameter))
    return whole


def shard_moments(state: dict[str, Any], parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
    """The state of an optimizer with whatever is as large as its parameter distributed as that is."""
    moments = dict(state["state"])
    for number, parameter in enumerate(parameters):
        if number in moments:
            kept = moments[number].items()
            moments[number] = {k: as_sharded(v, parameter) if _is_like(v, parameter) else v for k, v in kept}
    return {**state, "state": moments}


def _is_like(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _whole(path: str, tensor: Tensor, *, keep: bool) -> Tensor:
    if not is_part(tensor):
        return tensor
    full = gathered(tensor)
    return full if keep else full.new_empty(0)


def _set_aside(found: dict[str, Tensor], path: str, tensor: Tensor) -> Tensor:
    if not is_part(tensor):
        return tensor
    found[path] = tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _make_room(found: dict[str, Tensor], parameter: nn.Parameter, path: str, tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return tensor
    found[path] = room_for(tensor, parameter)
    return found[path]


def _replaced(state: Any, replace: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """A state with every tensor in its dictionaries replaced by a function of its path and itself."""
    if isinstance(state, dict):
        return {key: _replaced(value, replace, f"{path}/{key}") for key, value in state.items()}
    return replace(path, state) if isinstance(state, Tensor) else state
