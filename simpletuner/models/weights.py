"""Reads the weights of a transformer module by module, so that memory never holds all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from simpletuner.models.loading import load_whole, refuse_missing, told_plainly
from simpletuner.models.source import Part


class HollowWeights:
    """The weights that a hollow transformer lacks, with the values and dtypes of `from_pretrained`.

    A weight with the dtype of the file becomes a view of the mapped file. Its pages are page cache, which the system
    drops when it needs memory, and they are unmapped with the last view.

    Args:
        transformer: from `load_transformer(dtype, hollow=True)`; parameters with values are left unchanged.
        part: location of the weights. Formats other than safetensors are loaded as a whole.

    Raises:
        UserError: the files lack a weight.
    """

    def __init__(self, transformer: nn.Module, part: Part, dtype: torch.dtype) -> None:
        self._model: Any = transformer
        self._part, self._dtype = part, dtype
        is_hollow = any(each.is_meta for each in transformer.parameters())
        self._lacking = list(transformer.state_dict()) if is_hollow else []
        self._files = part.weight_files() if is_hollow else {}
        self._whole: dict[str, Tensor] = {}
        if is_hollow and not self._files:
            self._whole = load_whole(type(transformer), part, torch_dtype=dtype, low_cpu_mem_usage=True).state_dict()
        refuse_missing(part, set(self._lacking) - self._files.keys() - self._whole.keys())

    def fill(self, modules: Sequence[nn.Module]) -> None:
        """Load the missing weights of these modules.

        Raises:
            UserError: a file cannot be read, or a weight has another shape.
        """
        everything = self._model in modules
        paths = tuple(f"{path}." for path, module in self._model.named_modules() if module in modules)
        wanted = [name for name in self._lacking if everything or name.startswith(paths)]
        self._lacking = [name for name in self._lacking if not (everything or name.startswith(paths))]
        with told_plainly(self._part):
            for name, tensor in self._read(wanted):
                self._put(name, tensor)

    def _read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, self._whole.pop(name)) for name in names if self._whole)
        # A file is mapped again for each call: one mapping would last until the last module has been read.
        for path in dict.fromkeys(self._files[name] for name in names if self._files):
            with safe_open(path, framework="pt") as file:
                yield from ((name, file.get_tensor(name)) for name in names if self._files[name] == path)

    def _put(self, name: str, tensor: Tensor) -> None:
        path, _, key = name.rpartition(".")
        module = self._model.get_submodule(path)
        before: Tensor = getattr(module, key)
        if before.shape != tensor.shape:
            raise ValueError(f"{name} is {list(tensor.shape)} in its files and {list(before.shape)} in its config.json")
        tensor = self._cast(name, tensor).contiguous()
        is_parameter = isinstance(before, nn.Parameter)
        setattr(module, key, nn.Parameter(tensor, requires_grad=before.requires_grad) if is_parameter else tensor)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor in the dtype of the model, or in float32 if the class keeps it so."""
        if not tensor.is_floating_point():
            return tensor
        kept = self._model._keep_in_fp32_modules or ()
        return tensor.to(torch.float32 if any(word in name.split(".") for word in kept) else self._dtype)
