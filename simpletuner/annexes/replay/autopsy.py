"""Finds the cause of a failed step: when it fails, and when `train --replay FOLDER` repeats it.

A run resumes bit for bit, so the steps from the last checkpoint to the failure can be repeated
exactly. A replay saves, renders and sends nothing; it only writes missing cache entries.
"""

from __future__ import annotations

import json
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from simpletuner.annexes.replay.failure import (
    CONFIG_FILE,
    FAILURE_FILE,
    FOLDER,
    Failure,
    checkpoint_before,
    explicit_settings,
)
from simpletuner.annexes.report.environment import describe_device, describe_environment
from simpletuner.atomic import build_folder, unused_path, write_atomically, write_json
from simpletuner.budget.advice import less_for_steps
from simpletuner.budget.budget import Budget
from simpletuner.data.sampler import PlannedBatch
from simpletuner.distributed.world import World
from simpletuner.encoding.caches import CacheFiller, complete_catalogue
from simpletuner.encoding.encoders import Encoding, build_adapter
from simpletuner.encoding.read import BatchReader
from simpletuner.errors import (
    Interrupted,
    NonFiniteError,
    UserError,
    WriteError,
    is_out_of_memory,
    reached_limit,
)
from simpletuner.planning.entries import list_entries
from simpletuner.planning.plans import Plan
from simpletuner.planning.resume import identify
from simpletuner.redaction import redact, redact_settings
from simpletuner.reporting.events import Event, EventStream, PhaseStarted, StepReport
from simpletuner.reporting.metrics import METRICS_FILE, read_rows
from simpletuner.run.companions import Companion
from simpletuner.run.rehearsal import rehearse_micro_step, unchanged
from simpletuner.run.session import Session
from simpletuner.run.train import prepare_machine
from simpletuner.speed.attention import activate_attention
from simpletuner.training.assemble import make_accelerator
from simpletuner.training.guard import (
    gradient_size,
    stop_if_gradients_not_finite,
    stop_if_losses_not_finite,
)
from simpletuner.training.state import Assembly
from simpletuner.training.step import optimizer_step

LAST_STEPS = 20  # metrics rows in a failure's folder
# Settings that a replay sets itself, or that have several spellings.
OWN_SETTINGS = {"resume_from_checkpoint", "output_dir", "cache_dir", "data_backend_config"}


@dataclass
class Autopsy(Companion):
    """Companion that writes a failure report to a folder, and adds its path to the error.

    As a subscriber it records the current phase. A full disk or the failure of another process
    leaves no folder. Its own failures are only logged.
    """

    phase: str = ""

    def __call__(self, event: Event) -> None:
        match event:
            case PhaseStarted():
                self.phase = event.title
            case StepReport():
                self.phase = f"what follows step {event.step}"

    @contextmanager
    def around(self, session: Session, budget: Budget) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # re-raised below
            world = session.assembly.world
            if _is_reported_here(error, world):
                try:
                    with world.uninterrupted():
                        error.add_note(self._write_folder(session, error))
                except Exception as failed:  # noqa: BLE001 - it must not mask the run's error
                    session.events.notify(
                        f"The folder for this failure could not be written: {failed}", warning=True
                    )
            raise

    def _write_folder(self, session: Session, error: Exception) -> str:
        """Write the failure's folder; returns a note for the error."""
        plan = session.plan
        done = session.state.global_step
        batches = _batches_of_failed_step(session)
        step = done if batches is None else done + 1
        during = self.phase if batches is None else f"step {step}"
        cause, advice = cause_of(error, during, session, batches or [], done)
        checkpoint = checkpoint_before(plan, done)
        failure = Failure(
            cause=cause,
            advice=advice,
            step=step,
            batches=[describe_batch(batch) for batch in batches or []],
            checkpoint=str(checkpoint.path) if checkpoint else None,
            facts=facts_of(plan, device_name() or "unknown"),
            metrics=[*deque(read_rows(plan.output_dir / METRICS_FILE), LAST_STEPS)],
        )
        name = session.assembly.world.unique_name(f"{FOLDER}/step-{step}")
        folder = unused_path(plan.output_dir / name)
        trace = "".join(traceback.format_exception(error))
        with build_folder(folder) as unfinished:
            write_json(unfinished / FAILURE_FILE, redact_settings(asdict(failure)))
            write_json(unfinished / CONFIG_FILE, explicit_settings(plan))
            write_atomically(unfinished / "traceback.txt", redact(trace))
        return f"{advice} What happened: {folder}".lstrip()


