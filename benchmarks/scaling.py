"""The measurements of `first_gpus.py`, in each of the processes that train together."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from simpletuner.budget.estimate import Step
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
        model: of the real size.
        frames: of a latent of 64 x 96: shorter clips than usual, so that communication is a larger
            share.
        strong: whether strong scaling is measured too.
        shared: whether all processes share the tokens of each sample.
    """

    settings: Settings
    model: str
    frames: int
    strong: bool = True
    shared: bool = False

    def shape(self, size: str) -> tuple[str, tuple[int, int, int] | None]:
        """The model at a size, and the latents of a sample; None for those that the model has."""
        return (self.model, (self.frames, 64, 96)) if size == "real" else (f"{size}-video", None)


_PLAIN: Settings = {"dynamo_backend": "no"}  # compiling would take the time of the measurements
_STREAMED = {**_PLAIN, "enable_group_offload": True, "group_offload_use_stream": True}
CASES = {
    "Lite LoRA, DDP": Case(_PLAIN, "lite", 8),
    "Lite full, FSDP2": Case({**_PLAIN, "model_type": "full", "fsdp_enable": True}, "lite", 8),
    "Pro LoRA, DDP, streamed": Case(_STREAMED, "pro", 4, strong=False),
    "Lite LoRA, tokens shared": Case(_PLAIN, "lite", 16, shared=True),
}


class Sent(TorchDispatchMode):
    """Bytes that this process sends in collectives if all of them are rings, by the name of the
    collective.

    Attributes:
        kind: `control` while values are gathered.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.share = (size - 1) / size
        self.kind = "tensors"
        self.bytes: defaultdict[tuple[str, str], float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname != "barrier":
            times = 2 if func._opname == "allreduce_" else 1
            self.bytes[self.kind, func._opname] += times * self.share * max(map(_nbytes, args))
        return func(*args, **(kwargs or {}))

    def total(self, kind: str) -> float:
        return sum(count for (which, _), count in self.bytes.items() if which == kind)


def _nbytes(value: Any) -> int:
    """Of all tensors in an argument; that of a collective which has most is the whole tensor."""
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


@dataclass(frozen=True)
class MeasuredWorld(ConnectedWorld):
    """Connected processes that note what their agreements cost.

    Attributes:
        seconds: of each `gather`, with waiting for the slowest.
        values: what was gathered.
        sent: where bytes are counted; those of `gather` apart.
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
        for each in self.sent:
            each.kind = kind

    def forget(self) -> None:
        self.seconds.clear()
        self.values.clear()


