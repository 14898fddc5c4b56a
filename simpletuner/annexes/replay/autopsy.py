"""What a failed run leaves behind: `output_dir/failures/step-<n>/`, from which `run.replay` repeats the step.

A process other than the first, if it fails alone, leaves `step-<n>-process-<rank>/`.

failure.json    the cause, the step and its samples, settings, versions, memory, the last metrics
config.json     what the user had set, as a config file for the same working directory
traceback.txt
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from simpletuner.atomic import build_folder, write_atomically, write_json
from simpletuner.budget.budget import Budget
from simpletuner.caching.read import BatchReader
from simpletuner.data.sampler import PlannedBatch
from simpletuner.errors import Interrupted, NonFiniteError, UserError, WriteError, is_out_of_memory
from simpletuner.plan.build import Plan
from simpletuner.redaction import HIDDEN, redact, redact_settings
from simpletuner.reporting.environment import describe_device, describe_environment, package_versions
from simpletuner.reporting.events import Event, PhaseEnded, PhaseStarted, StepReport
from simpletuner.reporting.metrics import METRICS_FILE, read_rows
from simpletuner.run.companions import Companion
from simpletuner.run.rehearsal import rehearse_micro_step, unchanged
from simpletuner.run.session import Session
from simpletuner.training.guard import gradient_size, stop_if_gradients_not_finite, stop_if_losses_not_finite
from simpletuner.training.manifest import Checkpoint, find_checkpoints
from simpletuner.training.recorder import peak_memory
from simpletuner.training.state import Assembly

FOLDER, FAILURE_FILE, CONFIG_FILE = "failures", "failure.json", "config.json"
LAST_STEPS = 20  # rows of the record in a failure's folder

Found = TypeVar("Found")


@dataclass(frozen=True)
class Failure:
    """The content of `failure.json`.

    Attributes:
        cause: in one line.
        advice: the change that helps, and for NaN the first module whose output it was in.
        step: that failed, counted from 1; between two steps, the one before.
        batches: the samples of the step by micro-batch; empty if it failed between two steps.
        checkpoint: the one to start from; None for the beginning.
        facts: settings, versions, models and data; what is different makes another run.
        metrics: the last rows of the record.
        memory: in bytes, what the plan expected by phase and the peak at the end of each, and the state of a GPU's
            allocator.
        unread: what the device did not answer, in one line: after some errors, every call to a GPU fails.
    """

    cause: str
    advice: str
    step: int
    batches: list[dict[str, Any]]
    checkpoint: str | None
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    memory: dict[str, Any]
    unread: str = ""


@dataclass
class Questions:
    """Asks a device that may fail every call; what it does not answer is noted."""

    unanswered: list[str] = field(default_factory=list)
    reason: str = ""

    def ask(self, what: str, call: Callable[[], Found]) -> Found | None:
        """What `call` returns; None if the device fails it."""
        try:
            return call()
        except RuntimeError as error:
            self.unanswered.append(what)
            self.reason = str(error).partition("\n")[0]
            return None

    def __str__(self) -> str:
        return f"Could not be read ({self.reason}): {', '.join(self.unanswered)}." if self.unanswered else ""


@dataclass
class Autopsy(Companion):
    """Leaves a folder about a failure, and adds to the error where it is.

    As a subscriber it knows what a run does, and how much memory it had needed at the end of each phase. A full disk or
    the failure of another process leaves no folder. A failure of its own is only logged.
    """

    phase: str = ""
    peaks: dict[str, int] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        match event:
            case PhaseStarted():
                self.phase = event.title
            case PhaseEnded():
                with suppress(RuntimeError):  # it would take the place of the error that ended the phase
                    self.peaks[event.phase.title] = peak_memory()
            case StepReport():
                self.phase, self.peaks["training"] = f"what follows step {event.step}", peak_memory()

    @contextmanager
    def around(self, session: Session, budget: Budget) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            world = session.assembly.world
            # Every process sees NaN in the same step, so each raises it itself.
            guilty = world.is_main if isinstance(error, NonFiniteError) else world.first_failure(error) is None
            if guilty and not isinstance(error, Interrupted | WriteError):
                try:
                    with world.undisturbed():
                        error.add_note(self._leave(session, budget, error))
                except Exception as failed:  # noqa: BLE001 - it must not hide why the run failed
                    session.events.say(f"There is no folder about this failure: {failed}", warning=True)
            raise

    def _leave(self, session: Session, budget: Budget, error: Exception) -> str:
        """Write the folder; returns what to add to the message."""
        plan, done, before = session.plan, session.state.global_step, session.state.data_before
        step, batches = done + (before is not None), list[PlannedBatch]()
        if before is not None:
            batches = session.loader.planned(before, session.assembly.settings.accumulation)
        cause, advice = cause_of(error, f"step {step}" if batches else self.phase, session, batches, done)
        start, rows = checkpoint_before(plan, done), [*deque(read_rows(plan.output_dir / METRICS_FILE), LAST_STEPS)]
        device = Questions()
        memory = {
            "planned": [asdict(phase) for phase in budget.phases],
            "peaks": {**self.peaks, "at the failure": device.ask("the peak of memory", peak_memory)},
            "allocator": device.ask("the state of the allocator", _allocator),
        }
        facts = facts_of(plan, device.ask("the name of the device", describe_device) or "unknown")
        samples, origin = [_describe(batch) for batch in batches], str(start.path) if start else None
        failure = Failure(cause, advice, step, samples, origin, facts, rows, memory, str(device))
        name = session.assembly.world.named(f"{FOLDER}/step-{step}")
        names = (f"{name}{f'-{number}' if number > 1 else ''}" for number in count(1))
        folder = next(path for name in names if not (path := plan.output_dir / name).exists())
        with build_folder(folder) as unfinished:
            write_json(unfinished / FAILURE_FILE, redact_settings(asdict(failure)))
            write_json(unfinished / CONFIG_FILE, _explicit_settings(plan))
            write_atomically(unfinished / "traceback.txt", redact("".join(traceback.format_exception(error))))
        return " ".join(filter(None, (advice, failure.unread, f"What happened: {folder}")))


def _allocator() -> list[str]:
    return torch.cuda.memory_summary().splitlines() if torch.cuda.is_available() else []


def cause_of(
    error: Exception, during: str, session: Session, batches: Sequence[PlannedBatch], done: int
) -> tuple[str, str]:
    """Why a run failed, in one line, and the change that helps.

    Args:
        batches: micro-batches of the step that failed, as planned.
        done: steps done before it.
    """
    if is_out_of_memory(error):
        return f"Out of memory in {during}.", "Lower resolution, frames or train_batch_size, or set offload auto."
    if not isinstance(error, UserError | NonFiniteError):
        return f"{type(error).__name__}: {error}".splitlines()[0], "Start again to continue from the last checkpoint."
    if isinstance(error, UserError) or not batches:  # which say what helps
        return str(error), ""
    assembly = session.assembly
    # Several processes would have to repeat the step together, and half-updated weights would take another one.
    may_repeat = assembly.world.size == 1 and not (assembly.release and assembly.release.is_halfway)
    module = first_not_finite(session, batches, done) if may_repeat else None
    bf16 = " or mixed_precision bf16" if assembly.scaler.is_enabled() else ""
    advice = f"Continue from the last checkpoint with a lower learning_rate{bf16}, or leave out a file at fault."
    return str(error), f"The first module whose output is not finite is {module}. {advice}" if module else advice


def first_not_finite(session: Session, batches: Sequence[PlannedBatch], done: int) -> str | None:
    """Repeat the micro-steps of a step; returns the first module whose output is NaN or infinite.

    None as well if the device fails or lacks the memory for blocks that are not compiled.
    """
    with watched_outputs(session.assembly.transformer) as modules, suppress(RuntimeError):
        for micro_step, planned in enumerate(batches):
            with suppress(NonFiniteError):
                attempt(session.assembly, session.reader, planned, done, micro_step)
    return modules[0] if modules else None


def attempt(assembly: Assembly, reader: BatchReader, planned: PlannedBatch, done: int, micro_step: int) -> None:
    """Forward and backward of a micro-batch after `done` steps of the run, without compilation; nothing is changed.

    Raises:
        NonFiniteError: the loss or the gradient is NaN or infinite.
    """
    with unchanged(assembly), torch.compiler.set_stance("force_eager"):
        losses = rehearse_micro_step(assembly, reader(planned), done, micro_step)
        stop_if_losses_not_finite(losses.total, losses.names)
        every = assembly.parameters | assembly.module_parameters
        released = {} if assembly.release is None else assembly.release.read_size(losses.names)
        measured = gradient_size(every.values(), assembly.settings.optimizer)
        sizes = (*released.values(), *(each.item() for each in measured.values()))
        stop_if_gradients_not_finite(sizes, every, assembly.scaler, losses.names)


@contextmanager
def watched_outputs(model: nn.Module) -> Iterator[list[str]]:
    """A context in which modules whose output is NaN or infinite are added to the list, the first one first.

    Every output is read from the device, which is slow.
    """
    modules: list[str] = []

    def check(name: str, module: nn.Module, given: object, output: object) -> None:
        outputs = output if isinstance(output, tuple | list) else [output]
        if not all(each.isfinite().all() for each in outputs if isinstance(each, Tensor)):
            modules.append(name or type(module).__name__)

    hooks = [module.register_forward_hook(partial(check, name)) for name, module in model.named_modules()]
    try:
        yield modules
    finally:
        for hook in hooks:
            hook.remove()


def checkpoint_before(plan: Plan, step: int) -> Checkpoint | None:
    """The newest checkpoint with at most this many steps done."""
    known = [*find_checkpoints(plan.output_dir)[0], *([plan.resume] if plan.resume else [])]
    before = (each for each in known if each.step <= step)
    return max(before, key=lambda each: (each.step, not each.rolling), default=None)


def facts_of(plan: Plan, device: str | None = None) -> dict[str, Any]:
    """What a repetition depends on, by name: every setting without secrets, versions, models and data.

    Args:
        device: what training runs on; None asks torch.
    """
    identity = plan.identity(package_versions())
    found = identity.weights | identity.order | {"content of the data": identity.datasets, "seed": plan.seed}
    return redact_settings(plan.config.flat()) | describe_environment(device) | found


def _explicit_settings(plan: Plan) -> dict[str, Any]:
    values = redact_settings(plan.config.flat()).items()
    mine = {key: value for key, value in values if plan.config.is_explicit(key) and value != HIDDEN}
    return mine | {"seed": plan.seed, "data_backend_config": str(plan.dataset_file)}


def _describe(planned: PlannedBatch) -> dict[str, Any]:
    each = zip(planned.samples, planned.captions, planned.slots, strict=True)
    samples = [{"name": sample.full_name, "caption": caption, "slot": slot} for sample, caption, slot in each]
    return {"size": planned.size, "frames": planned.samples[0].frames, "samples": samples}
