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
        why = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else "is damaged"
        # Of a run's folder, its failures; of a misspelt failure, those beside it.
        near: set[Path] = set()
        for place in (folder, folder / FOLDER, folder.parent):
            near.update(place.glob(f"*/{FAILURE_FILE}"))
        names = shorten([str(file.parent) for file in sorted(near - {path})])
        hint = (
            f"did you mean {names}?" if names else "failed runs write it to <output_dir>/failures."
        )
        raise UserError(f"--replay: {str(path)!r} {why}; {hint}") from None
    if not failure.batches:
        raise UserError(
            f"--replay: {folder} has no step to repeat: the run failed between two of them."
        )
    return failure


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
    kept = (
        failure.checkpoint and Path(failure.checkpoint).is_dir()
    )  # it may have been removed since
    settings = [
        ("resume_from_checkpoint", failure.checkpoint if kept else "latest"),
        *arguments.settings,
    ]
    base = _settings_of(folder / CONFIG_FILE, arguments.problems)
    plan = plan_that_fits(replace(arguments, settings=settings, base=base)).plan
    launch = plan.config.launch
    if launch.num_processes > 1:
        size = launch.data_processes * plan.config.schedule.train_batch_size
        whole = " sequence_parallel_size=1" if launch.sequence_parallel_size > 1 else ""
        raise UserError(
            f"--replay runs in one process; add num_processes=1{whole} train_batch_size={size}."
        )
    run = plan.config.run  # the replay reads the run's caches, and writes to another folder
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
    known = [*find_checkpoints(plan.output_dir)[0], *([plan.resume] if plan.resume else [])]
    before = (checkpoint for checkpoint in known if checkpoint.step <= step)
    return max(
        before, key=lambda checkpoint: (checkpoint.step, not checkpoint.rolling), default=None
    )


def explicit_settings(plan: Plan) -> dict[str, Any]:
    """The user's settings, without secrets."""
    values = redact_settings(plan.config.flat).items()
    chosen = {
        key: value for key, value in values if plan.config.is_explicit(key) and value != HIDDEN
    }
    return chosen | {"seed": plan.seed, "data_backend_config": str(plan.dataset_file)}
