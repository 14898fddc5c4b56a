"""The peak memory of a step of a full-size model, measured without that memory.

Fake tensors, which have shapes but no numbers, go through the real forward and backward passes; a
dispatch mode adds up the storages that are alive. Attention is replaced by what a flash kernel
allocates, because fake tensors on a CPU would take the plain products.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simpletuner.models import blocks
from simpletuner.models.kandinsky5.flex import lists_of


class Peak(TorchDispatchMode):
    """Counts the bytes of storages allocated in this context.

    Args:
        known: tensors allocated before, which do not count.

    Attributes:
        now: bytes that are alive.
        most: the largest number of bytes alive at one time.
        moments: bytes alive after every operation.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, int] = {}  # bytes by address
        self.now = 0
        self.most = 0
        self.moments: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and self.counts(tensor):
                self._count(tensor.untyped_storage())
        self.moments.append(self.now)
        return result

    def counts(self, tensor: Tensor) -> bool:
        """Whether a result of an operation counts."""
        return True

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._alive or address in self._known:
            return
        self._alive[address] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, address)

    def _freed(self, address: int) -> None:
        self.now -= self._alive.pop(address)


class Flash(torch.autograd.Function):
    """Allocates and keeps what flash attention does, `B H S D`.

    Flex attention also keeps the lists of its mask.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *lists: Tensor) -> Tensor:
        batch, heads, length, width = query.shape
        out = torch.empty((batch, length, heads, width), dtype=query.dtype).transpose(1, 2)
        ctx.save_for_backward(query, key, value, *lists, out, torch.empty((batch, heads, length)))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *lists, _, sums = ctx.saved_tensors
        scratch = (torch.empty(query.shape), torch.empty_like(sums))  # dQ is summed up in float32
        gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        del scratch
        return *gradients, *(None for _ in lists)


def attention(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    return Flash.apply(query, key, value)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, **settings: Any
) -> Tensor:
    return Flash.apply(query, key, value, *lists_of(block_mask))


@contextmanager
def fake_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context of fake tensors, in which attention allocates like a kernel."""
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(blocks, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(torch, "compile", lambda function, **settings: flex_attention)
    with FakeTensorMode():
        yield


def hollow(model: nn.Module, dtype_of: Callable[[str, nn.Parameter], torch.dtype]) -> None:
    """Give a model on the meta device parameters and buffers of fake tensors on the CPU."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=dtype_of(f"{prefix}.{name}", parameter))
                module._parameters[name] = nn.Parameter(
                    empty, requires_grad=parameter.requires_grad
                )
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        # Kandinsky's sinusoids are not a buffer.
        if isinstance(getattr(module, "freqs", None), Tensor):
            module.freqs = torch.empty(module.freqs.shape)


def peak_of_step(model: nn.Module, inputs: dict[str, Any]) -> int:
    """The peak of a forward and backward pass in bytes, besides weights and inputs."""
    known = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    with Peak(value for value in known if isinstance(value, Tensor)) as peak:
        model(**inputs)[0].float().pow(2).mean().backward()
    return peak.most