def _is_reported_here(error: Exception, world: World) -> bool:
    """Whether this process writes the folder of a failure."""
    if isinstance(error, Interrupted | WriteError):
        return False
    if isinstance(error, NonFiniteError):
        # Every process sees NaN in the same step, so each raises it itself.
        return world.is_main
    return world.first_failure(error) is None


def _batches_of_failed_step(session: Session) -> list[PlannedBatch] | None:
    """The micro-batches of the step in progress; None between two steps."""
    before = session.state.data_before
    if before is None:
        return None
    # Planned again from the position before the step: prefetching has advanced the loader.
    return session.loader.planned(before, session.assembly.settings.accumulation)


def device_name() -> str | None:
    """The name of the training device; None if it fails, as every call does after some errors."""
    with suppress(RuntimeError):
        return describe_device()
    return None


def cause_of(
    error: Exception, during: str, session: Session, batches: Sequence[PlannedBatch], done: int
) -> tuple[str, str]:
    """The cause of a failure in one line, and advice.

    Args:
        batches: planned micro-batches of the failed step.
        done: number of steps done before it.
    """
    restart = "Start again to continue from the last checkpoint."
    if is_out_of_memory(error):
        return f"Out of memory in {during}.", less_for_steps(session.plan.config.offload)
    limit = reached_limit(error)
    if limit:
        return f"A limit of this machine: {limit}", restart
    if not isinstance(error, UserError | NonFiniteError):
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        return first_line, restart
    if isinstance(error, UserError) or not batches:  # their messages include advice
        return str(error), ""
    return str(error), _advice_for_nan(session, batches, done)


def _advice_for_nan(session: Session, batches: Sequence[PlannedBatch], done: int) -> str:
    """What helps against NaN, with the first module whose output was NaN, if it can be found."""
    assembly = session.assembly
    bf16 = " or mixed_precision bf16" if assembly.scaler.is_enabled() else ""
    advice = (
        f"Continue from an earlier checkpoint with a lower learning_rate{bf16}, or leave out a "
        "file at fault."
    )
    # Several processes would have to repeat the step together, and half-updated weights would give
    # another step.
    is_halfway = assembly.release is not None and assembly.release.is_halfway
    if assembly.world.size > 1 or is_halfway:
        return advice
    module = first_not_finite(session, batches, done)
    if module is None:
        return advice
    return f"The first module whose output is not finite is {module}. {advice}"


def first_not_finite(session: Session, batches: Sequence[PlannedBatch], done: int) -> str | None:
    """Repeat the micro-steps of a step; returns the first module whose output is NaN or infinite.

    Also None if the device fails, or has too little memory for uncompiled blocks.
    """
    with watched_outputs(session.assembly.transformer) as modules, suppress(RuntimeError):
        for micro_step, planned in enumerate(batches):
            with suppress(NonFiniteError):
                attempt(session.assembly, session.reader, planned, done, micro_step)
    return modules[0] if modules else None


def attempt(
    assembly: Assembly, reader: BatchReader, planned: PlannedBatch, done: int, micro_step: int
) -> None:
    """Run forward and backward of a micro-batch after `done` steps, and change no state.

    Blocks run uncompiled, so that the output of every module can be watched.

    Raises:
        NonFiniteError: the loss or the gradient is NaN or infinite.
    """
    with (
        unchanged(assembly.optimizer, assembly.techniques),
        torch.compiler.set_stance("force_eager"),
    ):
        losses = rehearse_micro_step(assembly, reader(planned), done, micro_step)
        stop_if_losses_not_finite([micro.total for micro in losses], losses.names)
        parameters = assembly.all_parameters
        sizes: list[Tensor] = []
        if assembly.release is not None:
            # Of gradients that are released during the backward pass.
            sizes += assembly.release.gradient_size().values()
        sizes += gradient_size(parameters.values(), assembly.settings.optimizer).values()
        stop_if_gradients_not_finite(
            parameters,
            assembly.scaler,
            assembly.release,
            [size.item() for size in sizes],
            losses.names,
        )


