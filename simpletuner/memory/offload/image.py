"""Packs the frozen tensors of a group of blocks into one flat host buffer.

The buffer is pinned for a GPU, or a memory-mapped file.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from simpletuner.atomic import writing_to
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.memory.heap import trim_heap
from simpletuner.rounding import round_up

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
PROCESSES = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
FILES = "simpletuner-offload-"
MARK = 16  # random bytes that identify a shared file
# Named files exist only briefly; an older one was left by a killed process.
STRAY_SECONDS = 3600.0


def whole_pages(nbytes: int) -> Tensor:
    """An uninitialised buffer that shares no memory page with other data.

    A page can be locked only once.
    """
    # One page more to align the start, and one to keep other data off the last page.
    memory = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    # By way of NumPy, so that the storage starts at the page; that of a slice would not.
    return torch.from_numpy(memory.numpy()[start : start + nbytes])


def page_lock(flat: Tensor, owner: object) -> None:
    """Page-lock a buffer of `whole_pages` for the GPU until `owner` is garbage-collected.

    The memory is locked in place because torch's pinned allocator rounds every size up to a power
    of two.
    """
    locked = round_up(flat.nbytes, PAGE)
    error = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), locked, 0))
    if error:
        _forget_error()
        # `ulimit -l` is not the cause: NVIDIA's driver does not count pinned pages against it.
        logger.warning(
            "Offloaded tensors could not be pinned (CUDA error %d): copies will be slower.", error
        )
        return
    release = weakref.finalize(owner, _unlock, flat.data_ptr(), torch.cuda.current_device())
    release.atexit = False  # at exit, the operating system frees the memory


def _unlock(address: int, gpu: int) -> None:
    """Unlock after all copies: the streamer may have submitted a copy that nothing waits for.

    Args:
        gpu: the GPU that locked the memory; garbage collection may run in a thread with another
            current device.
    """
    failed = suppress(torch.AcceleratorError)  # no call works on a failed device
    with failed, torch.cuda.device(gpu):
        with failed:
            torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)


def _forget_error() -> None:
    """Clear CUDA's last error with a kernel launch that may fail.

    torch checks the error after each launch and would otherwise blame the next kernel.
    """
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def on_disk(flat: Tensor, folder: Path) -> Tensor:
    """Copy a buffer to a file in `folder` and map it privately.

    The file is unlinked, so its space is freed however the process ends, and no other run can use
    it.

    Raises:
        DiskFullError: no space left in the folder.
    """
    with writing_to(folder), _unnamed_file(folder) as file:
        _write(flat, file)
        return _mapped(file, flat, shared=False)


def shared_by_machine(flat: Tensor, world: World, folder: Path | None) -> Tensor:
    """One buffer, with the content of the machine's first process, shared by all its processes.

    Every process must call this for the same buffers in the same order. If processes do not see
    each other in /proc, as in separate containers, the file has a name until all have opened it,
    before any data is written.

    Args:
        folder: a folder on disk; None for memory, which unlike /dev/shm is not limited in
            containers.

    Raises:
        UserError: the processes see neither each other nor the same folder.
        DiskFullError: no space left in the folder.
    """
    file = _open_together(world, folder, named=False)
    if file is None:
        file = _open_together(world, folder, named=True)
    if file is None:
        place = f"{SHARED_MEMORY} (docker run --ipc=host)"
        if folder:
            place = f"group_offload_to_disk_path {str(folder)!r}"
        raise UserError(
            f"The {world.local_size} processes of this machine cannot share weights: they see "
            "neither each other in /proc nor the same files. Let their containers share process "
            f"IDs (docker run --pid=host), or {place}."
        )
    with file:
        with writing_to(folder or SHARED_MEMORY):
            world.on_leader(partial(_write, flat, file))
        return _mapped(file, flat, shared=True)


def share_by_machine(modules: Sequence[nn.Module], world: World) -> None:
    """Move frozen tensors of modules to memory that a machine's processes share. Collective."""
    if world.local_size > 1:
        WeightImage(modules, lambda image, flat: shared_by_machine(flat, world, None))