def scale(case: Case, device: str, size: str, samples: int) -> Iterator[Line]:
    """Train in this process, together with the others.

    Args:
        samples: of the global batch that stays constant.
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
    """All results; every process computes them, since each takes part in what they come from."""
    model, latents = case.shape(size)
    sharers = world.size if case.shared else 1
    settings = {**case.settings, "num_processes": world.size, "sequence_parallel_size": sharers}
    variant = Variant(model, device, settings, latents=latents, world=world)
    for _ in range(2):  # allocations, and the buckets that DDP makes after its first step
        step(variant)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield Line(SHARED if case.shared else WEAK, median_seconds(variant, world), "s")
    planned = planned_step(model, device, settings, latents)
    if isinstance(world, MeasuredWorld):
        yield from _control(world)
        yield from _sent(world, variant, planned.exchanged)
    if (
        device == "cuda" or variant.assembly.streamer is None
    ):  # on a CPU, streaming leaves the weights where they are
        peak = max(world.gather(peak_of_step(variant, device)))
        yield _judged("peak of a process / planned", peak, planned.memory.total, PEAK_BAR)
    if case.strong:
        micro_steps = samples * sharers // world.size
        assembly = variant.assembly
        assembly.settings = replace(assembly.settings, accumulation=micro_steps)
        note = f"{micro_steps} micro-step{'s' if micro_steps > 1 else ''}"
        yield Line(STRONG, median_seconds(variant, world, 2), "s", note)


def step(variant: Variant) -> float:
    """One step, with what the loop asks all processes before it and the recorder after it; returns
    its seconds.
    """
    started = time.perf_counter()
    world = variant.assembly.world
    world.any(False)  # whether to stop
    variant.step()
    world.broadcast([])  # requests
    return time.perf_counter() - started


def median_seconds(variant: Variant, world: World, steps: int = STEPS) -> float:
    """Of a step, in the slowest process."""
    if isinstance(world, MeasuredWorld):
        world.barrier()
        world.forget()
    return max(world.gather(statistics.median(step(variant) for _ in range(steps))))


def _control(world: MeasuredWorld) -> Iterator[Line]:
    """What the agreements of a step cost, those of the steps measured just now."""
    # without the gathering of the result
    values = world.values[:-1]
    seconds = world.seconds[:-1]
    count = len(values) // STEPS
    yield Line(
        "agreements in a step",
        count,
        "gathers",
        f"{len(pickle.dumps(values[:count]))} bytes of values",
    )
    yield Line("agreements, waiting included", 1e3 * sum(seconds) / STEPS, "ms a step")
    alone: dict[str, Sequence[object]] = {
        "agreements of processes that need not wait": values[:count],
        "the same in one gather": [values[:count]],
    }
    for name, gathered in alone.items():
        spent = _gathering(world, gathered)
        yield Line(name, 1e3 * spent, "ms a step", f"{spent / 0.25:.2%} of 0.25 s")


def _gathering(world: MeasuredWorld, values: Sequence[object]) -> float:
    """Seconds of gathering these values one by one, when all processes do nothing else."""
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
    found = sent.total("tensors")
    limit = ring_limit(variant, world.size) + exchanged
    yield _judged(
        "tensors sent in a step by a process / ring limit", found, limit, SENT_BAR, least=0.99
    )
    yield Line("values sent in a step by a process", sent.total("control") / 1e3, "kB")


def _judged(name: str, found: float, expected: float, bar: float, least: float = 0.0) -> Line:
    """Bytes in units of those that are expected, with the largest ratio that is good enough.

    Args:
        least: the smallest ratio that is possible if nothing was overlooked.
    """
    ratio = found / expected
    verdict = f"bar {bar:.2f}: {'ok' if least <= ratio <= bar else 'MISSED'}"
    return Line(name, ratio, verdict, f"{found / 1e6:.3f} MB of {expected / 1e6:.3f} MB")


def ring_limit(variant: Variant, size: int) -> float:
    """The least bytes that rings send: gradients reduced on all, or weights gathered twice and
    gradients scattered.
    """
    share = (size - 1) / size
    assembly = variant.assembly
    gradients = sum(
        parameter.numel() * parameter.element_size() for parameter in assembly.parameters.values()
    )
    if not assembly.is_sharded:
        return 2 * share * gradients
    weights = sum(
        parameter.numel() * parameter.element_size()
        for parameter in assembly.transformer.parameters()
    )
    return share * (2 * weights + gradients)


def end_with_parent() -> None:
    """Have this process killed when the launcher is, which starts it in a session of its own. On
    Linux only.
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
    return Step(parts.model(config), load, this_cpu())  # of any device: its seconds are not read


def peak_of_step(variant: Variant, device: str) -> float:
    """Bytes that steps have taken at most on a GPU; on a CPU, those of one more step."""
    if device == "cuda":
        return float(torch.cuda.max_memory_allocated())
    before = _resident_bytes(variant)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        variant.step()
    events: Any = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return float(before + peak)


def _resident_bytes(variant: Variant) -> int:
    """Weights, buffers and the optimizer's state; of what is sharded, this process's part."""
    model = variant.assembly.transformer
    optimizer = variant.assembly.optimizer
    state = [
        value
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    tensors = (*model.parameters(), *model.buffers(), *state)
    return sum(
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors
    )
