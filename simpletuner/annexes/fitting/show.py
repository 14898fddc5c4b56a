"""The summary of a plan, its problems, and the whole plan, as they are printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from simpletuner.budget.budget import (
    Budget,
    preview_rounds,
    remaining_seconds,
    remaining_steps,
)
from simpletuner.budget.device import gigabytes
from simpletuner.errors import Problem, counted, shorten
from simpletuner.planning.plans import SamplePlan
from simpletuner.redaction import redact
from simpletuner.reporting.events import EventStream
from simpletuner.reporting.screen import in_red, layout_of
from simpletuner.reporting.wording import duration_text

MISSING_GPU = "device"  # `where` of the warning about a missing GPU, which is shown first


def publish_warnings(events: EventStream, warnings: Iterable[Problem]) -> None:
    """Publish warnings, each once; that of a missing GPU is urgent."""
    for warning in dict.fromkeys(warnings):
        is_urgent = warning.where == MISSING_GPU
        events.notify(_sentence(warning), warning=True, urgent=is_urgent)


def show_summary(budget: Budget, stream: TextIO) -> None:
    """Write what a run trains, on what, how long it takes, and whether it fits.

    A missing GPU comes first, in red on a terminal.
    """
    layout = layout_of(stream)
    for warning in dict.fromkeys(budget.plan.warnings):
        if warning.where == MISSING_GPU:
            for line in layout.wrap(_sentence(warning)):
                print(in_red(line, stream), file=stream)
    for line in start_lines(budget):
        indent = len(line) - len(line.lstrip())
        for part in layout.wrap(line.lstrip(), indent):
            print(part, file=stream)


def show_warnings(warnings: Sequence[Problem], stream: TextIO) -> None:
    """Write the warnings under a heading, without that of a missing GPU; nothing if none remain."""
    layout = layout_of(stream)
    texts = [str(warning) for warning in warnings if warning.where != MISSING_GPU]
    if not texts:
        return
    print("\nWarnings:", file=stream)
    for text in dict.fromkeys(texts):
        for line in layout.wrap(redact(text), indent=2):
            print(line, file=stream)


def _sentence(warning: Problem) -> str:
    """A warning as text; that of a missing GPU is a sentence without a key."""
    if warning.where != MISSING_GPU:
        return str(warning)
    return warning.message[:1].upper() + warning.message[1:]


def start_lines(budget: Budget) -> Iterator[str]:
    """A summary of the plan for the start of a run."""
    plan = budget.plan
    kind = "full fine-tune"
    if plan.config.model.model_type == "lora":
        kind = plan.config.lora.kind
    yield f"{kind} on {plan.spec.title} {plan.flavour.name}"
    names = [dataset.id for dataset in plan.trained]
    noun = "datasets" if len(names) > 1 else "dataset"
    samples = sum(len(dataset.samples) for dataset in plan.trained)
    media = counted(samples, plan.spec.media_noun.removesuffix("s"))
    yield f"  on {media} ({noun} {shorten(names, most=4)})"
    if plan.is_finished:
        done = counted(plan.length.total_steps, "step is", "steps are")
        yield f"  {done} done: this run is finished; saved to {plan.output_dir}"
        yield fit_line(budget)
        return
    work = counted(remaining_steps(plan), "step")
    if plan.resume:
        work += f" after step {plan.resume.step}"
    rounds = preview_rounds(plan)
    if rounds:
        work += f" and {counted(rounds, 'round')} of previews"
    seconds = sum(remaining_seconds(budget))
    yield f"  {work}, about {duration_text(seconds)}; saved to {plan.output_dir}"
    yield fit_line(budget)
    if budget.guess:
        yield f"  {budget.guess}"


def fit_line(budget: Budget[SamplePlan]) -> str:
    """`  fits: up to 16.4 GB of 25.8 GB on a GPU with 24 GiB, while training at 1024x1024`"""
    device = budget.device
    largest = max(budget.phases, key=lambda phase: phase.needed(device))
    verdict = "fits" if budget.fits else "does not fit"
    memory = gigabytes(largest.needed(device))
    if device.memory is not None:
        memory += f" of {gigabytes(device.memory)}"
    return f"  {verdict}: up to {memory} on {device.name}, while {largest.name}"
