"""The measurements of `first_gpus.py`, as every process of a group makes them."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.first_gpus import SHARED, STRONG, WEAK
from benchmarks.gpu_sections import Line
from benchmarks.models import SHAPES, cost_of, hollow_transformer, lora_targets, make_config
from benchmarks.variants import COMMON, Settings, Variant
from simpletuner.annexes.processes.joining import ConnectedWorld, connect, set_rendezvous
from simpletuner.budget.device import this_cpu
from simpletuner.budget.step_cost import Step
from simpletuner.budget.workload import Parts, kernels_on
from simpletuner.distributed.world import Value, World, world_from_launcher
from simpletuner.errors import Problems
from simpletuner.models.cost import BatchShape
from simpletuner.models.registry import FAMILIES

SENT_BAR = 1.05
PEAK_BAR = 1.10
STEPS = 3
GATHERS = 20
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Case:
    """One way to train on several devices.

    Attributes:
        model: the size in `SHAPES` of a real run.
        frames: of a latent of 64 x 96. Clips are shorter than usual, so that communication is a
            larger share.
        strong: whether strong scaling is measured, too.
        shared: whether all processes share the tokens of a sample.
    """

    settings: Settings
    model: str
    frames: int
    strong: bool = True
    shared: bool = False

    def shape(self, size: str) -> tuple[str, tuple[int, int, int] | None]:
        """The model at a size, and the latents of a sample; None for the model's default."""
        if size == "real":
            return self.model, (self.frames, 64, 96)
        return f"{size}-video", None


_PLAIN: Settings = {"dynamo_backend": "no"}  # compiling would take the time of the measurements
_STREAMED = {**_PLAIN, "enable_group_offload": True, "group_offload_use_stream": True}
CASES = {
    "Lite LoRA, DDP": Case(_PLAIN, "lite", 8),
    "Lite full, FSDP2": Case({**_PLAIN, "model_type": "full", "fsdp_enable": True}, "lite", 8),
    "Pro LoRA, DDP, streamed": Case(_STREAMED, "pro", 4, strong=False),
    "Lite LoRA, tokens shared": Case(_PLAIN, "lite", 16, shared=True),
}


class Sent(TorchDispatchMode):
    """Counts the bytes that this process sends in collectives, as if all of them were rings.

    Attributes:
        kind: `control` while values are gathered, else `tensors`.
        bytes: by kind and name of the collective.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.share = (size - 1) / size
        self.kind = "tensors"
        self.bytes: defaultdict[tuple[str, str], float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname != "barrier":
            # A ring sends (n - 1) / n of the whole tensor, and an all-reduce does so twice: it
            # reduces and scatters, then gathers.
            rounds = 2 if func._opname == "allreduce_" else 1
            whole = max(map(_nbytes, args))
            self.bytes[self.kind, func._opname] += rounds * self.share * whole
        return func(*args, **(kwargs or {}))

    def total(self, kind: str) -> float:
        return sum(count for (counted, _), count in self.bytes.items() if counted == kind)


def _nbytes(value: Any) -> int:
    """Bytes of all tensors in an argument; a collective's largest argument is the whole tensor."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return 0


@dataclass(frozen=True)
class MeasuredWorld(ConnectedWorld):
    """Connected processes that measure their agreements.

    Attributes:
        seconds: of each `gather`, including the wait for the slowest process.
        values: what this process gathered.
        sent: counters of bytes, in which those of `gather` are of another kind.
    """

    seconds: list[float] = field(default_factory=list)
    values: list[object] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)

    def gather(self, value: Value) -> list[Value]:
        self._count_as("control")
        started = time.perf_counter()
        values = super().gather(value)
        self.seconds.append(time.perf_counter() - started)
        self.values.append(value)
        self._count_as("tensors")
        return values

    def _count_as(self, kind: str) -> None:
        for counter in self.sent:
            counter.kind = kind

    def forget(self) -> None:
        self.seconds.clear()
        self.values.clear()


def scale(case: Case, device: str, size: str, samples: int) -> Iterator[Line]:
    """Train in this process together with the others of its group, and yield the results.

    Args:
        samples: of the global batch of strong scaling.
    """
    place = world_from_launcher(os.environ) or World()
    connected: AbstractContextManager[World] = nullcontext(place)
    if place.size > 1:
        report = Problems()
        set_rendezvous(place, os.environ, report)
        report.raise_if_fatal()
        connected = _measured(place)
    with connected as world:
        yield from _lines(case, device, size, samples, world)


@contextmanager
def _measured(place: World) -> Iterator[World]:
    with connect(place) as world:
        yield MeasuredWorld(**vars(world))


def _lines(case: Case, device: str, size: str, samples: int, world: World) -> Iterator[Line]:
    """All results; every process computes them, since each takes part in the measurements."""
    model, latents = case.shape(size)
    sharers = world.size if case.shared else 1
    settings = {**case.settings, "num_processes": world.size, "sequence_parallel_size": sharers}
    variant = Variant(model, device, settings, latents=latents, world=world)
    for _ in range(2):  # allocations, and the buckets that DDP rebuilds after its first step
        step(variant)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield Line(SHARED if case.shared else WEAK, median_seconds(variant, world), "s")
    planned = planned_step(model, device, settings, latents)
    if isinstance(world, MeasuredWorld):
        yield from _control(world)
        yield from _sent(world, variant, planned.exchanged)
    # On a CPU, streaming leaves the weights where they are, so the plan's peak does not apply.
    if device == "cuda" or variant.assembly.streamer is None:
        peak = max(world.gather(peak_of_step(variant, device)))
        yield _judged("peak of a process / planned", peak, planned.memory.total, PEAK_BAR)
    if case.strong:
        micro_steps = samples * sharers // world.size
        assembly = variant.assembly
        assembly.settings = replace(assembly.settings, accumulation=micro_steps)
        note = f"{micro_steps} micro-step{'s' if micro_steps > 1 else ''}"
        yield Line(STRONG, median_seconds(variant, world, 2), "s", note)


