"""FSDP2: each process keeps a shard of every weight, and gathers a block's weights to compute it.

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
    kept: set[nn.Parameter] = set()
    if keep_trained:
        kept = {weight for weight in transformer.parameters() if weight.requires_grad}
    mesh = init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
    # Such a view is never modified in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
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
    """The modules whose weights are gathered together: the blocks, then the rest of the model.

    The gradients of a unit are reduced in one tensor, so layers that train in another dtype than
    most of their block (Kandinsky's modulation) are separate units. They come before the module
    that contains them, since `fully_shard` leaves out what is sharded already.
    """
    in_blocks: set[nn.Module] = set()
    for block in blocks:
        modules = list(block.modules())
        in_blocks.update(modules)
        yield from _with_another_dtype(modules, kept)
        yield block
    rest = [module for module in transformer.modules() if module not in in_blocks]
    yield from _with_another_dtype(rest, kept)
    yield transformer


def _with_another_dtype(
    modules: Sequence[nn.Module], kept: Collection[nn.Parameter]
) -> list[nn.Module]:
    """The modules with trained parameters of another dtype than the most frequent one."""
    dtypes: dict[nn.Module, set[torch.dtype]] = {}
    sizes: Counter[torch.dtype] = Counter()
    for module in modules:
        dtypes[module] = set()
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter not in kept:
                dtypes[module].add(parameter.dtype)
                sizes[parameter.dtype] += parameter.numel()
    usual = {dtype for dtype, _ in sizes.most_common(1)}
    return [module for module in modules if dtypes[module] - usual]


def _reshard_after_sampling(transformer: nn.Module, inputs: Any, output: Any) -> None:
    """Free the weights gathered by a pass without gradients.

    No backward pass frees them, and they would be stale after the next update.
    """
    if torch.is_grad_enabled():
        return
    for module in transformer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is sharded."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, sharing its memory; an unsharded tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local shard of every tensor; a zero for an empty one, which would have no maximum."""
    shards = []
    for tensor in tensors:
        shard = local(tensor)
        if not shard.numel():
            shard = shard.new_zeros(1)
        shards.append(shard)
    return shards


def gather_values(values: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """The values `N` of all processes that hold shards of these tensors, concatenated.

    Collective if a tensor is sharded; otherwise the values as they are.
    """
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    if not meshes:
        return values
    mesh = meshes[0]
    # NCCL needs GPU memory, and the moving average may be on the CPU.
    values = values.to(mesh.device_type)
    received = [torch.empty_like(values) for _ in range(mesh.size())]
    dist.all_gather(received, values, group=mesh.get_group())
    return torch.cat(received)


def shard_like(shard: Tensor, tensor: Tensor) -> Tensor:
    """A `DTensor` from a local shard, distributed like another tensor."""
    if not isinstance(tensor, DTensor):
        return shard
    meta = TensorMeta(tensor.shape, tensor.stride(), shard.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, meta)
    # Not `from_local`, which would move a shard on the CPU to the mesh's device.
    return DTensor(shard, spec, requires_grad=False)


def as_sharded(full: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that every process holds in full, sharded like another, without communication."""
    if not isinstance(tensor, DTensor) or isinstance(full, DTensor):
        return full
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)


def zeros_to_load(placeholder: Tensor, parameter: Tensor) -> Tensor:
    """Zeros in the shape and dtype of a placeholder, distributed like the parameter.

    On the CPU if the parameter is not sharded.
    """
    shape = placeholder.shape
    dtype = placeholder.dtype
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype)
    return zeros(
        shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements
    )


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on the CPU. Collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    on_device = local(tensor.detach()).to(tensor.device_mesh.device_type)
    sharded: Any = shard_like(on_device, tensor)
    full: Tensor = sharded.full_tensor()
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
        return map_tensors(state, partial(_gathered_in_main, is_main=sharers.is_main))
    shards: dict[str, Tensor] = {}
    without = map_tensors(state, partial(_take_shard, shards))
    # On one machine, the main process flushes all files.
    writer = FileSystemWriter(folder / SHARDS_FOLDER, sync_files=not sharers.is_on_one_machine)
    save(shards, storage_writer=writer)
    return without


def load_shards(state: Any, folder: Path, parameters: Iterable[nn.Parameter]) -> Any:
    """A state from `state.pt` with its placeholders loaded. Collective.

    The loaded tensors are distributed like the parameters.
    """
    shards: dict[str, Tensor] = {}
    parameter = next(iter(parameters))
    # `load` reads into tensors in place, so the state has the values after it.
    complete = map_tensors(state, partial(_replace_placeholder, shards, parameter))
    if shards:
        # torch warns about loading in one process.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            # Without sharding, every process reads all values itself.
            load(shards, checkpoint_id=folder / SHARDS_FOLDER, no_dist=not is_shard(parameter))
    return complete


def shard_moments(state: dict[str, Any], parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
    """An optimizer state whose moments are distributed like their parameters.

    A moment is a tensor with the shape of its parameter; all else, such as step counts, is small.
    """
    by_number = dict(state["state"])
    for number, parameter in enumerate(parameters):
        if number not in by_number:
            continue
        moments = dict(by_number[number])
        for name, value in moments.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[name] = as_sharded(value, parameter)
        by_number[number] = moments
    return {**state, "state": by_number}


def _gathered_in_main(path: str, tensor: Tensor, *, is_main: bool) -> Tensor:
    """The whole tensor in the main process, and an empty one in all others."""
    if not is_shard(tensor):
        return tensor
    full = gathered(tensor)
    return full if is_main else full.new_empty(0)


def _take_shard(shards: dict[str, Tensor], path: str, tensor: Tensor) -> Tensor:
    """Move a sharded tensor to `shards`; returns its placeholder."""
    if not is_shard(tensor):
        return tensor
    shards[path] = tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _replace_placeholder(
    shards: dict[str, Tensor], parameter: nn.Parameter, path: str, tensor: Tensor
) -> Tensor:
    """Add a tensor to `shards` that will be loaded in the place of a placeholder."""
    if not tensor.is_meta:
        return tensor
    shards[path] = zeros_to_load(tensor, parameter)
    return shards[path]


def map_tensors(state: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """A copy of a nested state in which every tensor is replaced by `change(path, tensor)`."""
    if isinstance(state, dict):
        return {key: map_tensors(value, change, f"{path}/{key}") for key, value in state.items()}
    if isinstance(state, list):
        return [map_tensors(value, change, f"{path}/{index}") for index, value in enumerate(state)]
    return change(path, state) if isinstance(state, Tensor) else state
