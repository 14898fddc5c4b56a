"""A simulated GPU that finds missing waits: streams run as late as waits allow.

A program runs once on the CPU, where everything is on time, and is recorded as steps of actors:
streams, and threads of the host. A step may need other actors to have taken some of their steps;
everything else may happen in any order. `play` repeats the steps in an order drawn from a seed, on
other memory, which is filled with NaN as soon as it is freed. It compares the result of every step
with the recorded one. It can ignore a call that orders steps, to see whether that call is needed.

Tensors of the simulated GPU are CPU tensors whose memory is registered here, since without a GPU
they cannot have its device.
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
    """A step used memory too early or too late."""


@dataclass(frozen=True)
class Event:
    """A point in the steps of an actor: it has taken `count` of them.

    Attributes:
        sites: the calls in the code that make others wait for this.
    """

    actor: Actor
    count: int
    sites: frozenset[str] = frozenset()

    def at(self, site: str) -> Event:
        return Event(self.actor, self.count, self.sites | {site})

    def synchronize(self) -> None:
        self.actor.gpu.host.add(None, self.at(self.actor.gpu.site("synchronize")))


class Timer:
    """An event that only measures time; nothing waits for it."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Timer) -> float:
        return 1.0


@dataclass(eq=False)
class Actor:
    """A stream, or a thread of the host; takes its steps in order."""

    gpu: LyingGpu
    steps: list[tuple[Callable[[], None] | None, tuple[Event, ...]]] = field(
        default_factory=list, repr=False
    )

    def __post_init__(self) -> None:
        self.gpu.actors.append(self)

    def add(self, act: Callable[[], None] | None, *needs: Event) -> None:
        self.steps.append((act, needs))

    def launch(self, act: Callable[[], None] | None, *needs: Event) -> None:
        """Add a step that the host launches now."""
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
        first: its bytes at the beginning; None if they are undefined.
        last: its bytes at the end; None if it is freed before.
        is_late: it is allocated during the program, so until `home` reaches the allocation, it
            belongs to another tensor.
        users: streams and threads that must be done with it before it is used again after it was
            freed, and the calls that say so.
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
        if self.first is None:
            self.bytes.fill_(NAN_BYTE)
        else:
            self.bytes.copy_(self.first)

    def free(self) -> None:
        self.is_freed = True
        self.bytes.fill_(NAN_BYTE)

    def view(self, tensor: Tensor) -> Tensor:
        """A view of these bytes with the layout of a tensor."""
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(
            self.bytes.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


class LyingGpu(TorchDispatchMode):
    """Records what runs on it, and plays it again; see `recording` and `play`.

    Attributes:
        sites: the calls that order steps: the functions around them, innermost first, and what is
            called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[Actor] = []
        self.sites: set[str] = set()
        self.main = Actor(self)
        self.stream = Actor(self)
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
        for memory, reference in self._storages.items():
            storage = reference()
            if storage is not None:
                memory.last = _bytes(storage).clone()
        self._storages.clear()

    @contextmanager
    def in_thread(self, thread: Actor) -> Iterator[None]:
        """A context whose code runs in another thread of the host."""
        caller = self.host
        self.host = thread
        thread.add(None, caller.now())
        yield
        self.host = caller

    def play(self, seed: int, without: str | None = None) -> None:
        """Repeat the steps in an order drawn from a seed.

        Args:
            without: one of `sites`, which is ignored.

        Raises:
            Violation: a step uses freed memory, or has another result than at first.
        """
        for memory in self._memories:
            if memory.is_late:
                memory.free()
            else:
                memory.begin()
        try:
            with torch.no_grad():
                self._take_all_steps(random.Random(seed), without)
            for memory in self._memories:
                if memory.last is not None and not torch.equal(memory.bytes, memory.last):
                    raise Violation("memory differs at the end")
        except (Violation, StopIteration, RuntimeError, IndexError) as error:
            ignored = "" if without is None else f" without {without}"
            raise Violation(f"seed {seed}{ignored}: {error!r}") from error

    def _take_all_steps(self, chance: random.Random, without: str | None) -> None:
        """Let the actors take all steps; the first of them that is ready takes the next one."""
        # With a small chance, an actor runs far ahead before others are considered again.
        shuffle_chance = chance.choice((0.003, 0.03, 0.3))
        waiting = [*self.actors]
        taken = dict.fromkeys(self.actors, 0)
        chance.shuffle(waiting)

        def is_ready(actor: Actor) -> bool:
            _, needs = actor.steps[taken[actor]]
            return all(taken[need.actor] >= need.count or without in need.sites for need in needs)

        while True:
            waiting = [actor for actor in waiting if taken[actor] < len(actor.steps)]
            if not waiting:
                return
            if chance.random() < shuffle_chance:
                chance.shuffle(waiting)
            actor = next(filter(is_ready, waiting))  # StopIteration is a deadlock
            act, _ = actor.steps[taken[actor]]
            taken[actor] += 1
            if act is not None:
                act()

    def site(self, call: str) -> str:
        """The place in the package from which something is called."""
        frame: Any = sys._getframe(1)
        while frame is not None and PACKAGE not in Path(frame.f_code.co_filename).parents:
            frame = frame.f_back
        if frame is None:
            return call  # from a test
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
        memories = [_memory(leaf) for leaf in tree_leaves((args, kwargs))]
        known = [memory for memory in memories if memory is not None]
        on_device = target == GPU or any(memory.home for memory in known)
        if not on_device and not known:  # no stream has used these tensors yet
            result = func(*args, **kwargs)
            return _pinned(result) if is_pinned else result
        if "empty" in func.name():
            result = func(*args, **kwargs)
            if target in (None, GPU):
                self._allocate(result, self.stream if on_device else None)
            return result
        if func is ATEN._to_copy.default and target == GPU:
            # A copy into new memory.
            copied = torch.empty_like(args[0], dtype=kwargs.get("dtype"))
            self._allocate(copied, self.stream)
            func = ATEN.copy_.default
            args = (copied, args[0], kwargs.get("non_blocking", False))
            kwargs = {}
        return self._note(func, args, kwargs, on_device=on_device)

    def _note(self, func: Any, args: Any, kwargs: Any, *, on_device: bool) -> Any:
        """Execute an operation, and record it as a step of the current stream or of the host."""
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
        returned = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        has_new_memory = any(_memory(result) is None for result in results)
        if results and not func._schema.is_mutable and not has_new_memory:
            return returned  # a view
        outputs = []
        for result in results:
            memory = _memory(result) or self._know(result, stream)
            touched.append(memory)
            outputs.append((memory.view(result), result.clone()))
        act = partial(_repeat, func, places, more, touched, outputs)
        if self.host is not self.main:  # another thread keeps what it works on
            for memory in touched:
                memory.users[self.host] = ""
        if stream is None:
            self.host.add(act)
            return returned
        is_over = func is not ATEN._local_scalar_dense.default
        if crosses:
            stream.launch(partial(_spoil, places[0]))  # until the copy is complete
            host = args[0] if self._is_on_host(args[0]) else args[1]
            if _notes(host).get("is_pinned"):
                index = 1 if host is args[1] else 0
                touched[index].users[stream] = ""
            is_over = args[2:] == (True,) and self._is_locked(host)
        stream.launch(act)
        if not is_over:  # the host waits for a scalar, and for copies that may block
            self.host.add(None, stream.now())
        return returned

    def _present(self, tensor: Tensor, stream: Actor | None, *, is_source: bool) -> Memory:
        """New memory with the present values of a tensor: followed from now on, or a constant.

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
        """Record the end of a tensor: its memory may be used again.

        In the order of its stream, or as soon as all recorded users are done.
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
        if "is_pinned" in _notes(tensor):
            return True
        address = tensor.untyped_storage().data_ptr()
        return any(start <= address < start + nbytes for start, nbytes in self._locked.items())

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
    """Execute an operation again; `outputs` are places of its results, and the recorded values."""
    if any(memory.is_freed for memory in touched):
        raise Violation(f"{func} uses freed memory")
    results = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
    for result, (place, expected) in zip(results, outputs, strict=True):
        if result.data_ptr() != place.data_ptr():
            place.copy_(result)
        if not torch.equal(place, expected):
            raise Violation(f"{func} has another result")


def _notes(tensor: Tensor) -> dict[str, Any]:
    """What is recorded about a tensor's memory, as long as that lives."""
    return vars(tensor.untyped_storage())


def _memory(tensor: Any) -> Memory | None:
    return _notes(tensor).get("memory") if isinstance(tensor, Tensor) else None


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def _pinned(tensor: Tensor) -> Tensor:
    """Mark a tensor as torch's pinned memory, which is used again only after its copies."""
    _notes(tensor)["is_pinned"] = True
    return tensor