def step(variant: Variant) -> float:
    """Run a step with the agreements of the loop and the recorder; returns its seconds."""
    started = time.perf_counter()
    world = variant.assembly.world
    world.any(False)  # the loop: whether to stop
    variant.step()
    world.broadcast([])  # the recorder: new requests
    return time.perf_counter() - started


def median_seconds(variant: Variant, world: World, steps: int = STEPS) -> float:
    """The median duration of a step in the slowest process."""
    if isinstance(world, MeasuredWorld):
        world.barrier()
        world.forget()
    return max(world.gather(statistics.median(step(variant) for _ in range(steps))))


def _control(world: MeasuredWorld) -> Iterator[Line]:
    """The cost of a step's agreements in the steps that were just measured."""
    # The last gather was that of the result.
    values = world.values[:-1]
    seconds = world.seconds[:-1]
    count = len(values) // STEPS
    of_a_step = values[:count]
    size = f"{len(pickle.dumps(of_a_step))} bytes of values"
    yield Line("agreements in a step", count, "gathers", size)
    yield Line("agreements, waiting included", 1e3 * sum(seconds) / STEPS, "ms a step")

    without_waiting: dict[str, Sequence[object]] = {
        "agreements of processes that need not wait": of_a_step,
        "the same in one gather": [of_a_step],
    }
    for name, gathered in without_waiting.items():
        duration = _gathering(world, gathered)
        yield Line(name, 1e3 * duration, "ms a step", f"{duration / 0.25:.2%} of 0.25 s")


def _gathering(world: MeasuredWorld, values: Sequence[object]) -> float:
    """Seconds of gathering these values one by one, while all processes do nothing else."""
    world.barrier()
    started = time.perf_counter()
    for _ in range(GATHERS):
        for value in values:
            world.gather(value)
    return (time.perf_counter() - started) / GATHERS


def _sent(world: MeasuredWorld, variant: Variant, exchanged: float) -> Iterator[Line]:
    """Bytes that this process sends in one step, counted.

    Args:
        exchanged: for shared tokens, as planned.
    """
    with Sent(world.size) as sent:
        world.sent.append(sent)
        step(variant)
        world.sent.clear()
    limit = ring_limit(variant, world.size) + exchanged
    yield _judged(
        "tensors sent in a step by a process / ring limit",
        measured=sent.total("tensors"),
        expected=limit,
        bar=SENT_BAR,
        least=0.99,
    )
    yield Line("values sent in a step by a process", sent.total("control") / 1e3, "kB")


def _judged(name: str, measured: float, expected: float, bar: float, least: float = 0.0) -> Line:
    """Measured bytes in units of the expected ones, with a verdict.

    Args:
        bar: the largest ratio that is good enough.
        least: the smallest ratio that is possible if every byte was counted.
    """
    ratio = measured / expected
    verdict = "ok" if least <= ratio <= bar else "MISSED"
    note = f"{measured / 1e6:.3f} MB of {expected / 1e6:.3f} MB"
    return Line(name, ratio, f"bar {bar:.2f}: {verdict}", note)


def ring_limit(variant: Variant, size: int) -> float:
    """The least bytes that a process sends in rings.

    DDP all-reduces the gradients, which sends them twice. FSDP2 gathers the weights for the forward
    and the backward pass, and scatters the gradients.
    """
    share = (size - 1) / size
    assembly = variant.assembly
    gradients = _bytes_of(assembly.parameters.values())
    if not assembly.is_sharded:
        return 2 * share * gradients
    weights = _bytes_of(assembly.transformer.parameters())
    return share * (2 * weights + gradients)


def _bytes_of(parameters: Iterable[Tensor]) -> int:
    """Bytes of whole tensors, also of those of which this process has a shard."""
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def end_with_parent() -> None:
    """Let the kernel kill this process when its launcher is killed (Linux only).

    The launcher starts it in a new session, so a signal to the launcher's group does not reach it.
    """
    prctl: Callable[[int, int], int] = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def planned_step(
    size: str, device: str, settings: Settings, latents: tuple[int, int, int] | None = None
) -> Step:
    """The plan's micro-step with one sample."""
    shape = SHAPES[size]
    spec = FAMILIES[shape.family]
    precision = "no" if device == "cpu" else "bf16"
    config = make_config(size, **{"mixed_precision": precision, **COMMON, **settings})
    kernels = kernels_on(config, spec, device)
    cost = cost_of(spec.cost, hollow_transformer(size), kernels)
    parts = Parts(spec, cost, lora_targets(size), spec.cost.vae, 0, ())
    frames, height, width = latents or shape.latents
    load = BatchShape(1, frames, height // spec.patch_size, width // spec.patch_size, shape.caption)
    # Only its memory and its traffic are read, which no device changes.
    return Step(parts.model(config), load, this_cpu())


def peak_of_step(variant: Variant, device: str) -> float:
    """Peak bytes of the steps so far on a GPU, or of one more step on a CPU."""
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    before = _resident_bytes(variant)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        variant.step()
    events: Any = profiler.profiler.kineto_results.events()
    # Bytes that were allocated (or freed, if negative), in the order of time.
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    peak = 0
    allocated = 0
    for _, change in changes:
        allocated += change
        peak = max(peak, allocated)
    return float(before + peak)


def _resident_bytes(variant: Variant) -> int:
    """Bytes of weights, buffers and the optimizer's state; only this process's shards count."""
    model = variant.assembly.transformer
    tensors = [*model.parameters(), *model.buffers()]
    for state in variant.assembly.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in local)
