"""The commands as functions, for programs and notebooks: `simpletuner.train`, `plan` and `sample`.

Nothing is printed unless `show` is set. A configuration error raises `ConfigError`, with all
`problems`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner.annexes.display.log import setup_logging
from simpletuner.annexes.display.progress import make_display
from simpletuner.annexes.figures import is_number
from simpletuner.annexes.fitting.plan_json import plan_json
from simpletuner.annexes.fitting.ready import plan_that_fits, weigh_plan
from simpletuner.annexes.sampling import SampleRequest
from simpletuner.atomic import write_json
from simpletuner.cli.consent import with_consent
from simpletuner.cli.process import configure_torch, set_environment
from simpletuner.cli.sample import checked_samples, expand_short_names, parse_strengths
from simpletuner.cli.settings import command_settings, prepare_output, set_asked_device
from simpletuner.cli.settings_command import SHORT
from simpletuner.cli.train import recorded_events, run_checked
from simpletuner.config.schema import all_options
from simpletuner.config.sources import ARGUMENTS, SELECTORS, Arguments, config_from_values
from simpletuner.distributed.world import World
from simpletuner.errors import ConfigError, Problem
from simpletuner.planning.checkpoint_folder import PIPELINE_FOLDER
from simpletuner.planning.plans import Plan
from simpletuner.reporting.events import EventStream, Subscriber
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, read_media, read_rows
from simpletuner.weights.lora_names import LORA_FILE

WRITTEN_DATASETS = "data_backend_config.json"  # in the output folder: datasets passed as a list

# Parameters of `sample`, by their flags on the command line.
PARAMETERS = {
    "--prompt": "prompts",
    "--image": "images",
    "--strength": "strength",
    "--checkpoint": "checkpoint",
    "--ema": "ema",
}


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        output_dir: the folder of the run.
        file: the LoRA, or the pipeline folder of a full fine-tune.
        step: the last step.
        losses: last value of every loss, by logged name (`train_loss`).
        previews: pictures or clips, in the order of rendering.
    """

    output_dir: Path
    file: Path
    step: int
    losses: Mapping[str, float]
    previews: Sequence[Path]

    @classmethod
    def of(cls, plan: Plan) -> TrainResult:
        """The result from the record of a run, which includes earlier sessions."""
        folder = plan.output_dir
        losses: dict[str, float] = {}
        for row in read_rows(folder / METRICS_FILE):
            for name, value in row.items():
                if "loss" in name and is_number(value):
                    losses[name] = value
        is_full = plan.config.model.model_type == "full"
        return cls(
            output_dir=folder,
            file=folder / (PIPELINE_FOLDER if is_full else LORA_FILE),
            step=plan.length.total_steps,
            losses=losses,
            previews=[folder / media.path for media in read_media(folder / MEDIA_FILE)],
        )


def train(
    config: Mapping[str, Any],
    *,
    on_event: Subscriber | None = None,
    show: bool = False,
    yes: bool = False,
) -> TrainResult:
    """Train in this process, like `simpletuner train`.

    Resumes an interrupted run; of a finished one, returns the result.

    Args:
        config: keys of config.json. `data_backend_config` may also be a list of datasets, which is
            written to the output folder. `example`, `env` or `config` select a configuration, as on
            the command line, and all other keys override it.
        on_event: called with every event (`simpletuner.reporting.events`) in the thread that
            publishes it; an exception ends the run.
        show: print the output of the command.
        yes: train on a CPU even if that takes days.

    Raises:
        ConfigError: with all problems, before a weight is loaded.
        UserError: another error that the user can fix; checkpoints are kept.
        Interrupted: Ctrl-C or a request to stop; the last step is saved as a checkpoint.
    """
    configure_torch()
    budget = plan_that_fits(_arguments(config))
    processes = budget.config.launch.num_processes
    if processes > 1:
        message = (
            f"{processes}, but a function trains in its own process only; use the command "
            "`simpletuner train`."
        )
        raise ConfigError([Problem("num_processes", message)])
    budget = with_consent(budget, yes=yes)
    plan = budget.plan
    prepare_output(plan.output_dir)
    with recorded_events(plan, World(), _events(on_event, show)) as events:
        run_checked(budget, events, World(), yes=yes)
    return TrainResult.of(plan)


def plan(
    config: Mapping[str, Any], *, device: str | None = None, device_memory: float | None = None
) -> dict[str, Any]:
    """The document of `simpletuner plan --json`: what a run would do, its duration and its memory.

    If the run does not fit, `ok` is false and `problems` has the reasons.

    Args:
        config: see `train`.
        device: plan for this card, such as "h100" or "4090", instead of this machine's device.
        device_memory: plan for a GPU with this much memory, in GB as on its label.

    Raises:
        ConfigError: with all problems, if they prevent a plan.
    """
    arguments = _arguments(config)
    set_asked_device(arguments, device, device_memory)
    budget = weigh_plan(arguments)
    return json.loads(plan_json(budget, [*budget.plan.warnings, *arguments.problems]))


