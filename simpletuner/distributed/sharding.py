"""FSDP2: each process keeps a part of every weight, and gathers a block's weights while it computes with them.

torch's `fully_shard` does the work. A forward pass is then collective: every process runs the same ones. Trained
weights that are sharded are `DTensor`s, as are their gradients and optimizer states; only this module knows the class.
A LoRA is small, so it is kept whole in every process, and DDP averages its gradients as without sharding.

In checkpoints, each sharded tensor of a run's state (moments of the optimizer, moving average) is represented in
`state.pt` by a tensor without values, on `meta`; the values are next to it in a folder of torch.distributed.checkpoint,
in which every process writes its parts. They load with any number of processes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
    """Distribute the weights of a transformer over the processes, and move it to the device.

    Args:
        transformer: on the CPU; nothing may be added to it or replaced in it afterwards.
        keep_trained: every process keeps all of each trained parameter: they are those of an adapter.
    """
    reshard = config.fsdp_reshard_after_forward
    kept = {weight for weight in transformer.parameters() if weight.requires_grad and keep_trained}
    sizes = {"replicate": config.num_machines, "shard": world.size // config.num_machines}
    sizes = sizes if config.fsdp_hybrid else {"shard": world.size}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing changes it in place
    for module in _units(transformer, blocks, kept):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, ignored_params=kept)
    # diffusers writes the name of the class into config.json, and `fully_shard` has changed it.
    type(transformer).__name__ = type(transformer).__name__.removeprefix("FSDP")
    for parameter in transformer.parameters():
        if not isinstance(parameter, DTensor):
            # `fully_shard` has moved everything else.
            parameter.data = parameter.data.to(device)
    if config.fsdp_whole_gradients:
        model: Any = transformer
        model.no_sync = partial(_without_exchange, model)  # as accelerate finds it in DDP
    if not reshard:
        transformer.register_forward_hook(_reshard_after_sampling)


@contextmanager
def _without_exchange(transformer: FSDPModule) -> Iterator[None]:
    """A context in which backward passes add up whole gradients in each process."""
    transformer.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        transformer.set_requires_gradient_sync(True)


def _units(transformer: nn.Module, blocks: Sequence[nn.Module], kept: Collection[nn.Parameter]) -> Iterator[nn.Module]:
    """The modules whose weights are gathered together, inner ones first: the blocks, then the transformer.

    The gradients of a unit are summed in one tensor, so layers that train in another dtype than most of their block
    (Kandinsky's modulation) are units of their own.
    """
    inside = {module for block in blocks for module in block.modules()}
    rest = [module for module in transformer.modules() if module not in inside]
    for modules in [*(list(block.modules()) for block in blocks), rest]:
        yield from _of_another_dtype(modules, kept)
        yield modules[0]


def _of_another_dtype(modules: Sequence[nn.Module], kept: Collection[nn.Parameter]) -> list[nn.Module]:
    """The modules that own trained parameters of another dtype than most of these modules' parameters."""
    owned = {
        module: [each for each in module.parameters(recurse=False) if each.requires_grad and each not in kept]
        for module in modules
    }
    sizes: Counter[torch.dtype] = Counter()
    for parameter in (each for parameters in owned.values() for each in parameters):
        sizes[parameter.dtype] += parameter.numel()
    usual = [dtype for dtype, _ in sizes.most_common(1)]
    return [module for module, parameters in owned.items() if any(each.dtype not in usual for each in parameters)]


def _reshard_after_sampling(transformer: nn.Module, inputs: Any, output: Any) -> None:
    """Free the weights that a pass without gradients gathered: no backward pass does, and an update outdates them."""
    if not torch.is_grad_enabled():
        for module in transformer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def is_part(tensor: Tensor) -> bool:
    """Whether this process has only a part of a tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, in the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local part of each tensor; a zero where it is empty, since an empty tensor has no largest value."""
    return [part if part.numel() else part.new_zeros(1) for part in map(local, tensors)]


def from_all(values: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """The values `N` of every process that holds a part of these tensors, one after the other; collective."""
    mesh = next((each.device_mesh for each in tensors if isinstance(each, DTensor)), None)
    if mesh is None:
        return values
    # NCCL exchanges GPU memory only, and the average may be on the CPU.
    values = values.to(mesh.device_type)
    shards = mesh.ndim - 1  # the last dimension; along others, processes hold the same parts
    found = [torch.empty_like(values) for _ in range(mesh.size(shards))]
    dist.all_gather(found, values, group=mesh.get_group(shards))
    return torch.cat(found)


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """A `DTensor` made of a local part, distributed like another tensor."""
    if not isinstance(tensor, DTensor):
        return part
    meta = TensorMeta(tensor.shape, tensor.stride(), part.dtype)
    # Not `from_local`, which would move a part on the CPU to the mesh's device.
    return DTensor(part, DTensorSpec(tensor.device_mesh, tensor.placements, meta), requires_grad=False)


def as_sharded(full: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that every process holds in full, distributed like another one; without communication."""
    if not isinstance(tensor, DTensor) or isinstance(full, DTensor):
        return full
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)


def room_for(tensor: Tensor, other: Tensor) -> Tensor:
    """Zeros in the shape and dtype of a tensor: distributed like the other one, or on the CPU."""
    if not isinstance(other, DTensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return zeros(tensor.shape, dtype=tensor.dtype, device_mesh=other.device_mesh, placements=other.placements)


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor, on the CPU; collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    part: Any = like(local(tensor.detach()).to(tensor.device_mesh.device_type), tensor)
    full: Tensor = part.full_tensor()
    return full.cpu()


def without_shards(state: Any, folder: Path | None, sharers: World) -> Any:
    """A state as one process can save it. Collective if there are several.

    Args:
        folder: where every process writes its parts of the sharded tensors, which leaves tensors without values in the
            state; None gathers them on the CPU of the main process.
    """
    if sharers.size == 1:
        return state
    if folder is None:
        return replaced(state, partial(_whole, keep=sharers.is_main))
    found: dict[str, Tensor] = {}
    rest = replaced(state, partial(_set_aside, found))
    # What this machine has written, the main process can flush.
    save(found, storage_writer=FileSystemWriter(folder / SHARDS_FOLDER, sync_files=not sharers.is_on_one_machine))
    return rest


def load_shards(state: Any, folder: Path, parameters: Iterable[nn.Parameter]) -> Any:
    """A state from `state.pt` with the values of its sharded tensors, distributed as the parameters are. Collective."""
    found: dict[str, Tensor] = {}
    parameter = next(iter(parameters))
    whole = replaced(state, partial(_make_room, found, parameter))
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
    if tensor.is_meta:
        found[path] = room_for(tensor, parameter)
    return found.get(path, tensor)


def replaced(state: Any, replace: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """A state in new dictionaries and lists, with every tensor replaced by a function of its path and itself."""
    if isinstance(state, dict):
        return {key: replaced(value, replace, f"{path}/{key}") for key, value in state.items()}
    if isinstance(state, list):
        return [replaced(value, replace, f"{path}/{number}") for number, value in enumerate(state)]
    return replace(path, state) if isinstance(state, Tensor) else state
