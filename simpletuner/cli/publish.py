"""`simpletuner publish`: upload a run's result without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpletuner.cli.train import command_settings
from simpletuner.errors import Problem, SimpleTunerError, UserError

if TYPE_CHECKING:
    from simpletuner.config.publishing import PublishConfig


def publish(
    context: typer.Context,
    output_dir: Annotated[Path, typer.Argument(help="The output folder of a run.")],
) -> None:
    """Upload the result of a run: the first time, again, or the rest of an upload that failed. Nothing is trained.

    Where to is what the run's settings say; without any it is the hub. Settings of the section Publishing override
    that: publish OUTPUT_DIR --hub_model_id=me/my-lora.
    """
    from simpletuner.annexes.publishing.uploads import Hub, Uploads, prepared_destinations
    from simpletuner.distributed.requests import signals_as_interrupt
    from simpletuner.reporting.log import setup_logging
    from simpletuner.reporting.progress import shown_events
    from simpletuner.run.lock import lock_output

    problems: list[Problem] = []
    settings, recorded = _settings(output_dir, context.args, problems)
    setup_logging()
    with lock_output(output_dir), signals_as_interrupt(), shown_events() as events:
        for problem in problems:
            events.say(str(problem), warning=True)
        places = prepared_destinations(settings, recorded["tracker_project_name"], output_dir, events)
        uploads = Uploads(settings, output_dir, recorded["tracker_run_name"], places, events)
        uploads.repeat(next((each.repository for each in places if isinstance(each, Hub)), None))
    if uploads.failed:
        raise SimpleTunerError("Not everything was uploaded; the same command tries again.")


def _settings(output_dir: Path, tokens: list[str], problems: list[Problem]) -> tuple[PublishConfig, dict[str, Any]]:
    """How to publish, and all recorded settings of the run; what deserves a warning is added to the problems.

    Raises:
        UserError: there is no run, or a setting is wrong.
    """
    from simpletuner.config.json_files import check_unset, read_json
    from simpletuner.config.load import build_group, canonical, raise_if_fatal
    from simpletuner.config.publishing import KEY, PublishConfig, check_publishing, without_hidden
    from simpletuner.training.manifest import find_checkpoints

    whole = find_checkpoints(output_dir)[0]
    recorded = read_json(whole[-1].path / "config.json", []) if whole else None
    if not isinstance(recorded, dict):
        raise UserError(f"{str(output_dir)!r} is not the output folder of a run: it has no checkpoint.")
    arguments, found = command_settings(tokens)
    problems.extend(found)
    given = canonical(arguments.layer(), problems)
    for key in sorted(given.keys() - PublishConfig.model_fields.keys()):
        problems.append(Problem(key, "has no effect: only settings of the section Publishing are used here."))
    old = {key: without_hidden(recorded[key]) for key in PublishConfig.model_fields.keys() & recorded.keys()}
    if KEY not in given and old.get(KEY) != recorded.get(KEY):
        old[KEY] = _stores_with_keys(whole[-1].manifest.identity.origins.get(KEY, ""), old[KEY], problems)
    settings = build_group(PublishConfig, {**old, **given}, problems)
    if not settings.stores or "hub_model_id" in given:
        settings = settings.model_copy(update={"push_to_hub": True})
    problems.extend(check_unset(settings, fatal=True))
    project = recorded["tracker_project_name"]
    problems.extend(each for each in check_publishing(settings, project) if each.fatal)
    raise_if_fatal(problems)
    return settings, recorded


def _stores_with_keys(origin: str, recorded: Any, problems: list[Problem]) -> Any:
    """`publishing_config` as it stands in the config file of the run, with the keys that are recorded nowhere else."""
    from simpletuner.config.load import canonical
    from simpletuner.config.publishing import KEY
    from simpletuner.config.sources import read_config_file

    found: list[Problem] = []
    values = canonical(read_config_file(Path(origin), found), found) if Path(origin).is_file() else {}
    problems.extend(each for each in found if each.where == KEY)
    if values.get(KEY) is None:
        nowhere = f", and {origin!r} does not hold them" if origin else ""
        message = f"its keys are not recorded{nowhere}; give them again: --{KEY}=stores.json."
        problems.append(Problem(KEY, message, fatal=False))
    return values.get(KEY) or recorded
