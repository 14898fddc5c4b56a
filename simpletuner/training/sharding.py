"""FSDP2: each process keeps a shard of every weight, and gathers a block's weights for its forward
and backward pass.

Uses torch's `fully_shard`. A forward pass is then collective: all processes must run the same
passes. Sharded trained weights are `DTensor`s, as are their gradients and optimizer states; only
this module uses that class. A LoRA is small, so every process keeps it whole, and DDP averages its
gradients as usual.

In checkpoints, `state.pt` has a placeholder on `meta` for every sharded tensor of a run's state
(optimizer moments, moving average). The values are in a folder next to it, in the format of
torch.distributed.checkpoint, where every process writes its shards. They can be loaded with any
number of processes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, zeros
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from simpletuner.config.launch import LaunchConfig
from simpletuner.distributed.world import World

SHARDS_FOLDER = "shards"


def shard(
    transformer: nn.Module,
    blocks: Sequence[nn.Module],
    config: LaunchConfig,
    device: torch.device,
    world: World,
    *,
    keep_trained: bool,
) -> None:
    """Shard the weights of a transformer across the processes, and move it to the device.

    Args:
        transformer: on the CPU; no module may be added or replaced afterwards.
        keep_trained: keep trained parameters whole in every process, as for an adapter.
    """
    reshard = config.fsdp_reshard_after_forward
    kept = {weight for weight in transformer.parameters() if weight.requires_grad and keep_trained}
    mesh = init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module .* returned a view"
    )  # it is never modified in place
    for module in _units(transformer, blocks, kept):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, ignored_params=kept)
    # diffusers writes the class name into config.json; undo the prefix that `fully_shard` adds.
    type(transformer).__name__ = type(transformer).__name__.removeprefix("FSDP")
    for parameter in transformer.parameters():
        if not isinstance(parameter, DTensor):
            # `fully_shard` has moved all other parameters.
            parameter.data = parameter.data.to(device)
    if not reshard:
        transformer.register_forward_hook(_reshard_after_sampling)


def _units(
    transformer: nn.Module, blocks: Sequence[nn.Module], kept: Collection[nn.Parameter]
) -> Iterator[nn.Module]:
    """The modules whose weights are gathered together, innermost first: the blocks, then the
    transformer.

    The gradients of a unit are reduced in one tensor, so layers that train in another dtype than
    most of their block (Kandinsky's modulation) are separate units.
    """
    inside = {module for block in blocks for module in block.modules()}
    rest = [module for module in transformer.modules() if module not in inside]
    for modules in [*(list(block.modules()) for block in blocks), rest]:
        yield from _of_another_dtype(modules, kept)
        yield modules[0]


def _of_another_dtype(
    modules: Sequence[nn.Module], kept: Collection[nn.Parameter]
) -> list[nn.Module]:
    """The modules with trained parameters of another dtype than the most frequent one."""
    owned = {
        module: [
            parameter
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad and parameter not in kept
        ]
        for module in modules
    }
    sizes: Counter[torch.dtype] = Counter()
    for parameter in (parameter for parameters in owned.values() for parameter in parameters):
        sizes[parameter.dtype] += parameter.numel()
    usual = [dtype for dtype, _ in sizes.most_common(1)]
    return [
        module
        for module, parameters in owned.items()
        if any(parameter.dtype not in usual for parameter in parameters)
    ]


def _reshard_after_sampling(transformer: nn.Module, inputs: Any, output: Any) -> None:
    """Free weights gathered by a pass without gradients: no backward pass frees them, and updates
    make them stale.
    """
    if not torch.is_grad_enabled():
        for module in transformer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is sharded."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, sharing its memory; an unsharded tensor is returned as
    is.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local shard of every tensor; a zero for an empty shard, since an empty tensor has no
    maximum.
    """
    return [part if part.numel() else part.new_zeros(1) for part in map(local, tensors)]


def from_all(values: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """All-gather: the values `N` of every process that holds a shard of these tensors,
    concatenated. Collective.
    """
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh is None:
        return values
    # NCCL needs GPU memory, and the moving average may be on the CPU.
    values = values.to(mesh.device_type)
    received = [torch.empty_like(values) for _ in range(mesh.size())]
    dist.all_gather(received, values, group=mesh.get_group())
    return torch.cat(received)


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """A `DTensor` from a local shard, distributed like another tensor."""
    if not isinstance(tensor, DTensor):
        return part
    meta = TensorMeta(tensor.shape, tensor.stride(), part.dtype)
    # Not `from_local`, which would move a shard on the CPU to the mesh's device.
    return DTensor(
        part, DTensorSpec(tensor.device_mesh, tensor.placements, meta), requires_grad=False
    )


def as_sharded(full: Tensor, tensor: Tensor) -> Tensor:
    """Shard a tensor that every process holds in full, like another tensor; without
    communication.
    """
    if not isinstance(tensor, DTensor) or isinstance(full, DTensor):
        return full
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)


def room_for(tensor: Tensor, other: Tensor) -> Tensor:
    """Zeros in the shape and dtype of `tensor`, distributed like `other` if that is sharded, else
    on the CPU.
    """
    if not isinstance(other, DTensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return zeros(
        tensor.shape, dtype=tensor.dtype, device_mesh=other.device_mesh, placements=other.placements
    )


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on the CPU. Collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    part: Any = like(local(tensor.detach()).to(tensor.device_mesh.device_type), tensor)
    full: Tensor = part.full_tensor()
    return full.cpu()


def without_shards(state: Any, folder: Path | None, sharers: World) -> Any:
    """A state that one process can save. Collective with several processes.

    Args:
        folder: where every process writes its shards, which leaves placeholders in the state; None
            gathers sharded tensors on the CPU of the main process.
    """
    if sharers.size == 1:
        return state
    if folder is None:
        return replaced(state, partial(_whole, keep=sharers.is_main))
    shards: dict[str, Tensor] = {}
    rest = replaced(state, partial(_set_aside, shards))
    # On one machine, the main process flushes all files.
    save(
        shards,
        storage_writer=FileSystemWriter(
            folder / SHARDS_FOLDER, sync_files=not sharers.is_on_one_machine
        ),
    )
    return rest


def load_shards(state: Any, folder: Path, parameters: Iterable[nn.Parameter]) -> Any:
    """A state from `state.pt` with its placeholders loaded, distributed like the parameters.
    Collective.
    """
    shards: dict[str, Tensor] = {}
    parameter = next(iter(parameters))
    whole = replaced(state, partial(_make_room, shards, parameter))
    if shards:
        # torch warns about loading in one process.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # Without sharding, every process reads all values itself.
            load(shards, checkpoint_id=folder / SHARDS_FOLDER, no_dist=not is_shard(parameter))
    return whole


def shard_moments(state: dict[str, Any], parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
    """An optimizer state in which every tensor with the shape of its parameter is distributed like
    the parameter.
    """
    moments = dict(state["state"])
    for number, parameter in enumerate(parameters):
        if number in moments:
            kept = moments[number].items()
            moments[number] = {
                k: as_sharded(v, parameter) if _is_like(v, parameter) else v for k, v in kept
            }
    return {**state, "state": moments}


def _is_like(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _whole(path: str, tensor: Tensor, *, keep: bool) -> Tensor:
    if not is_shard(tensor):
        return tensor
    full = gathered(tensor)
    return full if keep else full.new_empty(0)


def _set_aside(shards: dict[str, Tensor], path: str, tensor: Tensor) -> Tensor:
    if not is_shard(tensor):
        return tensor
    shards[path] = tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _make_room(
    shards: dict[str, Tensor], parameter: nn.Parameter, path: str, tensor: Tensor
) -> Tensor:
    if tensor.is_meta:
        shards[path] = room_for(tensor, parameter)
    return shards.get(path, tensor)


def replaced(state: Any, replace: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """A copy of a nested state in which every tensor is replaced by `replace(path, tensor)`."""
    if isinstance(state, dict):
        return {key: replaced(value, replace, f"{path}/{key}") for key, value in state.items()}
    if isinstance(state, list):
        return [replaced(value, replace, f"{path}/{number}") for number, value in enumerate(state)]
    return replace(path, state) if isinstance(state, Tensor) else state
