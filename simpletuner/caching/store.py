"""A folder of tensors by key: atomic to write, verified to read, and never in need of an index that could tear."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from simpletuner.atomic import write_atomically
from simpletuner.caching.entry import (
    Entry,
    entry_path,
    find_entry,
    list_keys,
    pack_entry,
    read_entry,
    read_provenance,
    seal,
)


class CacheStore:
    """Entries of one cache folder.

    Reading and writing from several threads or processes at once is safe, also of the same key: an entry appears
    whole under its name, and two writers of one key write the same content. A writer that is killed leaves at most
    a temporary file that nobody reads and `inspect.leftovers` finds.

    Args:
        folder: created with the first entry.
        compress: compress entries; either kind is read.
    """

    def __init__(self, folder: Path, compress: bool = True) -> None:
        self.folder = folder
        self.compress = compress

    def has(self, key: str) -> bool:
        """Whether there is an entry, without opening it."""
        return find_entry(self.folder, key) is not None

    def keys(self) -> Iterator[str]:
        """All keys, sorted, without opening an entry."""
        return list_keys(self.folder)

    def read(self, key: str) -> dict[str, Tensor]:
        """The tensors of an entry, exactly as they were written, on the CPU.

        Raises:
            KeyError: there is none.
            DamagedEntryError: it is not what was written.
        """
        return safetensors.torch.load(self._verified(key).blob)

    def write(self, key: str, tensors: Mapping[str, Tensor], provenance: dict[str, str]) -> None:
        """Write an entry, or replace one of that key.

        Not flushed to the disk one by one: after a power cut a torn entry is found by its checksum and encoded again.

        Args:
            tensors: of any dtype and device.
            provenance: see `keys.provenance_of`.

        Raises:
            DiskFullError: nothing torn is left, and an entry that was there is kept.
        """
        own = {name: _own_copy(tensor) for name, tensor in tensors.items()}
        blob = seal(safetensors.torch.save(own), key, provenance)
        write_atomically(entry_path(self.folder, key), pack_entry(blob, compress=self.compress), durable=False)

    def provenance(self, key: str) -> dict[str, str]:
        """Where an entry came from, from its header alone.

        Raises:
            KeyError: there is none.
            DamagedEntryError: its header cannot be read.
        """
        return read_provenance(self._path(key))

    def verify(self, key: str) -> None:
        """Read an entry in full and keep nothing.

        Raises:
            KeyError: there is none.
            DamagedEntryError: it is not what was written.
        """
        self._verified(key)

    def remove(self, key: str) -> None:
        """Delete an entry, if there is one."""
        entry_path(self.folder, key).unlink(missing_ok=True)

    def _verified(self, key: str) -> Entry:
        return read_entry(self._path(key), key)

    def _path(self, key: str) -> Path:
        path = find_entry(self.folder, key)
        if path is None:
            raise KeyError(key)
        return path


def _own_copy(tensor: Tensor) -> Tensor:
    """On the CPU, in one piece, and sharing memory with nothing: what safetensors writes."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