def _open_together(world: World, folder: Path | None, *, named: bool) -> IO[bytes] | None:
    """A file of each machine's first process; None in all processes if any process cannot open it.

    Args:
        named: give the file a temporary name; otherwise processes open it through the first process
            in /proc.
    """
    created: list[IO[bytes]] = []  # in the first process
    with ExitStack() as removed_on_exit:

        def create() -> tuple[str, bytes]:
            with writing_to(folder or SHARED_MEMORY):
                if named:
                    file = _named_file(folder or SHARED_MEMORY)
                    path = str(file.name)
                    removed_on_exit.callback(os.unlink, path)
                else:
                    file = _unnamed_file(folder)
                    path = f"{PROCESSES}/{os.getpid()}/fd/{file.fileno()}"
                created.append(file)
                mark = secrets.token_bytes(MARK)
                file.write(mark)
                file.flush()
                return path, mark

        path, mark = world.on_leader(create)
        file = created[0] if created else _opened(path, mark)
        if all(world.gather(file is not None)):
            return file
    if file is not None:
        file.close()
    return None


def _opened(path: str, mark: bytes) -> IO[bytes] | None:
    """The file at a path if it begins with the mark.

    In another container, the path may be a different file.
    """
    with suppress(OSError):
        if Path(path).is_file():  # opening a pipe would block
            file = Path(path).open("r+b")  # noqa: SIM115 - for the caller
            if file.read(MARK) == mark:
                return file
            file.close()
    return None


def _named_file(folder: Path) -> IO[bytes]:
    """A file with a random name, accessible only to this user.

    Removes stale files of killed processes first.
    """
    for path in folder.glob(f"{FILES}*"):
        with suppress(OSError):
            status = path.stat()
            is_stale = time.time() - status.st_mtime > STRAY_SECONDS
            if is_stale and status.st_uid == os.geteuid():
                path.unlink()
    return cast(IO[bytes], tempfile.NamedTemporaryFile(dir=folder, prefix=FILES, delete=False))


def _unnamed_file(folder: Path | None) -> IO[bytes]:
    """An unlinked file on disk or in memory, freed when the last process closes it."""
    if folder is None:
        return os.fdopen(os.memfd_create(FILES.strip("-")), "w+b")
    return tempfile.TemporaryFile(dir=folder, prefix=FILES)


def _write(flat: Tensor, file: IO[bytes]) -> None:
    file.seek(0)  # overwrites the mark
    file.write(flat.numpy().data)
    file.flush()


def _mapped(file: IO[bytes], flat: Tensor, *, shared: bool) -> Tensor:
    """Map a file with the size of `flat` into memory."""
    path = f"/dev/fd/{file.fileno()}"  # macOS has no /proc
    return torch.from_file(path, shared=shared, size=flat.numel(), dtype=torch.uint8)


ALIGNMENT = 256  # bytes, as in CUDA's allocator; some kernels rely on it

# Turns a plain buffer into the stored image: pins it, or moves it to disk.
Store = Callable[["WeightImage", Tensor], Tensor]


