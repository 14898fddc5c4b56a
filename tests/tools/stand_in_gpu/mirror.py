"""Kernels of the stand-in: every operation of torch's CUDA backend, done by the CPU's kernel.

The memory of the device is memory of the host, so the CPU's kernel works on the same bytes. Its
results are copied to memory that torch's own allocator hands out. Operations that only handle
memory, or copy it, are left to torch: their calls of the runtime are what the stand-in is for.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from tests.tools.stand_in_gpu.attention import ATTENTION
from tests.tools.stand_in_gpu.triton_kernels import mend_bfloat16

ATEN = torch.ops.aten
GPU = torch.device("cuda", 0)
# Operations of more arithmetic than this are left out: their results are zeros.
LARGEST_FLOPS = float(os.environ.get("STAND_IN_GPU_FLOPS", "4e9"))
# Their calls of the runtime are torch's own.
OF_TORCH = {
    "_efficientzerotensor",
    "_fused_sdp_choice",
    "_local_scalar_dense",
    "_pin_memory",
    "_resize_output_",
    "empty",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "record_stream",
    "resize_",
    "set_",
}
# Operations that choose kernels by device above the level that is mirrored.
COMPOSITE = ("aten::convolution", "aten::convolution_backward")
READS_SIZES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

Kernel = Callable[..., Any]
_library: torch.library.Library | None = None


def install() -> None:
    """Put the mirrors in the place of CUDA kernels; torch calls this when it is imported."""
    global _library
    if _library is not None or "STAND_IN_GPU_LIBRARY" not in os.environ:
        return
    _library = torch.library.Library("aten", "IMPL", "CUDA")
    with warnings.catch_warnings(action="ignore"):  # about kernels that have another one already
        for operation in filter(_is_kernel, _operations()):
            _library.impl(operation, Mirror(operation), "CUDA", allow_override=True)
        _library.impl(ATEN.copy_.default, _copy, "CUDA", allow_override=True)
    patch: Any = torch._TorchCompileInductorWrapper
    patch.__call__ = _trace_only
    mend_bfloat16()


def _operations() -> Iterator[OpOverload]:
    """What torch has CUDA kernels for."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for name in sorted({*names, *COMPOSITE}):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and hasattr(ATEN, packet):
            yield getattr(getattr(ATEN, packet), overload or "default")


def _is_kernel(operation: OpOverload) -> bool:
    """Whether it computes: views only share memory."""
    if operation.overloadpacket.__name__ in OF_TORCH:
        return False
    aliases = [returned.alias_info for returned in operation._schema.returns]
    return all(alias is None or alias.is_write for alias in aliases)


def _trace_only(compiler: Any, graph: Any, inputs: Any) -> Any:
    """Compiled code is traced and differentiated as by inductor, and executed without compiling."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(graph, inputs)


class Mirror:
    """An operation of the GPU, done by the CPU's kernel."""

    def __init__(self, operation: OpOverload) -> None:
        arguments = operation._schema.arguments
        self.operation = operation
        self.name = str(operation)
        self.positional = [argument.name for argument in arguments if not argument.kwarg_only]
        self.tensors = [argument.name for argument in arguments if str(argument.type) == "Tensor"]
        self.written = [argument.name for argument in arguments if _is_written(argument)]
        self.draws = torch.Tag.nondeterministic_seeded in operation.tags
        self.may_wait = "indices" in self.positional or bool(READS_SIZES & set(operation.tags))
        self.compute = ATTENTION.get(operation.overloadpacket.__name__) or _cpu_kernel(operation)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        _begin(self.name, tree_leaves(given), tree_leaves([given.get(key) for key in self.written]))
        is_left_out = _is_too_much(self.operation, args, kwargs)
        ours = tree_map(_on_meta if is_left_out else _on_cpu, given)
        with torch._C._AutoDispatchBelowAutograd():
            results = self.operation(**ours) if is_left_out else self._execute(ours)
        if self.may_wait and _waits(given):
            torch.zeros((), device=GPU).item()
        for key in self.written:
            _resize(self.name, given.get(key), ours.get(key))
        return self._returned(given, results)

    def _execute(self, ours: dict[str, Any]) -> Any:
        if self.draws:
            return _drawn(self.compute, ours)
        # A tensor that stands for a Python number arrives as that number.
        if any(isinstance(ours.get(key), int | float | complex) for key in self.tensors):
            return self.operation.overloadpacket(**ours)
        return self.compute(**ours)

    def _returned(self, given: dict[str, Any], results: Any) -> Any:
        """New tensors of the device, and the given ones that the operation wrote to."""
        returns = self.operation._schema.returns
        if not returns:
            return None
        written = {_alias(a): given[a.name] for a in self.operation._schema.arguments if _alias(a)}
        several = results if len(returns) > 1 else [results]
        placed = [
            written[_alias(returned)]
            if _alias(returned)
            else tree_map(partial(_on_gpu, self.name), result)
            for returned, result in zip(returns, several, strict=True)
        ]
        return tuple(placed) if len(returns) > 1 else placed[0]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _alias(value: Any) -> str:
    """The letter that a schema gives to an argument and to the result that is the same tensor."""
    return next(iter(value.alias_info.before_set), "") if _is_written(value) else ""


