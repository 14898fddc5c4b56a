"""`simpletuner publish`: uploads the result of a run, or the rest of a failed upload."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from simpletuner.annexes.display.log import setup_logging
from simpletuner.annexes.display.progress import shown_events
from simpletuner.annexes.payloads import EVENTS_FILE, last_id
from simpletuner.annexes.publishing.uploads import Uploads, open_hub
from simpletuner.config.json_reader import check_unset, read_json
from simpletuner.config.load import build_group, canonical
from simpletuner.config.paths import missing_path
from simpletuner.config.publishing import PublishConfig, check_publishing
from simpletuner.config.records import without_removed
from simpletuner.config.sources import Arguments
from simpletuner.distributed.requests import signals_as_interrupt
from simpletuner.errors import ConfigError, Problems, SimpleTunerError, UserError
from simpletuner.planning.checkpoint_folder import find_checkpoints
from simpletuner.planning.lock import lock_output


def publish_again(output_dir: Path, arguments: Arguments) -> None:
    """Upload the result of a run, or the rest of a failed upload.

    Raises:
        UserError: the folder contains no run, or a setting is invalid.
        SimpleTunerError: an upload failed.
    """
    settings, recorded = recorded_settings(output_dir, arguments)
    setup_logging()
    # The lock keeps a run from replacing files that are being uploaded.
    lock = lock_output(output_dir, partial(last_id, output_dir / EVENTS_FILE))
    with lock, signals_as_interrupt(), shown_events() as events:
        for problem in arguments.problems:
            events.notify(str(problem), warning=True)
        hub = open_hub(settings, recorded["tracker_project_name"], events)
        uploads = Uploads(settings, output_dir, recorded["tracker_run_name"], hub, events)
        uploads.repeat()
    if uploads.failed:
        raise SimpleTunerError("Not everything was uploaded; the same command tries again.")


def recorded_settings(
    output_dir: Path, arguments: Arguments
) -> tuple[PublishConfig, dict[str, Any]]:
    """The publishing settings, and all recorded settings of a run.

    Warnings are added to those of the arguments.

    Raises:
        UserError: the folder contains no run, or a setting is invalid.
    """
    problems = arguments.problems
    recorded = _recorded(output_dir, problems)
    given = canonical(arguments.layer(), problems)
    keys = PublishConfig.model_fields.keys()
    for key in sorted(given.keys() - keys):
        problems.error(key, "has no effect: only settings of the section Publishing are used here.")
    values = {key: recorded[key] for key in keys & recorded.keys()}
    values |= given
    values["push_to_hub"] = True  # also for a run that did not upload
    settings = build_group(PublishConfig, values, problems)
    check_unset(settings, problems, fatal=True)
    # Its warnings are about training.
    publishing_problems = Problems()
    check_publishing(settings, recorded["tracker_project_name"], publishing_problems)
    problems.extend(problem for problem in publishing_problems if problem.fatal)
    problems.raise_if_fatal()
    return settings, recorded


def _recorded(output_dir: Path, report: Problems) -> dict[str, Any]:
    """The settings in the last checkpoint of a run, without keys of earlier versions.

    Raises:
        UserError: there is no checkpoint, or its settings cannot be read.
    """
    checkpoints, _incomplete = find_checkpoints(output_dir)
    if not checkpoints:
        if not output_dir.exists():
            raise UserError(missing_path(output_dir))
        raise UserError(
            f"{str(output_dir)!r} is not the output folder of a run: it has no checkpoint."
        )
    file = checkpoints[-1].path / "config.json"
    recorded = read_json(file, report, dict)
    if recorded is None:
        raise ConfigError(report)
    return without_removed(recorded, str(file), report)
