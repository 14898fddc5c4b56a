"""`simpletuner train --replay FOLDER`: repeat the step that a run failed in, and find the sample at fault.

A run resumes bit for bit, so the steps between the last checkpoint and the failure are the same once more. Nothing is
saved, rendered or sent meanwhile; only missing cache entries are written.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from simpletuner.annexes.fitting.ready import ready_plan
from simpletuner.annexes.replay.autopsy import (
    CONFIG_FILE,
    FAILURE_FILE,
    Failure,
    attempt,
    cause_of,
    checkpoint_before,
    facts_of,
)
from simpletuner.caching.read import BatchReader
from simpletuner.config.sources import Arguments
from simpletuner.data.sampler import PlannedBatch
from simpletuner.distributed.world import World
from simpletuner.errors import Problem, UserError, shorten
from simpletuner.models.blocks import KERNELS
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import list_entries
from simpletuner.redaction import redact
from simpletuner.reporting.events import EventStream
from simpletuner.run.caches import CacheFiller, Encoding, build_adapter, complete_catalogue
from simpletuner.run.session import Session
from simpletuner.run.train import prepare_machine
from simpletuner.training.assemble import make_accelerator
from simpletuner.training.state import Assembly
from simpletuner.training.step import optimizer_step

# What a replay sets itself, or what may be written in several ways.
OWN_SETTINGS = {"resume_from_checkpoint", "output_dir", "cache_dir", "data_backend_config"}


def read_failure(folder: Path) -> Failure:
    """What a failed run left in a folder.

    Raises:
        UserError: nothing, something damaged, or there is no step to repeat.
    """
    path = folder / FAILURE_FILE
    try:
        failure = TypeAdapter(Failure).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        why = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else "is damaged"
        raise UserError(f"--replay: {str(path)!r} {why}; a failed run leaves it in <output_dir>/failures.") from None
    if not failure.batches:
        raise UserError(f"--replay: {folder} has no step to repeat: the run failed between two of them.")
    return failure


def prepare(folder: Path, arguments: Arguments, problems: list[Problem]) -> tuple[Failure, Plan]:
    """What failed, and the plan of the failed run with the settings of the command line.

    Raises:
        UserError: it cannot be repeated.
    """
    failure = read_failure(folder)
    if arguments.selectors:
        raise UserError(f"--replay has the settings of the failed run; leave out {', '.join(arguments.selectors)}.")
    kept = failure.checkpoint and Path(failure.checkpoint).is_dir()  # it may have been removed since
    settings = [("resume_from_checkpoint", failure.checkpoint if kept else "latest"), *arguments.settings]
    selectors = {"env": "default", "config_path": str(folder / CONFIG_FILE)}
    plan, _ = ready_plan(replace(arguments, settings=settings, selectors=selectors), problems)
    if (processes := plan.config.launch.num_processes) > 1:
        size = processes * plan.config.schedule.train_batch_size
        raise UserError(f"--replay runs in one process; add num_processes=1 train_batch_size={size}.")
    run = plan.config.run  # its caches are used, and its folder is not
    folders = {"output_dir": str(folder / "replay"), "cache_dir": run.cache_dir or f"{run.output_dir}/cache"}
    config = plan.config.with_values(folders, "--replay")
    # With other data, too, the order of the samples goes on; `changes` tells what is different.
    return failure, replace(plan, config=config, resume=checkpoint_before(plan, failure.step - 1), same_data=True)


def replay_step(failure: Failure, plan: Plan, events: EventStream, *, bisect: bool) -> bool:
    """Repeat what led to a failure and say how it ends; returns whether it fails again."""
    for change in changes(failure, plan):
        events.say(change, warning=True)
    prepare_machine(plan)
    KERNELS.open(None, *plan.output_dir.absolute().parents[2:3])  # those of the run that failed
    accelerator, epoch = make_accelerator(), plan.resume.manifest.epoch if plan.resume else 1
    listing = list_entries(plan, complete_catalogue(plan), epoch)
    caches = CacheFiller(Encoding(plan, build_adapter(plan), accelerator.device, events), listing)
    caches.fill()
    session = Session.open(caches, accelerator, World())
    assembly, loader, begun = session.assembly, session.loader, session.state.global_step
    assembly.transformer.train()
    origin, count = plan.resume.path.name if plan.resume else "the beginning", failure.step - begun
    with closing(loader), events.phase(f"Repeating step {failure.step} from {origin}", count, "steps") as phase:
        for done in range(begun, failure.step):
            batches = loader.planned(loader.state_dict(), assembly.settings.accumulation)
            try:
                optimizer_step(assembly, loader, done)
            except Exception as error:  # noqa: BLE001 - why a step fails is the question
                cause, advice = cause_of(error, f"step {done + 1}", session, batches, done)
                break
            phase.advance()
        else:
            events.say(f"Step {failure.step} does not fail now.")
            return False
    cause = redact(cause)  # as in the folder
    again = "already" if done + 1 < failure.step else "again"
    same = "the same cause" if cause == failure.cause else f"another cause than before ({failure.cause})"
    events.say(f"Step {done + 1} fails {again}, with {same}: {cause} {advice}".rstrip())
    if bisect:
        gc.collect()  # after out of memory
        events.say(find_guilty(assembly, session.reader, batches, done))
    return True


def changes(failure: Failure, plan: Plan) -> Iterator[str]:
    """What is no longer as it was when the run failed."""
    now = json.loads(json.dumps(facts_of(plan)))
    for name in sorted(failure.facts.keys() & now.keys() - OWN_SETTINGS):
        if failure.facts[name] != now[name]:
            yield f"{name} was {failure.facts[name]} and is {now[name]} now."


def find_guilty(assembly: Assembly, reader: BatchReader, batches: Sequence[PlannedBatch], done: int) -> str:
    """The samples that fail alone; if none does, the smallest slices of a micro-batch that fail."""
    if assembly.release is not None and assembly.release.is_halfway:
        return "The weights are half-updated: to find the sample, add optimizer_release_gradients=false."
    for micro_step, planned in enumerate(batches):
        whole = len(planned.samples)
        halves = {whole >> times for times in range(whole.bit_length()) if whole % (1 << times) == 0}
        for size in sorted({1, *halves}):
            parts = [slice(start, start + size) for start in range(0, whole, size)]
            guilty = [part for part in parts if fails(assembly, reader, planned, part, done, micro_step)]
            names = [sample.full_name for part in guilty for sample in planned.samples[part]]
            if names:
                how = "Fails on its own" if size == 1 else "No sample fails on its own, but together"
                return f"{how}: {shorten(names)}"
    return "No micro-batch of the step fails on its own."


def fails(
    assembly: Assembly, reader: BatchReader, planned: PlannedBatch, part: slice, done: int, micro_step: int
) -> bool:
    """Whether a part of a micro-batch fails, with the random numbers that it has in the whole."""
    size = part.stop - part.start
    chosen = replace(planned, samples=planned.samples[part], captions=planned.captions[part], slots=planned.slots[part])
    # In the place of a process that has this part of a global batch.
    world, settings = World(part.start // size, len(planned.samples) // size), assembly.settings
    alone = replace(assembly, world=world, settings=replace(settings, shared_noise=False))
    try:
        attempt(alone, reader, chosen, done, micro_step)
    except Exception:  # noqa: BLE001 - of whatever kind
        return True
    return False