def _waits(given: dict[str, Any]) -> bool:
    """Whether the host waits for numbers, to know how large a result is."""
    if "indices" in given:
        return any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in tree_leaves(given["indices"])
        )
    return given.get("output_size") is None


def _cpu_kernel(operation: OpOverload) -> Kernel:
    """The operation on a CPU, which lacks some that can be put together from others."""
    keys = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    if any(
        operation.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, key)) for key in keys
    ):
        return operation

    def decomposed(**given: Any) -> Any:
        from torch._decomp import decomposition_table  # takes a second

        return decomposition_table[operation](**given)

    return decomposed


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy that needs a kernel is done here, any other one by torch."""
    is_inside = target.is_cuda and source.is_cuda
    is_plain = (
        target.dtype == source.dtype
        and target.shape == source.shape
        and target.stride() == source.stride()
        and torch._prims_common.is_non_overlapping_and_dense_or_false(target)
    )
    if is_inside and not is_plain:
        _begin("copy_", [target, source], [target])
        _on_cpu(target).copy_(_on_cpu(source))
        return target
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return ATEN.copy_.default.redispatch(keys, target, source, non_blocking)


# ---- memory ----


def _on_cpu(value: Any) -> Any:
    """The same memory as a tensor of the CPU, and what else names the device."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    nbytes = _span(value)
    if not nbytes:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    memory = (ctypes.c_char * nbytes).from_address(value.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    view = torch.empty(0, dtype=value.dtype)
    return view.set_(flat.untyped_storage(), 0, value.size(), value.stride())


def _resize(name: str, given: Any, ours: Any) -> None:
    """Give a tensor for results the size that the CPU's kernel has given its copy."""
    if not isinstance(given, Tensor) or given.shape == ours.shape:
        return
    given.resize_(ours.shape)
    _begin(name, [given], [given])
    _on_cpu(given).copy_(ours)


def _span(tensor: Tensor) -> int:
    """Bytes from the first number to the last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _on_gpu(name: str, result: Any) -> Any:
    """A copy of a result in new memory of the device."""
    if not isinstance(result, Tensor) or result.layout != torch.strided:
        return result
    placed = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=GPU)
    _begin(name, [placed], [placed])
    if result.device.type == "cpu":
        _on_cpu(placed).copy_(result)
    else:  # it was left out
        _on_cpu(placed).zero_()
    return placed


# ---- the device ----

_runtime: Any = None


def _begin(name: str, tensors: Sequence[Any], written: Sequence[Any]) -> None:
    """Tell the device which memory a kernel of the current stream reads and writes."""
    global _runtime
    if _runtime is None:
        _runtime = ctypes.CDLL(os.environ["STAND_IN_GPU_LIBRARY"])
        _runtime.cudaGetErrorString.restype = ctypes.c_char_p
    used = [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda]
    count = len(used)
    writes = {id(tensor) for tensor in written}
    error = _runtime.stand_in_kernel(
        ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(0)),
        name.encode(),
        count,
        (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor in used)),
        (ctypes.c_size_t * count)(*map(_span, used)),
        (ctypes.c_bool * count)(*(id(tensor) in writes for tensor in used)),
    )
    if error:
        raise torch.AcceleratorError(f"CUDA error: {_runtime.cudaGetErrorString(error).decode()}")


# ---- what is too much for a CPU ----


def _is_too_much(operation: OpOverload, args: Any, kwargs: Any) -> bool:
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(operation.overloadpacket)
    if count is None:
        return False
    on_meta, more = tree_map(_on_meta, (args, kwargs))
    outputs = operation(*on_meta, **more)
    return float(count(*args, **kwargs, out_val=outputs)) > LARGEST_FLOPS


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


# ---- random numbers ----


def _drawn(compute: Kernel, given: dict[str, Any]) -> Any:
    """Results of the CPU's generator, which follow from the state of the GPU's.

    They are other numbers than a GPU draws, with the same rules: the state that is saved and set
    repeats them, and every draw moves it on.
    """
    chosen = given.get("generator")
    generator = chosen or torch.cuda.default_generators[0]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    seed = (generator.initial_seed() * 1_000_003 + offset) % 2**63
    if "generator" in given:
        return compute(**{**given, "generator": torch.Generator().manual_seed(seed)})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return compute(**given)
