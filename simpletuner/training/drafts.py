"""The files of a checkpoint before they are written, and copies of them in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from simpletuner.memory.offload.image import is_wrapper
from simpletuner.training.sharding import map_tensors


@dataclass(frozen=True)
class Draft:
    """A file of a checkpoint before it is written.

    Attributes:
        name: path in the checkpoint's folder.
        write: writes content to a path.
        content: nested dictionaries and lists of tensors, on any device.
    """

    name: str
    write: Callable[[Path, Any], object]
    content: Any = None

    def write_into(self, folder: Path) -> None:
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write(path, self.content)

    @classmethod
    def of_tensors(
        cls, name: str, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None
    ) -> Draft:
        """A safetensors file."""
        return cls(name, lambda path, content: save_file(content, path, header), tensors)


class CopiedDrafts:
    """Drafts whose content is copied to host memory, since training changes the originals."""

    def __init__(self, drafts: Iterable[Draft], device: torch.device) -> None:
        self._copies = [
            replace(draft, content=map_tensors(draft.content, _to_host)) for draft in drafts
        ]
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.current_stream(device).record_event()

    def wait(self) -> list[Draft]:
        """The copies once they are complete; callable from any thread."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies


def _to_host(path: str, tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda" or is_wrapper(tensor):
        return tensor.detach().to("cpu", copy=True)
    return page_locked_copy(tensor.detach())


def page_locked_copy(tensor: Tensor) -> Tensor:
    """A copy of a GPU tensor in pinned memory, complete once the current stream has executed it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
