"""What a failed run leaves behind in `output_dir/failures/step-<n>/`, and the plan to repeat the step. Free of torch.

A process other than the first, if it fails alone, leaves `step-<n>-process-<rank>/`.

failure.json    the cause, the step and its samples, settings, versions, memory, the last metrics
config.json     what the user had set, as a config file for the same working directory
traceback.txt
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from simpletuner.annexes.fitting.ready import ready_plan
from simpletuner.config.sources import Arguments
from simpletuner.errors import UserError
from simpletuner.plan.build import Plan
from simpletuner.redaction import HIDDEN, redact_settings
from simpletuner.training.manifest import Checkpoint, find_checkpoints

FOLDER, FAILURE_FILE, CONFIG_FILE = "failures", "failure.json", "config.json"


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


def read_failure(folder: Path) -> Failure:
    """The failure that a run left in a folder.

    Raises:
        UserError: the file is missing or damaged, or there is no step to repeat.
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


def prepare(folder: Path, arguments: Arguments) -> tuple[Failure, Plan]:
    """The failure, and the plan of its run with the settings of the command line.

    Raises:
        UserError: it cannot be repeated.
    """
    failure = read_failure(folder)
    if arguments.selectors:
        raise UserError(f"--replay has the settings of the failed run; leave out {', '.join(arguments.selectors)}.")
    kept = failure.checkpoint and Path(failure.checkpoint).is_dir()  # it may have been removed since
    settings = [("resume_from_checkpoint", failure.checkpoint if kept else "latest"), *arguments.settings]
    selectors = {"config_path": str(folder / CONFIG_FILE)}
    plan = ready_plan(replace(arguments, settings=settings, selectors=selectors)).plan
    if (launch := plan.config.launch).num_processes > 1:
        size = launch.data_processes * plan.config.schedule.train_batch_size
        whole = " sequence_parallel_size=1" if launch.sequence_parallel_size > 1 else ""
        raise UserError(f"--replay runs in one process; add num_processes=1{whole} train_batch_size={size}.")
    run = plan.config.run  # its caches are used, and its folder is not
    folders = {"output_dir": str(folder / "replay"), "cache_dir": run.cache_dir or f"{run.output_dir}/cache"}
    config = plan.config.with_values(folders, "--replay")
    # With other data, too, the order of the samples goes on; `changes` tells what is different.
    return failure, replace(plan, config=config, resume=checkpoint_before(plan, failure.step - 1), same_data=True)


def checkpoint_before(plan: Plan, step: int) -> Checkpoint | None:
    """The newest checkpoint with at most this many steps done."""
    known = [*find_checkpoints(plan.output_dir)[0], *([plan.resume] if plan.resume else [])]
    before = (each for each in known if each.step <= step)
    return max(before, key=lambda each: (each.step, not each.rolling), default=None)


def explicit_settings(plan: Plan) -> dict[str, Any]:
    """The settings of the user, without secrets."""
    values = redact_settings(plan.config.flat).items()
    chosen = {key: value for key, value in values if plan.config.is_explicit(key) and value != HIDDEN}
    return chosen | {"seed": plan.seed, "data_backend_config": str(plan.dataset_file)}