def sample(
    source: str | os.PathLike[str] | None,
    prompts: Sequence[str],
    *,
    images: Sequence[str | os.PathLike[str]] = (),
    strength: float = 1.0,
    checkpoint: int | str | None = None,
    ema: bool = False,
    output: str | os.PathLike[str] = "samples",
    on_event: Subscriber | None = None,
    show: bool = False,
    **settings: Any,
) -> list[Path]:
    """Render from a result, like `simpletuner sample`; returns the new files.

    Args:
        source: an output folder, a checkpoint or a LoRA file; None for the base model of
            `model_family` or `example`.
        images: source pictures (i2i, i2v).
        strength: strength of the LoRA.
        checkpoint: a step or `latest`; by default the result.
        ema: use the moving average of the weights.
        output: folder for the files.
        on_event, show: see `train`.
        settings: override settings of the run: `resolution`, `frames`, `steps`, `guidance`, `seed`,
            `negative_prompt`, and keys of config.json.

    Raises:
        ConfigError: with all problems, before a weight is loaded.
    """
    if isinstance(prompts, str):
        raise ConfigError([Problem("prompts", f"is a list: [{prompts!r}].")])
    unchecked: Sequence[object] = prompts  # callers may not run a type checker
    for prompt in unchecked:
        if not isinstance(prompt, str):
            message = f"is a list of texts; {prompt!r} is not a text."
            raise ConfigError([Problem("prompts", message)])
    arguments = _arguments(settings, label="settings")
    expand_short_names(arguments)
    strengths = parse_strengths("strength", [strength], arguments.problems)
    request = SampleRequest(
        source=None if source is None else str(source),
        output=str(output),
        arguments=arguments,
        prompts=prompts,
        images=[str(image) for image in images],
        strengths=strengths,
        checkpoints=None if checkpoint is None else [str(checkpoint)],
        ema=ema,
    )
    names = PARAMETERS | {SHORT[key]: key for key in settings if key in SHORT}
    try:
        with checked_samples(request, _events(on_event, show)) as samples:
            return samples.render()
    except ConfigError as error:
        # With the caller's parameter names.
        problems = [
            replace(problem, where=names.get(problem.where, problem.where))
            for problem in error.problems
        ]
        raise ConfigError(problems) from None


def _arguments(config: object, label: str = ARGUMENTS) -> Arguments:
    """The settings in a function argument, called `label` in messages.

    A `config` is a whole configuration, unless it selects one (`example`, `env`, `config`), which
    its other keys then override. The settings of a sample always override those of the run.
    """
    set_environment()
    plain = _as_json(config)
    arguments = replace(command_settings([]), label=label)
    for key in SELECTORS.keys() & plain.keys():
        arguments.selectors[SELECTORS[key]] = str(plain.pop(key))
    is_whole = label == ARGUMENTS and not arguments.selectors
    if is_whole:
        arguments.base = config_from_values(plain)
    else:
        arguments.settings += plain.items()
    return arguments


def _as_json(config: object) -> dict[str, Any]:
    """The dict as in config.json: paths as text, a list of datasets as the name of its file."""
    if not isinstance(config, Mapping):
        message = (
            f"{config!r:.80} is not a dict; for a file write {{'config': 'config/config.json'}}."
        )
        raise ConfigError([Problem("config", message)])
    plain = {}
    for key, value in config.items():
        plain[key] = os.fspath(value) if isinstance(value, os.PathLike) else value
    datasets = plain.get("data_backend_config")
    if isinstance(datasets, list):
        plain["data_backend_config"] = _write_datasets(datasets, plain.get("output_dir"))
    return plain


def _write_datasets(datasets: list[Any], output_dir: object) -> str:
    """Write a list of datasets to a file in the output folder; returns its path.

    A file, since the plan, the record and a resumed run refer to one.
    """
    default: str = all_options()["output_dir"].default
    # The plan reports an output_dir that is not a text.
    folder = Path(output_dir if isinstance(output_dir, str) else default).expanduser()
    prepare_output(folder)
    file = folder / WRITTEN_DATASETS
    write_json(file, datasets)
    return str(file)


@contextmanager
def _events(on_event: Subscriber | None, show: bool) -> Iterator[EventStream]:
    """An event stream with the subscriber, and a display if wanted."""
    setup_logging(None, console=show)
    with closing(make_display()) if show else nullcontext() as display:
        events = EventStream()
        if on_event is not None:
            events.subscribe("on_event", on_event, ends_run=Exception)
        if display is not None:
            events.subscribe("The display", display)
        yield events
