"""A GPU that lies: its streams lag as far behind as waits allow, and memory holds NaN as soon as it
is freed.

A program runs once on the CPU, where everything is on time, and is noted as steps of actors:
streams, and threads of the host. A step needs other actors to have come so far; the rest is left to
chance. `play` repeats the steps on other memory, in an order drawn from a seed, and compares what
each step leaves with what it left at first. It can ignore a call that orders steps, to see whether
that call is needed.

Tensors of the device are tensors of the CPU whose memory is known here: without a GPU they cannot
say otherwise.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import simpletuner

GPU = torch.device("cuda", 0)
PACKAGE = Path(simpletuner.__file__).parent
NAN_BYTE = 0xFF  # four of them are a float32 NaN, two a bfloat16 one
ATEN = torch.ops.aten


class Violation(AssertionError):
    """Memory was used too early or too late."""


@dataclass(frozen=True)
class Event:
    """That an actor has got so far.

    Attributes:
        sites: calls in the code without which nothing waits for this.
    """

    actor: Actor
    count: int
    sites: frozenset[str] = frozenset()

    def at(self, site: str) -> Event:
        return Event(self.actor, self.count, self.sites | {site})

    def synchronize(self) -> None:
        self.actor.gpu.host.add(None, self.at(self.actor.gpu.site("synchronize")))


class Timer:
    """An event that only measures time: nothing waits for it."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Timer) -> float:
        return 1.0


@dataclass(eq=False)
class Actor:
    """A stream, or a thread of the host: it takes its steps in their order."""

    gpu: LyingGpu
    steps: list[tuple[Callable[[], None] | None, tuple[Event, ...]]] = field(
        default_factory=list, repr=False
    )

    def __post_init__(self) -> None:
        self.gpu.actors.append(self)

    def add(self, act: Callable[[], None] | None, *needs: Event) -> None:
        self.steps.append((act, needs))

    def launch(self, act: Callable[[], None] | None, *needs: Event) -> None:
        """Add a step that the host orders now."""
        self.add(act, self.gpu.host.now(), *needs)

    def now(self) -> Event:
        return Event(self, len(self.steps))

    def record_event(self) -> Event:
        return self.now().at(self.gpu.site("record_event"))

    def wait_event(self, event: Event) -> None:
        self.launch(None, event.at(self.gpu.site("wait_event")))

    def wait_stream(self, other: Actor) -> None:
        self.launch(None, other.now().at(self.gpu.site("wait_stream")))

    def synchronize(self) -> None:
        self.gpu.host.add(None, self.now().at(self.gpu.site("synchronize")))