@dataclass(frozen=True)
class Span:
    """The position of a plain tensor in the buffer.

    Attributes:
        offset: in bytes.
        stride: in elements; unchanged if the tensor is dense, so that kernels see the same layout.
    """

    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, offset: int = 0) -> Span:
        """The span of a tensor stored at `offset` bytes."""
        # That of a dense copy, which is the tensor's own unless it has gaps.
        stride = torch.empty_like(tensor, device="meta").stride()
        return cls(offset, tensor.size(), stride, tensor.dtype)

    def view(self, flat: Tensor) -> Tensor:
        """This span of a buffer as a tensor; the buffer may be longer than the image."""
        itemsize = self.dtype.itemsize
        # `view` needs a multiple of the item size.
        usable = flat.numel() // itemsize * itemsize
        numbers = flat[:usable].view(self.dtype)
        return torch.as_strided(numbers, self.size, self.stride, self.offset // itemsize)


class WeightImage:
    """The frozen parameters and buffers of some modules.

    Args:
        modules: the modules to pack; trainable parameters are not packed.
        store: turns the packed buffer into the stored buffer.

    Attributes:
        tensors: the packed tensors, in the order of the modules.
        flat: the stored image, as bytes.
    """

    def __init__(
        self, modules: Sequence[nn.Module], store: Store = lambda image, flat: flat
    ) -> None:
        # By identity, so that weights shared between layers are stored once.
        unique = {id(tensor): tensor for module in modules for tensor in frozen_tensors(module)}
        self.tensors = list(unique.values())
        self._plain = [plain for tensor in self.tensors for plain in plain_tensors(tensor)]
        self._spans: list[Span] = []
        end = 0
        for plain in self._plain:
            self._spans.append(Span.of(plain, end))
            end += round_up(plain.nbytes, ALIGNMENT)
        packed = whole_pages(end)
        for plain, span in zip(self._plain, self._spans, strict=True):
            span.view(packed).copy_(plain.detach())
        self.flat = store(self, packed)
        self._bindings: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.bind(self.flat)
        trim_heap()  # the original tensors are free now

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def holds(self, modules: Sequence[nn.Module]) -> bool:
        """Whether the image is up to date with these modules.

        It is stale if a tensor has been added, replaced or given other content since packing.
        """
        current = {id(tensor) for module in modules for tensor in frozen_tensors(module)}
        if current != {id(tensor) for tensor in self.tensors}:
            return False
        for plain, span in zip(self._plain, self._spans, strict=True):
            if Span.of(plain, span.offset) != span:
                return False
            if plain.data_ptr() != self.flat.data_ptr() + span.offset:
                return False
        return True

    def bind(self, flat: Tensor) -> None:
        """Point the tensors at a buffer with this image: on the host, or a slot on the device."""
        address = flat.data_ptr()
        if address not in self._bindings:
            self._bindings[address] = self._make_binding(flat)
        # Tensor subclasses of quantised weights would intercept the assignment.
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, content in self._bindings[address]:
                tensor.data = content

    def _make_binding(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Every tensor with its content in a buffer.

        Plain tensors come first, then wrappers, which must report the device of their content.
        """
        views = [span.view(flat) for span in self._spans]
        binding = list(zip(self._plain, views, strict=True))
        remaining = iter(views)
        for tensor in self.tensors:
            rebuilt = rebuild(tensor, remaining)  # also of plain tensors, to take their views
            if is_wrapper(tensor):
                binding.append((tensor, rebuilt))
        return binding


def frozen_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Frozen parameters, and buffers."""
    yield from (parameter for parameter in module.parameters() if not parameter.requires_grad)
    yield from module.buffers()


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor only wraps others and has no memory, like torchao's quantised tensors."""
    return bool(is_traceable_wrapper_subclass(tensor))


def plain_tensors(tensor: Any) -> list[Tensor]:
    """The plain tensors of a tensor: itself, or the tensors that it wraps."""
    if not is_wrapper(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


@contextmanager
def without_tensors(modules: Sequence[nn.Module], tensors: Set[int]) -> Iterator[None]:
    """Temporarily remove parameters and buffers, given by `id`, from their modules."""
    tables: list[dict[str, Any]] = []
    for module in modules:
        for part in module.modules():
            tables += [part._parameters, part._buffers]
    originals = [dict(table) for table in tables]
    for table, original in zip(tables, originals, strict=True):
        for name, value in original.items():
            if id(value) in tensors:
                del table[name]
    try:
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            # The others may have been replaced meanwhile, by `to`. In the original order, which is
            # that of the state dict.
            for name, value in original.items():
                if id(value) not in tensors:
                    original[name] = table[name]
            table.clear()
            table.update(original)


def rebuild(tensor: Any, contents: Iterator[Tensor]) -> Tensor:
    """A tensor of the same type with new contents."""
    if not is_wrapper(tensor):
        return next(contents)
    names, context = tensor.__tensor_flatten__()
    inner = {name: rebuild(getattr(tensor, name), contents) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
