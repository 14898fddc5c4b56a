"""Host memory that an image lives in: page-locked where there is a GPU, or a file mapped into memory."""

from __future__ import annotations

import logging
import mmap
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.atomic import disk_full_named

logger = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE


def whole_pages(nbytes: int) -> Tensor:
    """An empty buffer that shares no page of memory with anything else: pages can be locked once only."""
    room = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8)
    start = -room.data_ptr() % PAGE
    return torch.from_numpy(room.numpy()[start : start + nbytes])  # its storage begins here, not with the room


def page_lock(flat: Tensor, owner: object) -> None:
    """Let the GPU read a buffer of `whole_pages` directly, until `owner` dies.

    The memory is locked where it is: torch's own pinned allocator rounds every size up to a power of two.
    """
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(flat.data_ptr(), -(-flat.nbytes // PAGE) * PAGE, 0))
    if error:
        _forget_error()
        logger.warning(
            "Offloaded weights could not be locked in memory (CUDA error %d; see `ulimit -l`): copies will be slower.",
            error,
        )
        return
    release = weakref.finalize(owner, _unlock, flat.data_ptr())
    release.atexit = False  # the process gives everything back by itself


def _unlock(address: int) -> None:
    """After the last copy: the streamer may have asked for one that nobody waits for any more."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def _forget_error() -> None:
    """CUDA keeps the code of a failed call until it is asked for, and torch asks after each kernel it launches: the
    next one would be taken for the culprit. So one is launched that may fail."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


def on_disk(flat: Tensor, folder: Path) -> Tensor:
    """The same bytes as a private mapping of a file in `folder`.

    The file loses its name as soon as it is mapped, so its space is free again when the process ends, however it
    ends, and no other run can take it for its own.

    Raises:
        DiskFullError: no space left in the folder.
    """
    with disk_full_named(folder), tempfile.NamedTemporaryFile(dir=folder, prefix="simpletuner-offload-") as file:
        file.write(flat.numpy().data)
        file.flush()
        return torch.from_file(file.name, shared=False, size=flat.numel(), dtype=torch.uint8)