class Memory:
    """The bytes of one allocation, while steps are repeated.

    Attributes:
        home: the stream that allocated it; None for memory of the host.
        first: its bytes at the beginning; None if they mean nothing.
        last: its bytes at the end; None if it is freed before.
        is_late: until `home` gets to the allocation, it is that of somebody else.
        users: streams and threads that keep it from somebody else when it is freed, and the calls
            that say so.
    """

    def __init__(self, home: Actor | None, nbytes: int, first: Tensor | None) -> None:
        self.home = home
        self.first = first
        self.is_freed = False
        self.is_late = False
        self.bytes = torch.empty(nbytes, dtype=torch.uint8)
        self.last: Tensor | None = None
        self.users: dict[Actor, str] = {}

    def begin(self) -> None:
        self.is_freed = False
        self.bytes.fill_(NAN_BYTE) if self.first is None else self.bytes.copy_(self.first)

    def free(self) -> None:
        self.is_freed = True
        self.bytes.fill_(NAN_BYTE)

    def view(self, tensor: Tensor) -> Tensor:
        """The place of a tensor."""
        place = torch.empty(0, dtype=tensor.dtype)
        return place.set_(
            self.bytes.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


class LyingGpu(TorchDispatchMode):
    """Notes what runs on it; see `recording` and `play`.

    Attributes:
        sites: the calls that order steps: their functions, innermost first, and what is called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[Actor] = []
        self.sites: set[str] = set()
        self.main, self.stream = Actor(self), Actor(self)
        self.host = self.main
        self.streams = [self.stream]
        self._memories: list[Memory] = []
        self._storages: dict[Memory, weakref.ref[Any]] = {}  # of memory that is not freed
        self._locked: dict[int, int] = {}  # sizes, by address

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which `torch.cuda` is this GPU."""
        with pytest.MonkeyPatch.context() as patch, self:
            for name, stand_in in {
                "_lazy_init": lambda: None,
                "Stream": self._new_stream,
                "Event": lambda enable_timing: Timer(),
                "current_stream": lambda device: self.stream,
                "stream": self._on,
                "current_device": lambda: 0,
                "device": lambda device: nullcontext(),
                "synchronize": self._synchronize,
                "cudart": lambda: self,
            }.items():
                patch.setattr(torch.cuda, name, stand_in)
            patch.setattr(Tensor, "pin_memory", lambda tensor: _pinned(tensor.clone()))
            patch.setattr(Tensor, "record_stream", lambda *given: self._record_stream(*given))
            yield
            gc.collect()  # streamed models are parts of cycles
        for memory, storage in self._storages.items():
            memory.last = None if (kept := storage()) is None else _bytes(kept).clone()
        self._storages.clear()

    @contextmanager
    def in_thread(self, thread: Actor) -> Iterator[None]:
        """A context of what another thread of the host does from now on."""
        caller = self.host
        self.host = thread
        thread.add(None, caller.now())
        yield
        self.host = caller

    def play(self, seed: int, without: str | None = None) -> None:
        """Repeat the steps in an order drawn from a seed, perhaps without one of `sites`.

        Raises:
            Violation: a step finds freed memory, or leaves something else than at first.
        """
        for memory in self._memories:
            memory.free() if memory.is_late else memory.begin()
        chance = random.Random(seed)
        restlessness = chance.choice((0.003, 0.03, 0.3))
        waiting = [*self.actors]
        taken = dict.fromkeys(self.actors, 0)
        chance.shuffle(waiting)

        def is_ready(actor: Actor) -> bool:
            _, needs = actor.steps[taken[actor]]
            return all(taken[need.actor] >= need.count or without in need.sites for need in needs)

        try:
            with torch.no_grad():
                while waiting := [actor for actor in waiting if taken[actor] < len(actor.steps)]:
                    if chance.random() < restlessness:
                        chance.shuffle(waiting)
                    actor = next(filter(is_ready, waiting))
                    act, _ = actor.steps[taken[actor]]
                    taken[actor] += 1
                    if act is not None:
                        act()
            for memory in self._memories:
                if memory.last is not None and not torch.equal(memory.bytes, memory.last):
                    raise Violation("memory differs at the end")
        except (Violation, StopIteration, RuntimeError, IndexError) as error:
            raise Violation(
                f"seed {seed}{'' if without is None else f' without {without}'}: {error!r}"
            ) from error

    def site(self, call: str) -> str:
        """What calls something, in the file of the package that does."""
        frame: Any = sys._getframe(1)
        while frame is not None and PACKAGE not in Path(frame.f_code.co_filename).parents:
            frame = frame.f_back
        if frame is None:
            return call  # of a test
        names: list[str] = []
        file = frame.f_code.co_filename
        while frame.f_code.co_filename == file:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        site = f"{Path(file).name}: {' < '.join(names)}: {call}"
        self.sites.add(site)
        return site

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        target = kwargs.get("device")
        is_pinned = kwargs.pop("pin_memory", False)
        if target == GPU:
            kwargs["device"] = "cpu"
        known = [
            memory for leaf in tree_leaves((args, kwargs)) if (memory := _memory(leaf)) is not None
        ]
        on_device = target == GPU or any(memory.home for memory in known)
        if not on_device and not known:  # no stream has used it yet
            found = func(*args, **kwargs)
            return _pinned(found) if is_pinned else found
        if "empty" in func.name():
            found = func(*args, **kwargs)
            return (
                self._allocate(found, self.stream if on_device else None)
                if target in (None, GPU)
                else found
            )
        if func is ATEN._to_copy.default and target == GPU:
            room = torch.empty_like(args[0], dtype=kwargs.get("dtype"))
            self._allocate(room, self.stream)
            func = ATEN.copy_.default
            args = (room, args[0], kwargs.get("non_blocking", False))
            kwargs = {}
        return self._note(func, args, kwargs, on_device=on_device)

    def _note(self, func: Any, args: Any, kwargs: Any, *, on_device: bool) -> Any:
        """Do something, and note it as a step of the current stream or of the host."""
        copies = func is ATEN.copy_.default
        crosses = copies and self._is_on_host(args[0]) != self._is_on_host(args[1])
        stream = self.stream if on_device else None
        touched: list[Memory] = []

        def place(tensor: Tensor) -> Tensor:
            if on_device and tensor.dim() and not crosses and self._is_on_host(tensor):
                raise Violation(f"{func} uses memory of the host")
            memory = _memory(tensor)
            if memory is None or (on_device and memory.home is None and not crosses):
                memory = self._present(tensor, stream, is_source=copies and tensor is args[1])
            touched.append(memory)
            return memory.view(tensor)

        places, more = tree_map_only(Tensor, place, (args, kwargs))
        found = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        if (
            results
            and not func._schema.is_mutable
            and all(_memory(result) is not None for result in results)
        ):
            return found  # a view
        touched += (_memory(result) or self._know(result, stream) for result in results)
        outputs = [
            (touched[n - len(results)].view(result), result.clone())
            for n, result in enumerate(results)
        ]
        act = partial(_repeat, func, places, more, touched, outputs)
        if self.host is not self.main:  # another thread keeps what it works on
            for memory in touched:
                memory.users[self.host] = ""
        if stream is None:
            self.host.add(act)
            return found
        is_over = func is not ATEN._local_scalar_dense.default
        if crosses:
            stream.launch(partial(_spoil, places[0]))  # it takes time
            host = args[0] if self._is_on_host(args[0]) else args[1]
            if _notes(host).get("is_pinned"):
                touched[host is args[1]].users[stream] = ""
            is_over = args[2:] == (True,) and self._is_locked(host)
        stream.launch(act)
        if not is_over:
            self.host.add(None, stream.now())
        return found

    def _present(self, tensor: Tensor, stream: Actor | None, *, is_source: bool) -> Memory:
        """New memory with the present values of a tensor: from now on its own, or a constant.

        Pageable sources of copies and scalars of the host are read before the host goes on.
        """
        present = _bytes(tensor.untyped_storage()).clone()
        if self._is_locked(tensor) or stream is None:
            return self._know(tensor, None, present)
        if tensor.dim() and not is_source:
            return self._know(tensor, stream, present)
        self._memories.append(Memory(None, present.numel(), present))
        return self._memories[-1]

    def _know(self, tensor: Tensor, home: Actor | None, present: Tensor | None = None) -> Memory:
        """Follow the memory of a tensor from now on."""
        storage = tensor.untyped_storage()
        memory = Memory(home, storage.nbytes(), present)
        vars(storage)["memory"] = memory
        self._memories.append(memory)
        self._storages[memory] = weakref.ref(storage)
        weakref.finalize(storage, self._free, memory).atexit = False
        return memory

    def _allocate(self, tensor: Tensor, home: Actor | None) -> Tensor:
        _bytes(tensor.untyped_storage()).fill_(NAN_BYTE)
        memory = self._know(tensor, home)
        if home is not None:
            memory.is_late = True
            home.launch(memory.begin)
        return tensor

    def _free(self, memory: Memory) -> None:
        """The next owner may write to it in the order of its stream, or when those who use it are
        done.
        """
        if self._storages.pop(memory, None) is None:  # not in the context of the recording
            return
        owner = memory.home or self.host
        if memory.users:
            users = [user.now().at(site) for user, site in memory.users.items()]
            Actor(self).launch(memory.free, owner.now(), *users)
        else:
            owner.launch(memory.free)

    def _is_locked(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return "is_pinned" in _notes(tensor) or any(
            each <= address < each + n for each, n in self._locked.items()
        )

    def _is_on_host(self, tensor: Tensor) -> bool:
        memory = _memory(tensor)
        return self._is_locked(tensor) if memory is None else memory.home is None

    def _new_stream(self, device: torch.device) -> Actor:
        self.streams.append(Actor(self))
        return self.streams[-1]

    @contextmanager
    def _on(self, stream: Actor) -> Iterator[None]:
        before = self.stream
        self.stream = stream
        yield
        self.stream = before

    def _synchronize(self) -> None:
        site = self.site("synchronize")
        self.host.add(None, *(stream.now().at(site) for stream in self.streams))

    def _record_stream(self, tensor: Tensor, stream: Actor) -> None:
        memory = _memory(tensor)
        assert memory is not None
        memory.users[stream] = self.site("record_stream")

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        del self._locked[address]


def _repeat(
    func: Any,
    args: Any,
    kwargs: Any,
    touched: Sequence[Memory],
    outputs: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Do something again; `outputs` are the places of its results, and what they were at first."""
    if any(memory.is_freed for memory in touched):
        raise Violation(f"{func} uses freed memory")
    results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    for result, (place, expected) in zip(results, outputs, strict=True):
        if result.data_ptr() != place.data_ptr():
            place.copy_(result)
        if not torch.equal(place, expected):
            raise Violation(f"{func} leaves other values")


def _notes(tensor: Tensor) -> dict[str, Any]:
    """What is known of a tensor's memory, as long as that lives."""
    return vars(tensor.untyped_storage())


def _memory(tensor: Any) -> Memory | None:
    return _notes(tensor).get("memory") if isinstance(tensor, Tensor) else None


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def _pinned(tensor: Tensor) -> Tensor:
    """A tensor of torch's page-locked memory, which is used again only after the copies that use
    it.
    """
    _notes(tensor)["is_pinned"] = True
    return tensor
