"""A folder of tensors by key: written atomically, verified on reading, without an index that could be corrupted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from simpletuner.atomic import write_atomically
from simpletuner.caching.entry import entry_path, find_entry, list_keys, pack_entry, read_entry, read_provenance, seal


class CacheStore:
    """Entries of one cache folder.

    Several threads or processes may read and write at once, even the same key: an entry appears complete under its
    name, and all writers of a key write the same content. A killed writer leaves at most a temporary file, which is
    never read and which `inspect.find_garbage` finds.

    Args:
        folder: created with the first entry.
        compress: whether to compress new entries; both kinds can be read.
    """

    def __init__(self, folder: Path, compress: bool = True) -> None:
        self.folder = folder
        self.compress = compress

    def has(self, key: str) -> bool:
        """Whether an entry exists, without opening it."""
        return find_entry(self.folder, key) is not None

    def keys(self) -> Iterator[str]:
        """All keys, sorted, without opening an entry."""
        return list_keys(self.folder)

    def read(self, key: str) -> dict[str, Tensor]:
        """The tensors of an entry, exactly as written, on the CPU.

        Raises:
            KeyError: there is no such entry.
            DamagedEntryError: it is not what was written.
        """
        return safetensors.torch.load(read_entry(self._path(key), key).blob)

    def write(self, key: str, tensors: Mapping[str, Tensor], provenance: dict[str, str]) -> None:
        """Write an entry, or replace the one of that key.

        Entries are not fsynced: one that a power cut has torn fails its checksum and is encoded again.

        Args:
            tensors: of any dtype and device.
            provenance: see `keys.provenance_of`.

        Raises:
            DiskFullError: no partial entry is left, and an existing one is kept.
        """
        own = {name: _own_copy(tensor) for name, tensor in tensors.items()}
        blob = seal(safetensors.torch.save(own), key, provenance)
        write_atomically(entry_path(self.folder, key), pack_entry(blob, compress=self.compress), durable=False)

    def provenance(self, key: str) -> dict[str, str]:
        """The provenance of an entry, from its header alone.

        Raises:
            KeyError: there is no such entry.
            DamagedEntryError: its header cannot be read.
        """
        return read_provenance(self._path(key))

    def verify(self, key: str) -> None:
        """Read an entry in full without keeping it.

        Raises:
            KeyError: there is no such entry.
            DamagedEntryError: it is not what was written.
        """
        read_entry(self._path(key), key)

    def remove(self, key: str) -> None:
        """Delete an entry if it exists."""
        entry_path(self.folder, key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        path = find_entry(self.folder, key)
        if path is None:
            raise KeyError(key)
        return path


def _own_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU: safetensors refuses tensors that share memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
