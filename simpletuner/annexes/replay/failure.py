"""The record of a failure in `output_dir/failures/step-<n>/`, and the plan to repeat the step.

A process other than 0 that fails alone writes `step-<n>-process-<rank>/`.

failure.json    the cause, the step and its samples, settings, versions, the last metrics
config.json     the user's settings, as a config file for the same working directory
traceback.txt
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from simpletuner.annexes.fitting.ready import plan_that_fits
from simpletuner.config.records import without_removed
from simpletuner.config.sources import Arguments, Located, located_at, read_config_file
from simpletuner.errors import Problems, UserError, shorten
from simpletuner.planning.checkpoint_folder import Checkpoint, find_checkpoints
from simpletuner.planning.length import data_origin
from simpletuner.planning.plans import Plan
from simpletuner.redaction import HIDDEN, redact_settings

FOLDER = "failures"
FAILURE_FILE = "failure.json"
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Failure:
    """The content of `failure.json`.

    Attributes:
        cause: the cause in one line.
        advice: a change that helps; for NaN, also the first module whose output was NaN.
        step: the failed step, counted from 1; after a failure between two steps, the first of them.
        batches: the samples of the step by micro-batch; empty after a failure between two steps.
        checkpoint: the checkpoint to start from; None for the beginning.
        facts: settings, versions, models and data; a replay is exact only if they are unchanged.
        metrics: the last rows of the metrics.
    """

    cause: str
    advice: str
    step: int
    batches: list[dict[str, Any]]
    checkpoint: str | None
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]


def read_failure(folder: Path) -> Failure:
    """Read the failure in a folder.

    Raises:
        UserError: the file is missing or damaged, or there is no step to repeat.
    """
    path = folder / FAILURE_FILE
    try:
        failure = TypeAdapter(Failure).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        reason = "is damaged"
        if isinstance(error, OSError):
            reason = f"cannot be read ({error.strerror})"
        raise UserError(f"--replay: {str(path)!r} {reason}; {_failures_near(folder)}") from None
    if not failure.batches:
        raise UserError(
            f"--replay: {folder} has no step to repeat: the run failed between two of them."
        )
    return failure


def _failures_near(folder: Path) -> str:
    """A hint for somebody who named the folder of a run, or misspelt that of a failure."""
    path = folder / FAILURE_FILE
    near: set[Path] = set()
    for parent in (folder, folder / FOLDER, folder.parent):
        near.update(parent.glob(f"*/{FAILURE_FILE}"))
    names = shorten([str(file.parent) for file in sorted(near - {path})])
    if names:
        return f"did you mean {names}?"
    return "failed runs write it to <output_dir>/failures."


def prepare(folder: Path, arguments: Arguments) -> tuple[Failure, Plan]:
    """Read a failure, and plan its run with the settings of the command line.

    Raises:
        UserError: the step cannot be repeated.
    """
    failure = read_failure(folder)
    if arguments.selectors:
        raise UserError(
            "--replay uses the settings of the failed run; leave out "
            f"{', '.join(arguments.selectors)}."
        )
    start = failure.checkpoint
    if not start or not Path(start).is_dir():
        start = "latest"  # the recorded one may have been removed since
    settings = [("resume_from_checkpoint", start), *arguments.settings]
    base = _settings_of(folder / CONFIG_FILE, arguments.problems)
    plan = plan_that_fits(replace(arguments, settings=settings, base=base)).plan
    launch = plan.config.launch
    if launch.num_processes > 1:
        size = launch.data_processes * plan.config.schedule.train_batch_size
        sequence = " sequence_parallel_size=1" if launch.sequence_parallel_size > 1 else ""
        raise UserError(
            f"--replay runs in one process; add num_processes=1{sequence} train_batch_size={size}."
        )
    # The replay reads the run's caches, and writes to another folder.
    run = plan.config.run
    folders = {
        "output_dir": str(folder / "replay"),
        "cache_dir": run.cache_dir or f"{run.output_dir}/cache",
    }
    config = plan.config.with_values(folders, "--replay")
    # Even if the data has changed, the order of samples continues; `changes` reports the
    # differences.
    checkpoint = checkpoint_before(plan, failure.step - 1)
    origin = data_origin(config, checkpoint, same_data=True)
    return failure, replace(plan, config=config, resume=checkpoint, same_data=True, origin=origin)


def _settings_of(config: Path, report: Problems) -> Located:
    """The settings of the failed run, without what earlier versions had."""
    layer = read_config_file(config, report)
    values = without_removed(dict(layer.values), str(config), report)
    return located_at(config, report, replace(layer, values=list(values.items())))


def checkpoint_before(plan: Plan, step: int) -> Checkpoint | None:
    """The newest checkpoint with at most this many steps done."""
    checkpoints, _ = find_checkpoints(plan.output_dir)
    if plan.resume is not None:  # it may be in another folder
        checkpoints.append(plan.resume)
    before = [checkpoint for checkpoint in checkpoints if checkpoint.step <= step]
    return max(
        before, key=lambda checkpoint: (checkpoint.step, not checkpoint.rolling), default=None
    )


def explicit_settings(plan: Plan) -> dict[str, Any]:
    """The user's settings, without secrets."""
    settings = {}
    for key, value in redact_settings(plan.config.flat).items():
        if plan.config.is_explicit(key) and value != HIDDEN:
            settings[key] = value
    settings["seed"] = plan.seed
    settings["data_backend_config"] = str(plan.dataset_file)
    return settings
