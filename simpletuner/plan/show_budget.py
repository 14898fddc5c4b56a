"""The budget as a person reads it: a table of phases, one of the largest buckets, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from simpletuner.plan.budget import BucketCost, Budget, gigabytes
from simpletuner.plan.build import Plan
from simpletuner.plan.disk import Writing

SHOWN_BUCKETS = 4


def budget_lines(plan: Plan, budget: Budget, writings: Sequence[Writing]) -> Iterator[str]:
    """Everything about memory, time and disk, line by line."""
    device = budget.device
    room = "unknown memory" if device.memory is None else gigabytes(device.memory)
    host = f", host memory {gigabytes(device.host_memory)}" if device.is_gpu and device.host_memory else ""
    yield f"Estimate for {device.name}, {room}{host} ({device.note})"
    yield from _phase_lines(budget)
    yield from _bucket_lines(budget)
    yield from _time_lines(plan, budget)
    disk = ", ".join(f"{each.what} up to {gigabytes(each.total)}" for each in writings)
    yield f"  disk: {disk}"
    if budget.parts.assumed:
        yield f"  {', '.join(budget.parts.assumed)}: not on this machine, sizes assumed from {plan.flavour.name}"
    for decision in budget.decisions:
        yield f"  offload auto: {decision}"


def _phase_lines(budget: Budget) -> Iterator[str]:
    """Peaks of the phases; training counts with its largest bucket."""
    training = [phase for phase in budget.phases if phase.name.startswith("training")]
    worst = max(training, key=lambda phase: phase.device, default=None)
    shown = [phase for phase in budget.phases if phase not in training or phase is worst]
    names = ["peak memory", *(phase.name for phase in shown)]
    width = max(map(len, names)) + 2
    yield f"  {names[0]:<{width}}{'device':>10}{'host':>10}"
    for phase in shown:
        on_device = gigabytes(phase.device) if phase.device else "-"
        on_host = phase.host + (phase.passing if budget.device.is_gpu else 0.0)
        yield f"  {phase.name:<{width}}{on_device:>10}{gigabytes(on_host):>10}"


def _bucket_lines(budget: Budget) -> Iterator[str]:
    """The largest buckets: tokens, work, time, and what the memory is made of."""
    shown = budget.buckets[:SHOWN_BUCKETS]
    width = max((len(each.bucket.label) for each in shown), default=0) + 2
    width = max(width, len("micro-step") + 2)
    heads = ("tokens", "TFLOP", "weights", "trained", "inputs", "block", "time")
    yield f"  {'micro-step':<{width}}" + "".join(f"{head:>10}" for head in heads)
    for each in shown:
        yield f"  {each.bucket.label:<{width}}" + "".join(f"{cell:>10}" for cell in _cells(budget, each))
    if len(budget.buckets) > SHOWN_BUCKETS:
        yield f"  and {len(budget.buckets) - SHOWN_BUCKETS} smaller buckets"


def _cells(budget: Budget, each: BucketCost) -> Iterator[str]:
    memory, load = each.memory, budget.parts.load(each.bucket)
    yield str(load.samples * load.tokens)
    yield f"{each.step.executed.total / 1e12:.3g}"
    for part in (memory.weights, memory.trained, memory.inputs, memory.block + memory.outside):
        yield gigabytes(part)
    yield duration(each.step.seconds)


def _time_lines(plan: Plan, budget: Budget) -> Iterator[str]:
    steps = plan.length.total_steps - (plan.resume.step if plan.resume else 0)
    rounds = 0
    if budget.workload.previews:
        rounds = len(plan.prompts) * (1 + steps // plan.config.validation.validation_step_interval)
    previews = rounds * budget.preview_seconds
    beside = f", and {duration(previews)} for previews" if previews else ""
    each = budget.step_seconds
    whole = duration(each * steps)
    yield f"  about {duration(each)} a step, {whole} for {steps} steps{beside}; without filling the caches"


def duration(seconds: float) -> str:
    """Seconds for people: two figures are more than an estimate deserves."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    for unit, size, end in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 360_000)):
        if seconds < end:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