@contextmanager
def watched_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Within a context, list the modules whose output is NaN or infinite, in order of execution.

    Slow, since every output is checked on the host.
    """
    modules: list[str] = []

    def check(name: str, module: nn.Module, inputs: object, output: object) -> None:
        outputs = output if isinstance(output, tuple | list) else [output]
        tensors = [part for part in outputs if isinstance(part, Tensor)]
        if not all(tensor.isfinite().all() for tensor in tensors):
            modules.append(name or type(module).__name__)

    # Hooks run when a module has finished, inner ones first: the first entry is the innermost.
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(partial(check, name)).remove)
        yield modules


def facts_of(plan: Plan, device: str | None = None) -> dict[str, Any]:
    """The facts that a replay depends on, by name: settings without secrets, versions, data.

    Args:
        device: name of the training device; None queries torch.
    """
    identity = identify(plan)
    facts = redact_settings(plan.config.flat) | describe_environment(device)
    facts |= identity.weights
    facts |= identity.order
    facts["content of the data"] = identity.datasets
    facts["seed"] = plan.seed
    return facts


def describe_batch(planned: PlannedBatch) -> dict[str, Any]:
    """A micro-batch as recorded in a failure."""
    samples = []
    for sample, caption, slot in zip(planned.samples, planned.captions, planned.slots, strict=True):
        samples.append({"name": sample.full_name, "caption": caption, "slot": slot})
    return {"size": planned.size, "frames": planned.samples[0].frames, "samples": samples}


def replay_step(failure: Failure, plan: Plan, events: EventStream) -> bool:
    """Repeat the steps up to a failure and report the outcome.

    Returns:
        whether a step fails again.
    """
    for change in changes(failure, plan):
        events.notify(change, warning=True)
    session = _open_session(plan, events)
    with closing(session.loader):
        failed_again = _repeat(session, failure.step, events)
    if failed_again is None:
        events.notify(f"Step {failure.step} does not fail this time.")
        return False
    events.notify(_verdict(failure, *failed_again))
    return True


def _open_session(plan: Plan, events: EventStream) -> Session:
    """Fill missing cache entries and load the checkpoint, as the failed run did."""
    prepare_machine(plan)
    accelerator = make_accelerator()
    activate_attention(plan.config.precision, accelerator.device)
    epoch = plan.resume.manifest.epoch if plan.resume else 1
    listing = list_entries(plan, complete_catalogue(plan), epoch)
    caches = CacheFiller(Encoding(plan, build_adapter(plan), accelerator.device, events), listing)
    caches.fill()
    session = Session.open(caches, accelerator, World())
    session.assembly.transformer.train()
    return session


def _repeat(session: Session, last: int, events: EventStream) -> tuple[int, str, str] | None:
    """Train up to a step; returns (step that fails, cause, advice), or None if none fails."""
    assembly = session.assembly
    loader = session.loader
    begun = session.state.global_step
    origin = session.plan.resume.path.name if session.plan.resume else "the beginning"
    with events.phase(f"Repeating step {last} from {origin}", last - begun, "steps") as phase:
        for done in range(begun, last):
            batches = loader.planned(loader.state_dict(), assembly.settings.accumulation)
            try:
                optimizer_step(assembly, loader, done)
            except Exception as error:  # noqa: BLE001 - why a step fails is the question
                step = done + 1
                cause, advice = cause_of(error, f"step {step}", session, batches, done)
                return step, cause, advice
            phase.advance()
    return None


def _verdict(failure: Failure, step: int, cause: str, advice: str) -> str:
    """A line that compares the failure of a replay with the recorded one."""
    cause = redact(cause)  # as in the recorded failure
    again = "already" if step < failure.step else "again"
    comparison = "the same cause"
    if cause != failure.cause:
        comparison = f"a different cause (before: {failure.cause})"
    return f"Step {step} fails {again}, with {comparison}: {cause} {advice}".rstrip()


def changes(failure: Failure, plan: Plan) -> Iterator[str]:
    """Describe the facts that have changed since the run failed."""
    # Converted to JSON and back like the recorded facts, so that tuples become lists.
    now = json.loads(json.dumps(facts_of(plan)))
    for name in sorted(failure.facts.keys() & now.keys() - OWN_SETTINGS):
        if failure.facts[name] != now[name]:
            yield f"{name} was {failure.facts[name]} and is {now[name]} now."
