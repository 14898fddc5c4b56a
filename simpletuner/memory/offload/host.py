"""Host memory that an image lives in: page-locked where there is a GPU, or a file mapped into memory."""

from __future__ import annotations

import logging
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from simpletuner.atomic import disk_full_named

logger = logging.getLogger(__name__)


def page_lock(flat: Tensor, owner: object) -> None:
    """Let the GPU read a buffer directly, until `owner` dies.

    The memory is locked where it is: torch's own pinned allocator rounds every size up to a power of two.
    """
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
    if error:
        logger.warning(
            "Offloaded weights could not be locked in memory (CUDA error %d; see `ulimit -l`): copies will be slower.",
            error,
        )
        return
    release = weakref.finalize(owner, runtime.cudaHostUnregister, flat.data_ptr())
    release.atexit = False  # the process gives everything back by itself


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
